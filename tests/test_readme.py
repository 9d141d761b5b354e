"""The README is true: its Python runs, and its tables name what there is."""

import re

from muown_train.config.compose import CONFIG_DIR
from tests.helpers.paths import ROOT

README = (ROOT / "README.md").read_text()


def test_the_example_runs():
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    names: dict = {}
    exec(example, names)
    assert names["optimizer"].param_groups


def test_every_model_and_optimizer_is_in_the_tables():
    for group in ("model", "optim"):
        for path in (CONFIG_DIR / group).glob("*.yaml"):
            assert f"\n| `{path.stem}`" in README, path.stem


def test_every_file_it_names_is_there():
    root = CONFIG_DIR.parent
    for name in re.findall(r"(?:scripts|slurm)/\w+\.\w+", README):
        assert (root / name).exists(), name
