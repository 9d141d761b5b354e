"""Runs as they are kept with the code, in a folder that reports read: what was set, measured and trained, no weights.

    config.yaml, manifest.json    without what is of the machine: see `plain_config` and `plain_manifest`
    metrics.jsonl, status.json    as they are
    analysis/*.jsonl              as they are, where there are any

metrics.jsonl is neither thinned nor rounded: means over training losses and smoothed curves would be others. torch is
not loaded.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from muown_train.config.run_name import defines_run
from muown_train.experiments.grid import Experiment
from muown_train.experiments.progress import Found, progress
from muown_train.runs.record import leaves, read_config
from muown_train.runtime.atomic_files import replace, whole_folder

_OF_MACHINE = ("out", "cache", "name")
_MEASURED = ("probes",)
_COPIED = ("metrics.jsonl", "status.json")
# where a value begins: alone, after `key=`, in a list, in quotes; a path ends with the value
_ABSOLUTE = re.compile(r"(^|[=\[({,'\"]\s*)/+[^,'\"\[\](){}]*")


def archive_experiment(experiment: Experiment, found: Sequence[Found], archive: Path) -> Iterator[tuple[Found, str]]:
    """Archive what is done or diverged.

    A run that the archive has already, under whatever name, is kept there. Another goes to ARCHIVE/NAME, or to
    ARCHIVE/EXPERIMENT/NAME where NAME is taken by a run with other settings, or one that measured other things.

    Args:
        found: runs outside of the archive, of `progress`.

    Yields:
        Each such run, with what has been done.

    Raises:
        ValueError: the archive has another run of the same settings; said before anything is written.
        OSError: it cannot be written.
    """
    ended = [each for each in found if each.state in ("done", "diverged")]
    # one that measures itself is no copy of one that does not
    telling = dataclasses.replace(experiment, same=(*experiment.same, *_MEASURED))
    cells = [dataclasses.replace(e.cell, config={**e.cell.config, **_measuring(e)}) for e in ended]
    there = [each.folder if each.run else None for each in progress(telling, cells, str(archive))]
    places = []
    for each, place in zip(ended, there, strict=True):
        flat = archive / each.folder.name
        own = archive / experiment.folder / each.folder.name
        places.append(place or (own if flat.exists() else flat))
        refuse_other(each.folder, places[-1])
    for each, place in zip(ended, places, strict=True):
        yield each, archive_run(each.folder, place)


def _measuring(found: Found) -> dict[str, Any]:
    """What a run measures, which need not be what was asked for."""
    return {key: found.run.config.get(key) for key in _MEASURED} if found.run else {}


def archive_run(run: Path, destination: Path) -> str:
    """Bring an archived run up to its folder; whole or not at all where it is new.

    Args:
        destination: its folder in the archive, there or not.

    Returns:
        What has been done, in words.

    Raises:
        ValueError: `refuse_other`; NoRun where `run` is none.
        OSError: a file cannot be read or written.
    """
    refuse_other(run, destination)
    files = archived_files(run, destination.name)
    if not destination.exists():
        with whole_folder(destination, lambda folder: refuse_other(run, folder)) as folder:
            for name, content in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content)
        destination.with_name(f".{destination.name}.lock").unlink(missing_ok=True)  # would be committed
        return "archived"
    changed = [name for name, content in files.items() if _content(destination / name) != content]
    for name in changed:
        (destination / name).parent.mkdir(exist_ok=True)
        replace(destination / name, files[name])
    return f"brought up to date: {', '.join(changed)}" if changed else "there already"


def refuse_other(run: Path, destination: Path) -> None:
    """Error if an archived run is another than that in a folder: what they measured in training differs.

    Raises:
        ValueError: it is.
    """
    if destination.exists() and _content(destination / _COPIED[0]) != _content(run / _COPIED[0]):
        raise ValueError(
            f"{destination} has other metrics than {run}: remove the one of them that is not to be kept, or rename it"
        )


def archived_files(run: Path, name: str) -> dict[str, bytes]:
    """What an archived run of that name consists of, by path in its folder.

    Raises:
        NoRun: no config.yaml can be read.
        OSError, ValueError: another file cannot be.
    """
    files = {"config.yaml": OmegaConf.to_yaml(OmegaConf.create(plain_config(read_config(run), name))).encode()}
    manifest = json.loads((run / "manifest.json").read_text())
    files["manifest.json"] = (json.dumps(plain_manifest(manifest), indent=1) + "\n").encode()
    copied = [run / each for each in _COPIED] + sorted((run / "analysis").glob("*.jsonl"))
    return files | {path.relative_to(run).as_posix(): path.read_bytes() for path in copied}


def plain_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Without places: out, cache, name and tracking are neutral, absolute paths elsewhere their last names.

    What defines the run stays, paths too: it would be another run otherwise.
    """
    neutral = {"out": "runs", "cache": None, "name": name, "tracking": None}
    plain = {key: value if defines_run(key) else without_places(value) for key, value in config.items()}
    return plain | {key: value for key, value in neutral.items() if key in config}


def plain_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Without the words of out, cache, name and tracking in its command; absolute paths are their last names.

    Names of machines are in no manifest. Device, versions and number of threads stay: they say what was measured.
    """
    plain = {key: without_places(value) for key, value in manifest.items()}
    keys = tuple(f"{key}{end}" for key in (*_OF_MACHINE, "tracking") for end in "=.")
    return plain | {"command": [word for word in plain.get("command", []) if not word.lstrip("+").startswith(keys)]}


def without_places(value: Any) -> Any:
    """A copy of nested values in whose texts absolute paths are their last names."""
    if isinstance(value, str):
        return _ABSOLUTE.sub(lambda found: found[1] + os.path.basename(found[0].rstrip("/ ")), value)
    if isinstance(value, Mapping):
        return {key: without_places(item) for key, item in value.items()}
    return [without_places(item) for item in value] if isinstance(value, list) else value


def places_that_stay(run: Path) -> list[str]:
    """Settings, as KEY=VALUE, with absolute paths that cannot be left out since they define the run."""
    settings = leaves(read_config(run))
    return [f"{key}={value}" for key, value in settings if defines_run(key) and without_places(value) != value]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
