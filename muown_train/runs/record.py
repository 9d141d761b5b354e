"""Records of runs, as tables and figures read them: settings, manifest, state and metrics.

A record is read from a run's folder (config.yaml, manifest.json, status.json and metrics.jsonl), which may still be in
training, or from an archive of runs (`archive_files`). Nothing is changed, and torch is not loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import yaml

from muown_train.config.compose import flatten
from muown_train.config.renamed_names import update_stored_config
from muown_train.config.resume_check import DATA_IDENTITY
from muown_train.config.run_name import defines_run
from muown_train.config.stored_files import COUNT, MAPPING, NUMBER, TEXT, Kind, allow_null, check_entries
from muown_train.runs.archive_files import RunArchive, list_archives
from muown_train.runs.metrics import Line, parse_metrics
from muown_train.runs.status import read_status
from muown_train.runtime.atomic_files import check_depth, open_regular, read_regular, try_read_json

SMOOTHED = 0.02  # share of a run's steps over which a smoothed training loss is averaged
ABSENT = "—"  # stands in tables for a missing value

# settings that older runs lack: the end of the `_target_` they belong to, and the default that those runs used
_ADDED_LATER: dict[str, tuple[str | tuple[str, ...], Any]] = {
    "model.init_std": ("GPT", 0.02),
    "optim.magnitude_lr_scale": ("Muown", 1.0),
    "data.end_of_text": (("files", "hub_stream", "shards"), None),
    "data.special_tokens": (("files", "hub_stream", "shards"), False),
    "data.bos": (("files", "hub_stream", "shards", "stdlib", "random_tokens"), False),
    "data.on_bad_file": ("files", "error"),
}
# The seed tells runs of one setting apart. `paper_exact` acts through `optim.row_blocks` alone, which is compared: for
# an optimizer that always takes blocks apart, such as Muown, it changes nothing.
_DEFINES_NO_SETTING = ("seed", "paper_exact")
_MAX_CONFIG = 1 << 20  # bytes of config.yaml, which takes a microsecond a byte to read
_TAIL_BYTES = 10_000  # bytes at the end of metrics.jsonl that usually hold the last value of every key
_YamlLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # OmegaConf's own takes a tenth of a second for a file

# settings that tables compute with, or that name code
_CONFIG: dict[str, Kind] = {
    "model|data|optim|schedule": MAPPING,
    "batch_tokens|seq_len|seed": COUNT,
    "tokens|tokens_per_parameter": allow_null(NUMBER),
    "name": allow_null(TEXT),
}
_MANIFEST: dict[str, Kind] = {"data|settings": MAPPING, "ranks|parameters": COUNT, "device": TEXT}

Series = tuple[np.ndarray, np.ndarray]  # two arrays of float64 (N,)


class NoRun(ValueError):
    """A path is not that of a run."""


@dataclass(frozen=True)
class RunRecord:
    """The record of one run, in its own folder or in an archive."""

    folder: Path  # ARCHIVE/NAME for a run in an archive, where there is no such folder
    config: dict[str, Any]  # resolved, with today's names of settings
    manifest: dict[str, Any]
    status: dict[str, Any]
    archive: RunArchive | None = None

    @cached_property
    def columns(self) -> dict[str, Series]:
        """The numbers of metrics.jsonl: for each key the indices of the lines that have it, and its values.

        A NaN among the values is one that the run met and wrote.
        """
        return _collect_columns(self.read_lines("metrics.jsonl"))

    @cached_property
    def _tail(self) -> dict[str, Series]:
        """The columns of the end of metrics.jsonl, which is all that a list of many runs needs."""
        return _collect_columns(self.read_lines("metrics.jsonl", _TAIL_BYTES))

    def read_lines(self, path: str, last: int | None = None) -> list[Line]:
        """Return the lines of a file of the run, or those in its last `last` bytes; [] if it has no such file.

        Args:
            path: relative to the run's folder, such as metrics.jsonl or analysis/spectral.jsonl.
        """
        try:
            with self._open(path) as file:
                return parse_metrics(file, last)
        except FileNotFoundError:
            return []

    def _open(self, path: str) -> BinaryIO:
        return self.archive.open_file(self.name, path) if self.archive else open_regular(self.folder / path)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def seed(self) -> Any:
        return self.config.get("seed")

    @property
    def state(self) -> str:
        """The state: finished, diverged, running (or cut off), stopped, failed, damaged, or unknown."""
        return "damaged" if self.damage else str(self.status.get("state", "unknown"))

    @cached_property
    def damage(self) -> str | None:
        """The reason why the numbers of a run that has ended are not its final ones; None if they are."""
        ended, step = self.status.get("state") in ("finished", "diverged"), self.status.get("step")
        if not ended or not isinstance(step, int) or step == self.step:
            return None
        return f"metrics.jsonl ends at step {self.step:,}, the run at step {step:,}"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings, by dotted key, that tell this run from others, except the seed.

        Keys such as `data (content)` are not settings: they identify the data that the run was trained on.
        """
        data = self.manifest.get("data")
        metadata = data if isinstance(data, dict) else {}
        identity = {f"data ({key})": metadata[key] for key in DATA_IDENTITY if key in metadata}
        return get_defining_settings(self.config) | identity

    def series(self, key: str, against: str = "step") -> Series:
        """Return the values of a key together with those of another, from the lines that have both.

        Args:
            key: a key of metrics.jsonl, such as `valid/loss`.
            against: step, tokens, or time (seconds of training, without evaluation and saving).

        Returns:
            `against` and `key`, float64 (N,) each; N is 0 where no line has both.
        """
        if key not in self.columns or against not in self.columns:
            return np.empty(0), np.empty(0)
        (at_x, x), (at_y, y) = self.columns[against], self.columns[key]
        _, in_x, in_y = np.intersect1d(at_x, at_y, assume_unique=True, return_indices=True)
        return x[in_x], y[in_y]

    def last(self, key: str) -> float | None:
        """Return the last value of a key, or None if no line has it."""
        columns = self._tail if key in self._tail else self.columns
        return float(columns[key][1][-1]) if key in columns else None

    @property
    def step(self) -> int:
        """The number of steps done."""
        return int(self.last("step") or 0)

    @property
    def steps(self) -> int | None:
        """The number of steps that the budget pays for."""
        steps = self.status.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def tokens_per_second(self) -> float | None:
        """The median over log boundaries, as in a run's own report."""
        _, speeds = self.series("system/tokens_per_second")
        return float(np.median(speeds)) if len(speeds) else None

    @property
    def step_times(self) -> np.ndarray:
        """Seconds per step, float64 (N,): means between log boundaries, without evaluation and saving."""
        _, speeds = self.series("system/tokens_per_second")
        return np.asarray(self.config.get("batch_tokens", np.nan) / speeds)

    @property
    def step_time(self) -> float | None:
        """The median of `step_times`."""
        return float(np.median(self.step_times)) if len(self.step_times) else None

    @property
    def largest_lr(self) -> float | None:
        """The largest scheduled learning rate of the first parameter group, that of matrices."""
        _, lrs = self.series("train/lr")
        return float(lrs.max()) if len(lrs) else None

    @property
    def device(self) -> str | None:
        """The ranks and their device, such as `4 x NVIDIA H100`."""
        known = "ranks" in self.manifest and "device" in self.manifest
        return f"{self.manifest['ranks']} x {self.manifest['device']}" if known else None

    def smooth_training_loss(self, against: str = "step") -> Series:
        """Return centred means of the training loss over SMOOTHED of the steps so far; at the ends over fewer.

        Losses that are not finite, those of skipped steps, do not count.
        """
        x, loss = self.series("train/loss", against)
        finite = np.isfinite(loss)
        x, loss = x[finite], loss[finite]
        return x, compute_moving_mean(loss, max(1, round(SMOOTHED * len(loss))))

    @property
    def training_loss(self) -> float | None:
        """The mean over the last SMOOTHED of the steps whose loss is a number."""
        _, loss = self.series("train/loss")
        loss = loss[np.isfinite(loss)]
        return float(loss[-max(1, round(SMOOTHED * len(loss))) :].mean()) if len(loss) else None


def read_run(folder: str | Path) -> RunRecord:
    """Return the record of a run in a folder, or in an archive (ARCHIVE/NAME).

    Broken lines of metrics.jsonl are left out; a missing file counts as empty.

    Raises:
        NoRun: there is no such run, or its config.yaml cannot be read.
    """
    folder = Path(folder)
    if not folder.exists() and folder.name in (archive := RunArchive(folder.parent)).entries:
        return _make_archived_record(archive, folder.name)
    return RunRecord(folder, read_config(folder), read_manifest(folder), read_status(folder))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of manifest.json; {} if there is none, or if it holds what no run writes."""
    try:
        return check_entries(try_read_json(folder / "manifest.json"), _MANIFEST)
    except ValueError:
        return {}


def read_archived_runs(folder: Path) -> list[RunRecord]:
    """Return the records of all runs in the archives of a folder."""
    return [_make_archived_record(archive, name) for archive in list_archives(folder) for name in archive.entries]


def _make_archived_record(archive: RunArchive, name: str) -> RunRecord:
    entry = archive.entries[name]
    config = update_stored_config(entry["config"])
    return RunRecord(archive.path / name, config, entry["manifest"], entry["status"], archive)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the resolved configuration of the run in a folder, with today's names of settings.

    Raises:
        NoRun: see `read_run`.
    """
    return update_stored_config(read_stored_config(folder))


def read_stored_config(folder: Path) -> dict[str, Any]:
    """Return the resolved configuration of the run in a folder as it was written.

    Raises:
        NoRun: see `read_run`.
    """
    if not folder.is_dir():
        runs = RunArchive(folder).entries
        hint = f"holds {len(runs)} archived runs: give one, such as {folder / next(iter(runs))}" if runs else ""
        raise NoRun(f"{folder} {hint or 'is no folder: give that of a run, such as runs/NAME'}")
    file = folder / "config.yaml"
    try:
        config = _YamlLoader(read_regular(file, _MAX_CONFIG)).get_single_data()
        check_depth(config)
    except FileNotFoundError:
        hint = f": did you mean {folder}/*?" if any(folder.glob("*/config.yaml")) else ""
        raise NoRun(f"{folder} is no run's folder, it has no config.yaml{hint}") from None
    except (OSError, ValueError, AttributeError) as error:  # an odd timestamp has no attribute in PyYAML
        raise NoRun(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
    except yaml.YAMLError as error:
        raise NoRun(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise NoRun(f"{file} does not hold settings")
    try:
        return check_entries(config, _CONFIG)
    except ValueError as error:
        raise NoRun(f"{file} cannot be used: {error}") from None


def _collect_columns(lines: Sequence[Line]) -> dict[str, Series]:
    """Return the numbers of lines of metrics by key; of lines with the same step the last one counts."""
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for at, line in enumerate({line["step"]: line for line in lines}.values()):
        for key, value in line.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                indices, values = columns.setdefault(key, ([], []))
                indices.append(at)
                values.append(value)
    return {key: (np.array(indices), np.array(values, np.float64)) for key, (indices, values) in columns.items()}


def list_settings(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the dotted keys and values of a nested configuration; lists and empty sections are values."""
    return [(key, value) for key, value in flatten(config) if not isinstance(value, dict) or not value]


def get_defining_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a resolved configuration that tell its run from others, except _DEFINES_NO_SETTING.

    Settings that did not exist when the configuration was written have the values that the run used.
    """
    settings = {
        key: value for key, value in list_settings(config) if key not in _DEFINES_NO_SETTING and defines_run(key)
    }
    for key, (target, default) in _ADDED_LATER.items():
        if str(settings.get(f"{key.partition('.')[0]}._target_")).endswith(target):
            settings.setdefault(key, default)
    return settings


def compute_moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the (N,) centred means over `window` neighbours; at the ends over fewer."""
    before, after = (window - 1) // 2, window // 2
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    at = np.arange(len(values))
    first, end = np.maximum(at - before, 0), np.minimum(at + after + 1, len(values))
    return np.asarray((sums[end] - sums[first]) / (end - first))


@dataclass(frozen=True)
class RunGroup:
    """Runs of one setting: they differ only in the seed and in what does not define a run (`defines_run`)."""

    runs: tuple[RunRecord, ...]  # one run or more

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings

    @property
    def finished(self) -> tuple[RunRecord, ...]:
        """The runs whose final numbers can be compared."""
        return tuple(run for run in self.runs if run.state == "finished")

    def finals(self, key: str) -> list[float]:
        """Return the last values of a key, one for each finished run that has it."""
        return [value for run in self.finished if (value := run.last(key)) is not None]


def group_runs(runs: Sequence[RunRecord]) -> list[RunGroup]:
    """Group runs by setting: groups in the order of their first run, the runs of a group in the order of seeds."""
    groups: list[list[RunRecord]] = []
    for run in runs:
        same = next((group for group in groups if group[0].settings == run.settings), None)
        if same is None:
            groups.append([run])
        else:
            same.append(run)
    return [RunGroup(tuple(sorted(group, key=lambda run: (str(run.seed).zfill(20), run.name)))) for group in groups]


def find_differing_settings(groups: Sequence[RunGroup]) -> dict[str, list[Any]]:
    """Return the settings that differ between groups, each with its value in every group; ABSENT where it has none.

    Keys come in the order of the first configuration that has them.
    """
    keys = {key: None for group in groups for key in group.settings}
    by_key = {key: [group.settings.get(key, ABSENT) for group in groups] for key in keys}
    return {key: values for key, values in by_key.items() if any(value != values[0] for value in values)}


def list_devices(groups: Sequence[RunGroup]) -> set[str]:
    """Return the kinds of devices on which runs were trained, as far as they are known."""
    return {run.device for group in groups for run in group.runs if run.device}
