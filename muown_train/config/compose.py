"""The words of a command line and the files of configs/ become one checked configuration: `load_config`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from muown_train.config.overrides import check_overrides, check_trust, quote_text
from muown_train.config.renamed_names import update_overrides
from muown_train.config.run_name import default_run_name
from muown_train.config.schema import RunConfig, parse_config

_PACKAGE = Path(__file__).resolve().parents[1]
# a wheel carries configs/ inside the package, a checkout beside it
CONFIG_DIR = next(
    folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if (folder / "train.yaml").exists()
)
GROUPS = ("model", "optim", "data", "schedule", "tracking", "probes", "experiment")


def register_resolvers() -> None:
    """Register what the configuration files compute: `${not:…}` and `${ns_dtype:…}`."""
    OmegaConf.register_new_resolver("not", lambda value: not value, replace=True)
    # a precision is that of the orthogonalisation too; with auto the optimizer decides by device
    OmegaConf.register_new_resolver("ns_dtype", lambda name: None if name == "auto" else name, replace=True)


def load_config(overrides: Sequence[str]) -> RunConfig:
    """Return the checked configuration of a run.

    Args:
        overrides: the `key=value` words of a command line.

    Raises:
        ValueError, HydraException, OmegaConfBaseException: a word is not an override, or a key or value is wrong.
    """
    overrides = update_overrides(overrides)
    composed = compose_config(overrides, with_hydra=True)
    return check_config(composed, composed.hydra.runtime.choices, overrides)


def check_config(composed: DictConfig, choices: Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Return the checked configuration that Hydra has composed.

    Args:
        choices: the chosen option of each config group.
        overrides: the words of the command line that were composed.
    """
    check_overrides(overrides)
    if OmegaConf.is_list(composed.trust):
        check_trust(composed.trust, overrides)
    settings = OmegaConf.masked_copy(composed, [str(key) for key in composed if key not in ("hydra", "experiment")])
    tree: dict[str, Any] = OmegaConf.to_container(settings, resolve=True)  # type: ignore[assignment]
    return parse_config(tree, default_run_name(choices, overrides, composed.seed))


def compose_config(overrides: Sequence[str], with_hydra: bool = False) -> DictConfig:
    """Compose configs/train.yaml with overrides, unchecked and with interpolations unresolved.

    The key `experiment` is left out: the grid that an experiment's file describes is not a setting of a run.

    Args:
        with_hydra: keep Hydra's own node, which holds the choices.
    """
    register_resolvers()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = compose("train", quote_text(update_overrides(overrides)), return_hydra_config=with_hydra)
    with open_dict(config):
        config.pop("experiment", None)
    return config


def list_keys(overrides: Sequence[str]) -> list[str]:
    """Return every dotted key of the configuration that the choices among these overrides make."""
    options = list_options()
    choices = [override for override in overrides if override.split("=")[0] in options]
    tree = OmegaConf.to_container(compose_config(choices), resolve=False)
    return [key for key, _ in flatten(tree)]


def list_options() -> dict[str, list[str]]:
    """Return the options of every config group."""
    folders = [folder for folder in CONFIG_DIR.rglob("*") if folder.is_dir()]
    options = {f.relative_to(CONFIG_DIR).as_posix(): sorted(path.stem for path in f.glob("*.yaml")) for f in folders}
    return {group: [] for group in GROUPS} | options


def read_first_sentence(text: str) -> str:
    """Return the first sentence of the comment that a configuration file begins with; empty where there is none."""
    lines = [line for line in text.splitlines() if not line.startswith("# @package")]
    comment = lines[0].removeprefix("# ") if lines and lines[0].startswith("#") else ""
    return re.split(r"(?<=\.)\s", comment)[0]


def flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of nested mappings with its value, mappings and their entries both."""
    for key, value in node.items():
        yield prefix + str(key), value
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
