"""README.md and docs/ are true: Python runs, commands and files exist, tables and the map name what there is."""

import re

import pytest
import yaml

from muown_train.cli.main import COMMANDS
from muown_train.config.compose import CONFIG_DIR
from tests.helpers.paths import ROOT

README = (ROOT / "README.md").read_text()
PAGES = ["README.md", "docs/performance.md", "docs/results.md"]
PACKAGE = ROOT / "muown_train"
TOP_LEVEL = ("muown_train", "scripts", "slurm", "configs", "tests", "docs", "examples")
MAP = re.search(r"```text\n(muown_train/ .*?)```", README, re.DOTALL)[1]


def test_its_code_runs_and_prints_what_it_says(capsys):
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(code, names)
    assert names["optimizer"].param_groups
    assert f"```text\n{capsys.readouterr().out}```" in README


def test_every_model_and_optimizer_is_in_the_tables():
    for group in ("model", "optim"):
        for path in (CONFIG_DIR / group).glob("*.yaml"):
            assert f"\n| `{path.stem}`" in README, path.stem


def test_the_gpu_hours_of_experiments_are_those_of_their_files():
    table = dict(re.findall(r"\n\| `(\w+)` \| \d+ \| ([\d.]+) \|", README))
    assert len(table) > 5
    for name, hours in table.items():
        node = yaml.safe_load((CONFIG_DIR / "experiment" / f"{name}.yaml").read_text())["experiment"]
        assert float(hours) == node["gpu_hours"], name


@pytest.mark.parametrize("page", PAGES)
def test_every_file_it_names_is_there(page):
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    for name in re.findall(r"(?<![\w./])\w+/[\w/]*\w\.(?:py|sbatch|yaml|sh)\b", (ROOT / page).read_text()):
        first = name.split("/")[0]
        if first in TOP_LEVEL:
            assert (ROOT / name).exists(), name
        elif first in rooms and name.endswith(".py"):
            assert (PACKAGE / name).exists(), name


@pytest.mark.parametrize("page", PAGES)
def test_every_command_it_gives_exists(page):
    words = re.findall(r"(?:muown-train|-m muown_train) ([a-z_]\w*)(?![\w.=])", (ROOT / page).read_text())
    assert set(words) <= set(COMMANDS)


def test_every_command_is_in_the_readme():
    assert {name for name in COMMANDS if f"muown-train {name}" in README or f"`{name}`" in README} == set(COMMANDS)


def test_the_map_names_every_file_in_its_place():
    folders: list[str] = []
    named = set()
    for line in MAP.splitlines():
        if entry := re.match(r"( *)(\w+)/ ", line):
            folders[len(entry[1]) // 2 :] = [entry[2]]
        text = line[entry.end() if entry else 0 :]
        named |= {"/".join([*folders, name]) for name in re.findall(r"(?<![\w/*])\w+\.(?:py|sbatch)", text)}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert sorted(modules - named) == []
