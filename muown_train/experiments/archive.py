"""Archiving: the runs of an experiment that ended are copied to archives, which are kept with the code.

An archive (`muown_train.runs.archive_files`) keeps what was set, measured and trained. It keeps no weights, and nothing
that belongs to the machine: see `remove_places_from_config` and `remove_places_from_manifest`. torch is not loaded.
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from muown_train.config.run_name import defines_run
from muown_train.experiments.grid import Grid
from muown_train.experiments.progress import GridPointStatus, same_settings
from muown_train.runs.archive_files import ArchivedRun, RunArchive, list_archives
from muown_train.runs.metrics import MAX_FILE
from muown_train.runs.record import (
    RunRecord,
    get_defining_settings,
    list_settings,
    read_archived_runs,
    read_config,
    read_stored_config,
)
from muown_train.runtime.atomic_files import read_json, read_regular

_MACHINE_KEYS = ("out", "cache", "name", "tracking")
# matches an absolute path from where a value may begin (alone, after `key=`, in a list, in quotes) to the value's end
_ABSOLUTE = re.compile(r"(^|[=\[({,'\"]\s*)/+[^,'\"\[\](){}]*")


def archive_experiment(
    grid: Grid, statuses: Sequence[GridPointStatus], folder: Path
) -> list[tuple[GridPointStatus, str]]:
    """Archive the runs of an experiment that are done or diverged.

    A run that an archive in the folder holds already, whatever its name there, is brought up to date. Another goes to
    the archive of the experiment.

    Args:
        statuses: runs outside of the archives, as `read_progress` returns them.
        folder: of the archives.

    Returns:
        Each such run, with what has been done.

    Raises:
        ValueError: an archive has another run of the same settings; nothing has been written then.
        OSError: a file cannot be read or written.
    """
    ended = [(each, each.run) for each in statuses if each.run and each.state in ("done", "diverged")]
    if not ended:
        return []
    own = folder / grid.folder
    results, updates = [], dict[Path, dict[str, ArchivedRun]]()
    with _lock(folder):
        archives = {archive.path: archive for archive in (RunArchive(own), *list_archives(folder))}
        archived = read_archived_runs(folder)
        taken = {run.folder for run in archived}
        for each, run in ended:
            same = next((other for other in archived if _is_same_run(other, run, grid.same)), None)
            place = same.folder if same else _choose_free_place(own / run.name, taken)
            taken.add(place)
            record, outcome = collect_run(run.folder, place.name), "archived"
            if same:
                record, changes = _update_record(archives[place.parent].get(place.name), record, place, run.folder)
                outcome = f"brought up to date: {', '.join(changes)}" if changes else "there already"
            if not same or changes:
                updates.setdefault(place.parent, {})[place.name] = record
            results.append((each, outcome))
        for path, records in updates.items():
            archives[path].write(records)
    return results


def _is_same_run(archived: RunRecord, run: RunRecord, same: Sequence[str]) -> bool:
    """Return whether an archived run has the settings of another; a run with probes is no copy of one without."""
    one, other = (
        get_defining_settings(record.config) | {key: record.config.get(key) for key in (*same, "probes")}
        for record in (archived, run)
    )
    return archived.seed == run.seed and same_settings(one, other)


def _choose_free_place(place: Path, taken: Container[Path]) -> Path:
    """Return the place of a new run, with a number behind its name where a run with other settings has that name."""
    numbered = (place.with_name(f"{place.name}-{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain([place], numbered) if free not in taken)


def _update_record(old: ArchivedRun, new: ArchivedRun, place: Path, folder: Path) -> tuple[ArchivedRun, list[str]]:
    """Return the updated record of an archived run, and what has changed; analysis that the archive alone has stays.

    Raises:
        ValueError: their metrics differ, so these are two runs of the same settings.
    """
    if old.files.get("metrics.jsonl") != new.files["metrics.jsonl"]:
        raise ValueError(
            f"{place} has other metrics than {folder}, with the same settings: move the folder away to keep the "
            f"archived run, or delete {place.name} from {place.parent}.json to replace it"
        )
    return dataclasses.replace(new, files=old.files | new.files), old.list_changes(new)


def collect_run(folder: Path, name: str) -> ArchivedRun:
    """Read from a run's folder what an archive keeps of it.

    Args:
        name: of the run in the archive.

    Raises:
        NoRun: its config.yaml cannot be read.
        OSError, ValueError: another file cannot be read.
    """
    paths = [folder / "metrics.jsonl", *sorted((folder / "analysis").glob("*.jsonl"))]
    return ArchivedRun(
        remove_places_from_config(read_stored_config(folder), name),
        remove_places_from_manifest(read_json(folder / "manifest.json")),
        read_json(folder / "status.json"),
        {path.relative_to(folder).as_posix(): read_regular(path, MAX_FILE) for path in paths},
    )


def remove_places_from_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration without places of the machine.

    `out`, `cache`, `name` and `tracking` become neutral, and absolute paths elsewhere are cut to their last names.
    Settings that define the run stay as they are, paths too: it would be another run otherwise.
    """
    neutral = {"out": "runs", "cache": None, "name": name, "tracking": None}
    plain = {key: value if defines_run(key) else cut_absolute_paths(value) for key, value in config.items()}
    return plain | {key: value for key, value in neutral.items() if key in config}


def remove_places_from_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without places of the machine.

    Its command loses the words of `out`, `cache`, `name` and `tracking`, and absolute paths are cut to their last
    names. A manifest never names machines. Device, versions and number of threads stay: they say what was measured.
    """
    plain = {key: cut_absolute_paths(value) for key, value in manifest.items()}
    keys = tuple(f"{key}{end}" for key in _MACHINE_KEYS for end in "=.")
    return plain | {"command": [word for word in plain.get("command", []) if not word.lstrip("+").startswith(keys)]}


def cut_absolute_paths(value: Any) -> Any:
    """Return a copy of nested values in whose texts only the last names of absolute paths are left."""
    if isinstance(value, str):
        return _ABSOLUTE.sub(lambda match: match[1] + os.path.basename(match[0].rstrip("/ ")), value)
    if isinstance(value, Mapping):
        return {key: cut_absolute_paths(item) for key, item in value.items()}
    return [cut_absolute_paths(item) for item in value] if isinstance(value, list) else value


def list_kept_places(folder: Path) -> list[str]:
    """Return the settings, as KEY=VALUE, whose absolute paths an archive keeps since they define the run."""
    settings = list_settings(read_config(folder))
    return [f"{key}={value}" for key, value in settings if defines_run(key) and cut_absolute_paths(value) != value]


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other processes from changing the archives in a folder, whose changes would be lost.

    Raises:
        ValueError: another process is changing them.
    """
    from filelock import FileLock, Timeout  # those who only read archives do not need it

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    try:
        with FileLock(path, timeout=0):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # otherwise it would be committed
    except Timeout:
        raise ValueError(f"another process archives runs to {folder}: wait for it and repeat the command") from None
