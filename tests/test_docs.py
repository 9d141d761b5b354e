"""README.md and docs/ are true: what they show runs, and links, files, tables and the map name what there is."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from muown_train.cli.main import COMMANDS
from muown_train.config.compose import CONFIG_DIR
from tests.cli.test_main import call
from tests.helpers.commands import check_command, put_programs_on_path
from tests.helpers.documents import LANGUAGES, PAGES, Block, list_anchors, make_slug, read_blocks, split_commands
from tests.helpers.paths import ROOT

README, DOCS = ROOT / "README.md", ROOT / "docs"
PACKAGE = ROOT / "muown_train"
TOP_LEVEL = ("muown_train", "scripts", "slurm", "configs", "tests", "docs", "examples")
MAP = re.search(r"```text\n(muown_train/ .*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)[1]
every_file = pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.stem
)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def run_python(block: Block, names: dict) -> None:
    exec(compile(block.content, block.place, "exec"), names)


def find_output(blocks: list[Block], block: Block) -> str:
    """What the page says that a block of Python prints."""
    after = blocks[blocks.index(block) + 1]
    assert after.language == "text", f"{block.place} prints, but no text follows it"
    return after.content


# what is shown


@every_page
def test_its_python_runs_and_prints_what_it_says(page, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in (blocks := read_blocks(page)):
        if block.language != "python" or any(map(block.list_notes, ("skip", "slow", "quotes"))):
            continue
        run_python(block, {"__name__": "a_file"} if block.list_notes("file") else names)
        if printed := capsys.readouterr().out:
            assert printed == find_output(blocks, block)


@every_page
def test_its_commands_are_right(page):
    for block in read_blocks(page):
        assert block.language in LANGUAGES, block.place
        shown = block.content if block.language == "bash" else ""
        shown += "\n".join(command for command, output in block.list_commands() if not output.startswith("error:"))
        for words in split_commands(shown):
            try:
                check_command(words)
            except BaseException as error:
                raise AssertionError(f"{block.place}: {' '.join(words)}: {error}") from error


@every_page
def test_commands_in_its_sentences_are_right(page):
    text = re.sub(r"(?ms)^```.*?^```|<!--.*?-->", "", page.read_text())
    for shown in re.findall(r"`((?:muown-train|python scripts/|pip install)[^`]*)`", text):
        words = " ".join(shown.split())
        if not re.search(r"…|\b[A-Z]{2,}\b|^muown-train( \w+)?$|reproduce$", words):
            for command in split_commands(words):
                check_command(command)


@every_page
def test_its_quotes_are_lines_of_the_file(page):
    for block in read_blocks(page):
        for path in block.list_notes("quotes"):
            lines = {line.strip() for line in (ROOT / path).read_text().splitlines()}
            assert [line for line in block.content.splitlines() if line.strip() not in lines] == [], block.place


@every_page
def test_an_error_that_it_shows_is_what_is_said(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for block in read_blocks(page):
        for command, output in block.list_commands():
            words = split_commands(command)[0]
            if output.startswith("error:") and "runs" not in command and "import" not in words:
                assert call(monkeypatch, *words[1:]) == (2, output), block.place


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a page has up to a dozen commands, of seconds each
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.language in ("bash", "console") for block in read_blocks(page))],
    ids=lambda page: page.stem,
)
def test_what_it_shows_really_runs(page, monkeypatch, tmp_path, tmp_path_factory, capsys):
    cache = Path(os.environ.get("XDG_CACHE_HOME") or tmp_path_factory.getbasetemp().parent) / "docs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))  # shared, since the tokenizer of the default data takes seconds
    put_programs_on_path(monkeypatch, tmp_path / "bin")
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("scripts", "examples", "docs", "configs"):
        (folder / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)
    names: dict = {}
    for block in (blocks := read_blocks(page)):
        if block.list_notes("skip") or block.list_notes("quotes"):
            continue
        for command in block.list_notes("first"):
            run_bash(block, command)
        for path in block.list_notes("file"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(block.content)
        if block.language == "bash":
            run_bash(block, block.shrink(block.content))
        elif block.language == "console":
            for command, output in block.list_commands():
                run_bash(block, block.shrink(command), output)
        elif block.language == "python" and not block.list_notes("file"):
            run_python(block, names)
            if printed := capsys.readouterr().out:
                assert printed == find_output(blocks, block)


def run_bash(block: Block, text: str, output: str = "") -> None:
    """Run lines of bash. An error that is shown must be said; other commands must succeed."""
    command = ["bash", "-e", "-o", "pipefail", "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if output.startswith("error:"):
        assert (done.returncode, done.stderr) == (2, output), block.place
        return
    assert done.returncode == 0, f"{block.place}: {text}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    if "prints exactly" in block.notes:
        assert done.stdout == output, block.place


# links, files and names


@every_file
def test_its_links_and_anchors_exist(page):
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in list_anchors(file), f"{page.name}: {target}"


@every_page
def test_an_anchor_is_the_same_on_the_site(page):
    toc = pytest.importorskip("markdown.extensions.toc")
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    slugs = [toc.slugify(heading.replace("`", ""), "-") for heading in headings]
    assert slugs == [make_slug(heading) for heading in headings]


@every_file
def test_every_file_it_names_is_there(page):
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    for name in re.findall(r"(?<![\w./])\w+/[\w/]*\w\.(?:py|ipynb|sbatch|yaml|sh|md)\b", page.read_text()):
        first = name.split("/")[0]
        if name == "data/cached_fineweb10B.py" or "NAME" in name:  # another project's, and a name to fill in
            continue
        if first in TOP_LEVEL:
            assert (ROOT / name).exists(), name
        elif first in rooms and name.endswith(".py"):
            assert (PACKAGE / name).exists(), name


@every_file
def test_every_command_it_gives_exists(page):
    words = re.findall(r"(?:muown-train|-m muown_train) ([a-z_]\w*)(?![\w.=])", page.read_text())
    assert set(words) <= set(COMMANDS)


def test_every_page_is_in_the_readme_and_on_the_site():
    pages = {page.name for page in DOCS.glob("*.md")}
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", README.read_text()))
    assert pages - linked == {"index.md", "changelog.md"}
    site = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert site == pages


# the front page


def test_the_readme_is_short_and_begins_with_its_two_commands():
    lines = README.read_text().splitlines()
    assert len(lines) <= 250
    assert 'pip install -e ".[train]" && python -m muown_train' in lines[:20]
    assert 'pip install -e ".[dev]" && pytest' in lines[:20]


def test_every_model_and_optimizer_is_in_the_tables():
    for group in ("model", "optim"):
        for path in (CONFIG_DIR / group).glob("*.yaml"):
            assert f"\n| `{path.stem}`" in README.read_text(), path.stem


def test_every_command_is_in_the_readme():
    text = README.read_text()
    assert {name for name in COMMANDS if f"muown-train {name}" in text or f"`{name}`" in text} == set(COMMANDS)


# pages that repeat what the repository says


def test_the_page_of_settings_is_that_of_the_configuration_files():
    script = runpy.run_path(str(ROOT / "docs" / "write_settings.py"))
    assert script["PAGE"].read_text() == script["format_page"](), "run python docs/write_settings.py"


def test_the_gpu_hours_of_experiments_are_those_of_their_files():
    table = dict(re.findall(r"\n\| `(\w+)` \| \d+ \| ([\d.]+) \|", (DOCS / "reproduce.md").read_text()))
    assert len(table) > 5
    for name, hours in table.items():
        node = yaml.safe_load((CONFIG_DIR / "experiment" / f"{name}.yaml").read_text())["experiment"]
        assert float(hours) == node["gpu_hours"], name


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


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Muown" in (tmp_path / "api" / "index.html").read_text()
