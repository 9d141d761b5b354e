"""The words of a command line and the files of configs/ become one checked configuration: `load_config`."""

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from muown_train.config.overrides import check_from_command_line, check_overrides, parse_overrides, quote_text
from muown_train.config.renamed_names import update_overrides
from muown_train.config.run_name import default_run_name
from muown_train.config.schema import RunConfig, parse_config

_PACKAGE = Path(__file__).resolve().parents[1]
# a wheel carries configs/ inside the package, a checkout beside it
CONFIG_DIR = next(
    folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if (folder / "train.yaml").exists()
)
GROUPS = ("model", "optim", "data", "schedule", "tracking", "probes", "experiment")
LIST_GROUPS = ("tracking", "probes")  # those of which several options may be chosen, as in probes=[A,B]


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
    check_choices(overrides)
    config, choices = _compose(quote_text(overrides))
    return check_config(config, choices, overrides)


def check_choices(overrides: Sequence[str]) -> None:
    """Refuse a list where one option of a config group is chosen; of LIST_GROUPS there may be several, by name.

    Raises:
        ValueError: naming the override. HydraException: a word is no override.
    """
    options = list_options()
    for override in parse_overrides(overrides):
        value = None if override.is_sweep_override() else override.value()
        key = override.key_or_group
        if key not in options or not isinstance(value, list):
            continue
        names = [option for option in options[key] if option != "none" or key not in LIST_GROUPS]
        if key not in LIST_GROUPS or any(type(each) is not str or each == "none" for each in value):
            kind = "a list of names" if key in LIST_GROUPS else "one of"
            raise ValueError(f"{override.input_line} must be {kind} {', '.join(names)}")


def check_config(composed: DictConfig, choices: Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Return the checked configuration that Hydra has composed.

    Args:
        choices: the chosen option of each config group.
        overrides: the words of the command line that were composed.
    """
    check_overrides(overrides)
    for key in ("trust", "tasks"):
        if OmegaConf.is_list(composed[key]):
            check_from_command_line(key, composed[key], overrides)
    settings = OmegaConf.masked_copy(composed, [str(key) for key in composed if key not in ("hydra", "experiment")])
    tree: dict[str, Any] = OmegaConf.to_container(settings, resolve=True)  # type: ignore[assignment]
    out = os.path.expanduser(tree["out"]) if isinstance(tree["out"], str) else None
    return parse_config(tree, default_run_name(choices, overrides, composed.seed, out))


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Compose configs/train.yaml with overrides, unchecked and with interpolations unresolved.

    The key `experiment` is left out: the grid that an experiment's file describes is not a setting of a run.
    """
    return _compose(quote_text(update_overrides(overrides)))[0]


def _compose(words: Sequence[str]) -> tuple[DictConfig, Mapping[str, Any]]:
    """Return a configuration, and the chosen option of each config group.

    Hydra takes a fifth of a second. Most configurations differ in plain values alone, so those are set, as Hydra sets
    them, in a copy of what it makes of the other words. Where that fails, Hydra gets all words and says what is wrong.
    """
    try:
        parsed = parse_overrides(words)
        values = [override for override in parsed if _sets_value(override)]
        config, choices = _compose_with_hydra(*(str(each.input_line) for each in parsed if not _sets_value(each)))
        config = copy.deepcopy(config)
        for each in values:
            force = each.is_force_add()
            OmegaConf.update(config, each.key_or_group, each.value(), merge=True, force_add=force)
        return config, choices
    except (HydraException, OmegaConfBaseException):
        return copy.deepcopy(_compose_with_hydra(*words))


def _sets_value(override: Override) -> bool:
    """Return whether an override sets a key to a value, and does not choose, add, remove or sweep anything."""
    key = override.key_or_group
    plain = override.type in (OverrideType.CHANGE, OverrideType.FORCE_ADD) and not override.is_sweep_override()
    return plain and override.package is None and "/" not in key and key not in GROUPS and key.split(".")[0] != "hydra"


@cache
def _compose_with_hydra(*words: str) -> tuple[DictConfig, Mapping[str, Any]]:
    register_resolvers()
    with _set_global_hydra_aside(), initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = compose("train", list(words), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
        config.pop("experiment", None)
    return config, choices


@contextmanager
def _set_global_hydra_aside() -> Iterator[None]:
    """Let this program compose inside a context in which Hydra runs its jobs: Hydra is there once for a process."""
    instance = GlobalHydra.instance()
    active = instance.hydra
    instance.clear()
    try:
        yield
    finally:
        if active:
            GlobalHydra.instance().initialize(active)


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
