"""Names and folders of runs: the default name tells two settings apart, and no name leads out of the folder of runs."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muown_train.config.overrides import parse_overrides
from muown_train.runtime.redaction import redact

# keys and sections that do not change a result, and so never enter a run's default name
NOT_IN_NAME = (
    *("name", "out", "cache", "tracking", "log_every", "keep_checkpoints", "keep_every", "keep_best", "on_save_error"),
    *("time_limit", "give_up_after", "replica_check_every", "probes", "probe_every", "sample_tokens", "sample_every"),
    *("profile_steps", "device", "parallel", "shard_optimizer", "model.activation_checkpointing", "workers"),
    *("tasks", "eval_tasks_every", "eval_tasks_limit", "trust", "hydra"),
)
_FILES = (  # what a run writes into its folder, some of it at its end only
    *(".lock", "config.yaml", "manifest.json", "tokenizer.json", "status.json", "starts.jsonl", "wandb_id"),
    *("metrics.jsonl", "metrics.rolled_back.jsonl", "events.jsonl", "loss.png"),
)
_MAX_LENGTH = 120  # characters of the name of a run of a grid; file systems allow 255
_VARIED = ("seed=", "optim.")  # beginnings of the settings that vary most often between runs
_MAX_DEFAULT, _MAX_BEGIN = 59, 30  # characters of a default name, and of the choices that it then begins with
_ALLOWED = "A-Za-z0-9._=+,-"  # characters of a run's name


def default_run_name(choices: Mapping[str, Any], overrides: Iterable[str], seed: int, out: str | None = None) -> str:
    """Return a run's default name: its choices and every other override, so that two settings never share a folder.

    A name that would have more than 59 letters holds the seed, the optimizer's and the short settings, which are those
    that vary in a sweep, and a digest of all. Earlier versions gave longer names: a run that has one in `out` keeps it.

    Args:
        choices: the chosen option of each config group.
        overrides: the words of the command line, such as `optim.lr=1e-2`. With `checkpoint=` the name begins with that
            of the checkpoint's run, which replaces the choices and the seed.
        out: the folder of all runs, if it is known.
    """
    overrides = list(overrides)
    skipped = ("model", "optim", "seed", "checkpoint")
    given = [(key, word) for key, word in list_naming_overrides(overrides) if key not in skipped]
    parsed = reversed(parse_overrides(overrides))
    checkpoint = next((override.value() for override in parsed if override.key_or_group == "checkpoint"), None)
    first, last = [choices["model"], choices["optim"]], [f"seed={seed}"]
    if checkpoint is not None:
        first, last = [_name_source_run(str(checkpoint))], []
    name = _make_default_name(first, [*(_shorten_path(key, word) for key, word in given), *last])
    earlier = make_folder_name([*first, *(word for _, word in given), *last])
    if out and earlier != name and Path(out, earlier).is_dir() and not Path(out, name).exists():
        return earlier
    return name


def _make_default_name(first: Sequence[str], settings: Sequence[str]) -> str:
    """Join the parts of a name; one that is too long leaves out its longest settings, and has a digest of all."""
    name = make_folder_name([*first, *settings])
    if len(name) <= _MAX_DEFAULT:
        return name
    digest = hashlib.sha256("-".join([*first, *settings]).encode()).hexdigest()[:8]
    plain = [re.sub(f"[^{_ALLOWED}]+", "_", redact(setting)) for setting in settings]
    begin = re.sub(f"[^{_ALLOWED}]+", "_", redact("-".join(first)))[:_MAX_BEGIN]
    room, kept = _MAX_DEFAULT - len(f"{begin}-{digest}"), set[str]()
    for setting in sorted(plain, key=lambda setting: (not setting.startswith(_VARIED), len(setting))):
        room -= len(setting) + 1
        if room < 0:
            break
        kept.add(setting)
    return "-".join([begin, *(setting for setting in plain if setting in kept), digest])


def _shorten_path(key: str, word: str) -> str:
    """Return `key=value` with a path below this folder relative to it, so that it names the same run either way."""
    path = word.partition("=")[2]
    if key != "init_from" or not os.path.isabs(path):
        return word
    relative = os.path.relpath(path)
    return word if relative.startswith("..") else f"{key}={relative}"


def list_naming_overrides(overrides: Iterable[str]) -> list[tuple[str, str]]:
    """Return the key and `key=value` of each override that tells runs apart, sorted by key."""
    settings = {}
    for override in parse_overrides(overrides):
        key = override.key_or_group
        if override.package is not None:  # another use of a config group, as +data@data.sources.web=files
            key = f"{key}@{override.package}"
        if key not in NOT_IN_NAME and re.split("[./]", key)[0] not in NOT_IN_NAME:
            value = override.value()
            settings[key] = f"{value:g}" if isinstance(value, float) else override.get_value_element_as_str()
    return [(key, f"{key}={value}") for key, value in sorted(settings.items())]


def make_folder_name(parts: Iterable[Any]) -> str:
    """Join parts to a plain name; where characters are replaced or cut off, a digest keeps names apart."""
    full = "-".join(map(str, parts))
    name = re.sub(f"[^{_ALLOWED}]+", "_", redact(full))
    if name != full or len(name) > _MAX_LENGTH:
        name = f"{name[:_MAX_LENGTH]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"
    return name


def defines_run(key: str) -> bool:
    """Return whether a dotted key tells runs apart; two runs that differ in other keys alone are the same run."""
    return not any(key == other or key.startswith(f"{other}.") for other in NOT_IN_NAME)


def _name_source_run(checkpoint: str) -> str:
    """Name the run of a checkpoint: runs/NAME -> NAME; runs/NAME/checkpoints/step-00000100 -> NAME-step=100."""
    path = Path(os.path.abspath(checkpoint))
    if step := re.fullmatch(r"step-0*(\d+)", path.name):
        return f"{path.parent.parent.name}-step={step.group(1)}"
    return path.name


def check_run_name(name: Any) -> str:
    """Return a run's name as text, provided that it stays inside the folder of runs.

    Raises:
        ValueError: it is not a plain folder name, or it contains a secret.
    """
    if not re.fullmatch(f"[{_ALLOWED}]{{1,200}}", str(name)) or str(name)[0] in ".-":
        shown = repr(name) if len(str(name)) <= 200 else f"{str(name)[:40]!r}… ({len(str(name))} characters)"
        raise ValueError(f"name={shown} must be a plain folder name of up to 200 letters, digits and . _ = + , -")
    if redact(str(name)) != str(name):
        raise ValueError("name holds a secret, which would be the name of a folder: give another")
    return str(name)


def check_new_folder(out: Path) -> None:
    """Check that a command may write a run to its --out.

    Raises:
        ValueError: the folder exists and is not empty, or its name cannot be that of a run.
    """
    try:
        check_run_name(out.name)
    except ValueError as error:
        raise ValueError(f"{error}: give another folder with --out") from None
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out} exists: give another folder with --out, or remove it")


def locate_run_folder(out: str, name: str) -> Path:
    """Return the folder of a run, OUT/NAME, whether it exists or not.

    Raises:
        ValueError: the name is not allowed (see `check_run_name`); the folder, or an entry of it or of its
            checkpoints, is a symbolic link, through which files elsewhere would change; or something else stands where
            the run has its folder or writes a file.
    """
    folder = Path(out) / check_run_name(name)
    for path in (folder, *folder.glob("*"), *folder.glob("checkpoints/*"), *folder.glob("checkpoints/*/*")):
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link: replace it by what it links to, or give another name or out")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, and must be the folder of the run: give another name")
    for path in (folder / name for name in _FILES):
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} must be a file, which the run writes: move what is there, or give another name")
    return folder
