"""The command line's side of a configuration: where the files are, a run's name, errors in one sentence."""

import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser  # no other way to know its flags
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from muown_train.cli.process import unread
from muown_train.runtime.redaction import redacted
from muown_train.runtime.suggest import close_key, misread, nearest

_PACKAGE = Path(__file__).resolve().parents[1]
# installed from a wheel the files lie in the package, in a checkout beside it
CONFIG_DIR = next(
    folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if (folder / "train.yaml").exists()
)
GROUPS = ("model", "optim", "data", "schedule", "tracking", "probes", "experiment")
NOT_IN_NAME = (
    "name",
    "out",
    "cache",
    "tracking",
    "log_every",
    "keep_checkpoints",
    "keep_every",
    "keep_best",
    "on_save_error",
    "time_limit",
    "give_up_after",
    "check_every",
    "probes",
    "probe_every",
    "sample_tokens",
    "shard_optimizer",
    "model.checkpointed",
    "workers",
    "trust",
    "hydra",
)
# facts about a run's data that tell them from others
DATA_IDENTITY = ("content", "tokenizer_hash", "revision", "held_out_content")
_LONGEST_NAME = 120  # of those made here; a file system allows 255
_NAME = "A-Za-z0-9._=+,-"  # what a run's name may consist of


def register_resolvers() -> None:
    """What the configuration files compute: `${not:…}` and `${ns_dtype:…}`."""
    OmegaConf.register_new_resolver("not", lambda value: not value, replace=True)
    # a precision means the orthogonalisation too; with auto the optimizer decides by device
    OmegaConf.register_new_resolver("ns_dtype", lambda name: None if name == "auto" else name, replace=True)


def composed(overrides: list[str]) -> DictConfig:
    """The configuration of the command line's overrides, for programs that are not started by Hydra."""
    register_resolvers()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return one_run(compose("train", plain_text(overrides)))


def one_run(config: DictConfig) -> DictConfig:
    """Without `experiment`, the grid that an experiment's file describes: it is no setting of a run."""
    with open_dict(config):
        config.pop("experiment", None)
    return config


def run_name(choices: Mapping[str, Any], overrides: list[str], seed: int) -> str:
    """The default name of a run: its choices and every other override, so that two settings never share a folder.

    Args:
        choices: chosen option of each config group.
        overrides: of the command line, such as `optim.lr=1e-2`. With `checkpoint=` the name begins with that of its run
            in place of choices and seed, which are that run's.
    """
    given = [part for key, part in given_in_name(overrides) if key not in ("model", "optim", "seed", "checkpoint")]
    checkpoint = next((o.value() for o in reversed(parsed(overrides)) if o.key_or_group == "checkpoint"), None)
    if checkpoint is None:
        return folder_name([choices["model"], choices["optim"], *given, f"seed={seed}"])
    return folder_name([_run_of(str(checkpoint)), *given])


def given_in_name(overrides: list[str]) -> list[tuple[str, str]]:
    """The key and `key=value` of each override that tells runs apart, in the order of keys."""
    settings = {}
    for override in parsed(overrides):
        key = override.key_or_group
        if key not in NOT_IN_NAME and re.split("[./]", key)[0] not in NOT_IN_NAME:
            value = override.value()
            settings[key] = f"{value:g}" if isinstance(value, float) else override.get_value_element_as_str()
    return [(key, f"{key}={value}") for key, value in sorted(settings.items())]


def folder_name(parts: Iterable[Any]) -> str:
    """A plain name of these parts; a digest keeps names apart where something is lost."""
    full = "-".join(map(str, parts))
    name = re.sub(f"[^{_NAME}]+", "_", redacted(full))
    if name != full or len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"
    return name


def defines_run(key: str) -> bool:
    """Whether a key of the configuration, dotted, tells runs apart: two that differ in others alone are one."""
    return not any(key == other or key.startswith(f"{other}.") for other in NOT_IN_NAME)


def _run_of(checkpoint: str) -> str:
    """runs/NAME -> NAME; runs/NAME/checkpoints/step-00000100 -> NAME-step=100."""
    path = Path(os.path.abspath(checkpoint))
    if step := re.fullmatch(r"step-0*(\d+)", path.name):
        return f"{path.parent.parent.name}-step={step.group(1)}"
    return path.name


def check_name(name: Any) -> str:
    """A run's name that stays inside the folder of runs.

    Raises:
        ValueError: it is no plain folder name.
    """
    if not re.fullmatch(f"[{_NAME}]{{1,200}}", str(name)) or str(name)[0] in ".-":
        shown = repr(name) if len(str(name)) <= 200 else f"{str(name)[:40]!r}… ({len(str(name))} characters)"
        raise ValueError(f"name={shown} must be a plain folder name of up to 200 letters, digits and . _ = + , -")
    if redacted(str(name)) != str(name):
        raise ValueError("name holds a secret, which would be the name of a folder: give another")
    return str(name)


def new_folder(out: Path) -> None:
    """Check that a script may write a run to its --out.

    Raises:
        ValueError: it is there already and not empty, or its name is none of a run.
    """
    try:
        check_name(out.name)
    except ValueError as error:
        raise ValueError(f"{error}: give another folder with --out") from None
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out} exists: give another folder with --out, or remove it")


def run_folder(out: str, name: str) -> Path:
    """The folder of a run, OUT/NAME, there or not; nothing in it leads out of it, or files elsewhere would change.

    Raises:
        ValueError: `check_name`; or it, or an entry of it or of its checkpoints, is a symbolic link.
    """
    folder = Path(out) / check_name(name)
    for path in (folder, *folder.glob("*"), *folder.glob("checkpoints/*"), *folder.glob("checkpoints/*/*")):
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link: replace it by what it links to, or give another name or out")
    return folder


def one_sentence(error: BaseException, overrides: list[str]) -> str:
    """What went wrong, for a person: unwrapped from Hydra's layers, with the nearest name that exists, no secrets."""
    return redacted(_sentence(error, overrides))


def _sentence(error: BaseException, overrides: list[str]) -> str:
    text = str(error)
    groups = _groups()
    for i, override in enumerate(overrides):
        if not _parses(override):
            return misread(overrides, i)
        if override.endswith("=") and overrides[i + 1 : i + 2] and "=" not in overrides[i + 1]:
            return misread(overrides, i + 1)
        key, _, chosen = override.partition("=")
        group = key.lstrip("+")
        several = group == "probes" and chosen.startswith("[")
        for option in chosen.strip("[] ").split(",") if several else [chosen]:
            option = option.strip()
            if group in groups and option not in groups[group] and not (several and not option):
                others = ", ".join(groups[group]) or "none"
                return f"there is no {key}={option}{nearest(option, groups[group])}; there are {others}"
    if ambiguous := re.search(r"Ambiguous value for argument '([^=]+)=(.*)'", text):
        key, value = ambiguous.groups()
        return f"{key}={value}: text with a comma is \"{key}='{value}'\", a list '{key}=[{value}]'"
    if unknown := re.search(r"Could not override '([^']+)'", text):
        key, known = unknown.group(1), known_keys(overrides)
        if key not in known:
            return _no_key(key, known)
        entries = [name for name in known if name.startswith(f"{key}.")]  # a mapping was given for it
        return f"a key of {key} is not among {', '.join(entries)}; further ones are given as +{key}.KEY=VALUE"
    while error.__cause__ is not None and type(error).__module__.startswith(("hydra", "omegaconf")):
        error = error.__cause__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'a file'}: the disk is full: make room, and the same command goes on"
    if isinstance(error, BrokenPipeError) and unread():
        return "nobody reads what it prints any more"
    lines = [line for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OSError) and error.filename is not None:
        lines = [f"{error.filename}: {error.strerror}"]
    return lines[0] if lines else type(error).__name__


def _no_key(key: str, known: list[str]) -> str:
    if "/" in key:
        return f"there is no group {key}{nearest(key, (group for group in _groups() if '/' in group))}"
    elsewhere = _keys_of_options()
    if key in elsewhere:
        return f"there is no key {key} with the options chosen; {elsewhere[key]} has it"
    known = [name for name in known if not name.rpartition(".")[2].startswith("_")]
    found = close_key(key, [*known, *elsewhere])
    if found:
        of = "" if found in known else f", of {elsewhere[found]}"
        return f"there is no key {key} (did you mean {found}{of}?)"
    return f"there is no key {key}; --help shows the most used, python -m muown_train --cfg job all"


def _keys_of_options() -> dict[str, str]:
    """Every key that some option of a config group brings, dotted, with that option; in YAML as it is written."""
    found: dict[str, str] = {}
    for group, options in _groups().items():
        for option in options if group != "experiment" else ():  # an experiment sets keys of the others
            text = (CONFIG_DIR / group / f"{option}.yaml").read_text()
            prefix = "" if text.startswith("# @package _global_") else group.replace("/", ".") + "."
            keys = dotted(OmegaConf.to_container(OmegaConf.create(text), resolve=False) or {}, prefix)
            found |= {key: f"{group}={option}" for key, _ in keys if not re.search(r"(^|\.)(_|defaults)", key)}
    return found


def check_flags(words: Sequence[str]) -> None:
    """Refuse what begins with a dash and is no flag of Hydra's, which itself would answer with its usage.

    Args:
        words: of the command line.

    Raises:
        ValueError: naming it, with the setting or the flag that was meant.
    """
    parser = get_args_parser()
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for word in words:
        key, equals, value = word.lstrip("-").partition("=")
        is_setting = equals or key in (*GROUPS, *known_keys([])) if word.startswith("-") else False
        if is_setting and f"--{key}" not in flags and word not in flags:
            raise ValueError(f"{word} is no flag: settings have no dashes, as in {key}={value or '…'}")
    parser.error = _refused  # type: ignore[method-assign]
    for word in parser.parse_known_args(words)[1]:
        if word.startswith("-"):
            raise ValueError(f"there is no flag {word}{nearest(word, flags)}; see --help")
        raise ValueError(f"{word} stands apart from other settings: flags go before or after all of them")


def _refused(message: str) -> NoReturn:
    raise ValueError(f"{message}; see --help")


def check_overrides(overrides: Iterable[str]) -> None:
    """Refuse what Hydra would allow and no configuration survives: removing a key.

    Raises:
        ValueError: naming it.
    """
    for override in overrides:
        if override.startswith("~"):
            raise ValueError(f"{override}: settings cannot be removed, give another value")


def check_trust(trust: Iterable[str], overrides: Iterable[str]) -> None:
    """Refuse names to trust that a file brought along: only who runs the program can tell what code is theirs.

    Args:
        trust: of the composed configuration.
        overrides: of the command line.

    Raises:
        ValueError: naming those that the command line does not give.
    """
    given = [override.value() for override in parsed(overrides) if override.key_or_group == "trust"]
    if list(trust) != (given[-1] if given else []):
        raise ValueError(f"trust={list(trust)} counts only on the command line, which has trust={given}")


def _groups() -> dict[str, list[str]]:
    """The options of every config group."""
    folders = [folder for folder in CONFIG_DIR.rglob("*") if folder.is_dir()]
    found = {f.relative_to(CONFIG_DIR).as_posix(): sorted(path.stem for path in f.glob("*.yaml")) for f in folders}
    return {group: [] for group in GROUPS} | found


def _parses(override: str) -> bool:
    try:
        parsed([override])
    except HydraException:
        return False
    return True


def parsed(overrides: Iterable[str]) -> list[Override]:
    """Words of a command line as Hydra understands them once `plain_text` is quoted."""
    return OverridesParser.create().parse_overrides(plain_text(overrides))


def plain_text(overrides: Iterable[str]) -> list[str]:
    """Words of a command line, with quotes for Hydra around values that are text but that its grammar cannot read.

    Names of runs have `=` in them, and names of files letters of any language.
    """
    quoted = []
    for override in overrides:
        key, _, value = override.partition("=")
        if re.fullmatch(r"[\w./+=@%~ *?,()-]+", value):
            try:
                OverridesParser.create().parse_override(override)
            except HydraException:
                override = f"{key}='{value}'"
        quoted.append(override)
    return quoted


def known_keys(overrides: list[str]) -> list[str]:
    """Every key, dotted, of the configuration with the choices among these overrides."""
    groups = _groups()
    choices = [o for o in overrides if o.split("=")[0] in groups]
    return [key for key, _ in dotted(OmegaConf.to_container(composed(choices), resolve=False))]


def dotted(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of nested mappings, dotted, with its value; of a mapping also those of its entries."""
    for key, value in node.items():
        yield prefix + str(key), value
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")
