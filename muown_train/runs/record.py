"""Runs as tables and figures read them, from config.yaml, manifest.json, status.json and metrics.jsonl alone.

Nothing in a run's folder is changed, and it may still be training. torch is not loaded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from muown_train.config.compose import DATA_IDENTITY, defines_run, dotted
from muown_train.runs.metrics import read_metrics
from muown_train.runs.status import read_status
from muown_train.runtime.atomic_files import read_json

SMOOTHED = 0.02  # part of a run's updates that a smoothed training loss is the mean over

Settings = dict[str, Any]  # by dotted key, such as optim.lr
# settings that some runs are older than: how the names of their targets end, and the default
_LATER = {"model.init_std": ("GPT", 0.02), "optim.magnitude_lr_scale": ("Muown", 1.0)}
Series = tuple[np.ndarray, np.ndarray]  # two of float64 (N,)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML as OmegaConf reads it (1e-3 is a number), in a twentieth of the time: an archive has a hundred runs."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


class NoRun(ValueError):
    """A folder that is no run's."""


@dataclass(frozen=True)
class RunRecord:
    """What is known about a run."""

    folder: Path
    config: dict[str, Any]  # resolved
    manifest: dict[str, Any]
    status: dict[str, Any]

    @cached_property
    def columns(self) -> dict[str, Series]:
        """Key of metrics.jsonl -> numbers of its lines, values; a NaN there is one that was met."""
        return _columns(self.folder / "metrics.jsonl")

    @cached_property
    def _end(self) -> dict[str, Series]:
        """The same of its end, which is all that a list of many runs needs."""
        return _columns(self.folder / "metrics.jsonl", last=10_000)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def seed(self) -> Any:
        return self.config.get("seed")

    @property
    def state(self) -> str:
        """finished, diverged, running (or cut off), stopped, failed, damaged, or unknown."""
        return "damaged" if self.damage else str(self.status.get("state", "unknown"))

    @cached_property
    def damage(self) -> str | None:
        """Why the numbers of a run that has ended are not what it came to."""
        ended, step = self.status.get("state") in ("finished", "diverged"), self.status.get("step")
        if not ended or not isinstance(step, int) or step == self.step:
            return None
        return f"metrics.jsonl ends at update {self.step:,}, the run at update {step:,}"

    @cached_property
    def settings(self) -> Settings:
        """What makes this run another than others, but for the seed; `data (content)` and the like are facts."""
        settings = settings_of(self.config)
        data = self.manifest.get("data")
        facts = data if isinstance(data, dict) else {}
        return settings | {f"data ({key})": facts[key] for key in DATA_IDENTITY if key in facts}

    def series(self, key: str, against: str = "step") -> Series:
        """The lines that have both.

        Args:
            key: of metrics.jsonl, such as `valid/loss`.
            against: step, tokens, or time (seconds of training, without evaluation and saving).

        Returns:
            `against` and `key`, float64 (N,) each; N is 0 where no line has them.
        """
        if key not in self.columns or against not in self.columns:
            return np.empty(0), np.empty(0)
        (at_x, x), (at_y, y) = self.columns[against], self.columns[key]
        _, in_x, in_y = np.intersect1d(at_x, at_y, assume_unique=True, return_indices=True)
        return x[in_x], y[in_y]

    def last(self, key: str) -> float | None:
        """The last value, if there is one."""
        columns = self._end if key in self._end else self.columns
        return float(columns[key][1][-1]) if key in columns else None

    @property
    def step(self) -> int:
        """Updates done."""
        return int(self.last("step") or 0)

    @property
    def steps(self) -> int | None:
        """Updates that the budget pays for."""
        steps = self.status.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def tokens_per_second(self) -> float | None:
        """The median over log boundaries, as in a run's own report."""
        _, speeds = self.series("system/tokens_per_second")
        return float(np.median(speeds)) if len(speeds) else None

    @property
    def step_times(self) -> np.ndarray:
        """Seconds of an update, float64 (N,): means between log boundaries, without evaluation and saving."""
        _, speeds = self.series("system/tokens_per_second")
        return np.asarray(self.config.get("batch_tokens", np.nan) / speeds)

    @property
    def step_time(self) -> float | None:
        """Their median."""
        return float(np.median(self.step_times)) if len(self.step_times) else None

    @property
    def largest_lr(self) -> float | None:
        """Of the first group of parameters (matrices), with the schedule in it."""
        _, lrs = self.series("train/lr")
        return float(lrs.max()) if len(lrs) else None

    @property
    def device(self) -> str | None:
        """Such as `4 x NVIDIA H100`."""
        known = "ranks" in self.manifest and "device" in self.manifest
        return f"{self.manifest['ranks']} x {self.manifest['device']}" if known else None

    def smoothed_training_loss(self, against: str = "step") -> Series:
        """Means over SMOOTHED of the updates so far, the loss of an update in the middle; at the ends over fewer.

        Losses that are no numbers, of updates that were skipped, do not count.
        """
        x, loss = self.series("train/loss", against)
        there = np.isfinite(loss)
        x, loss = x[there], loss[there]
        return x, moving_mean(loss, max(1, round(SMOOTHED * len(loss))))

    @property
    def training_loss(self) -> float | None:
        """The mean over the last SMOOTHED of the updates, of those whose loss is a number."""
        _, loss = self.series("train/loss")
        loss = loss[np.isfinite(loss)]
        return float(loss[-max(1, round(SMOOTHED * len(loss))) :].mean()) if len(loss) else None


def read_run(folder: str | Path) -> RunRecord:
    """What a run's folder says. Broken lines of metrics.jsonl are left out, and a missing file says nothing.

    Raises:
        NoRun: there is no such folder, or no config.yaml in it that can be read.
    """
    folder = Path(folder)
    return RunRecord(folder, read_config(folder), read_json(folder / "manifest.json"), read_status(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved configuration of the run in a folder.

    Raises:
        NoRun: see `read_run`.
    """
    if not folder.is_dir():
        raise NoRun(f"{folder} is no folder: give that of a run, such as runs/NAME")
    file = folder / "config.yaml"
    try:
        config = _Loader(file.read_text()).get_single_data()
    except FileNotFoundError:
        hint = f": did you mean {folder}/*?" if any(folder.glob("*/config.yaml")) else ""
        raise NoRun(f"{folder} is no run's folder, it has no config.yaml{hint}") from None
    except (OSError, ValueError) as error:
        raise NoRun(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
    except yaml.YAMLError as error:
        raise NoRun(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise NoRun(f"{file} does not hold settings")
    return config


def _columns(metrics: Path, last: int | None = None) -> dict[str, Series]:
    """The numbers of lines of metrics by key, of all or those in the last so many bytes.

    Of a step that is there twice the last line counts.
    """
    lines = read_metrics(metrics, last) if metrics.exists() else []
    found: dict[str, tuple[list[int], list[float]]] = {}
    for at, line in enumerate({line["step"]: line for line in lines}.values()):
        for key, value in line.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                places, values = found.setdefault(key, ([], []))
                places.append(at)
                values.append(value)
    return {key: (np.array(places), np.array(values, np.float64)) for key, (places, values) in found.items()}


def leaves(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The values of a nested configuration with dotted keys; lists are values."""
    return [(key, value) for key, value in dotted(config) if not isinstance(value, dict) or not value]


def settings_of(config: Mapping[str, Any]) -> Settings:
    """What a resolved configuration says about a run that makes it another than others, but for the seed.

    Settings that were not there yet when it was written are what they are by default.
    """
    settings = {key: value for key, value in leaves(config) if key != "seed" and defines_run(key)}
    for key, (target, default) in _LATER.items():
        if str(settings.get(f"{key.partition('.')[0]}._target_")).endswith(target):
            settings.setdefault(key, default)
    return settings


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """(N,) means over `window` neighbours, the value itself in the middle; at the ends over those that there are."""
    before, after = (window - 1) // 2, window // 2
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    at = np.arange(len(values))
    first, end = np.maximum(at - before, 0), np.minimum(at + after + 1, len(values))
    return np.asarray((sums[end] - sums[first]) / (end - first))


@dataclass(frozen=True)
class Group:
    """Runs of one setting: they differ in the seed and in what does not define a run (`config.defines_run`) alone."""

    runs: tuple[RunRecord, ...]  # at least one

    @property
    def settings(self) -> Settings:
        return self.runs[0].settings

    @property
    def finished(self) -> tuple[RunRecord, ...]:
        """Those whose final numbers can be compared."""
        return tuple(run for run in self.runs if run.state == "finished")

    def finals(self, key: str) -> list[float]:
        """The last values of the runs that finished, of those that have one."""
        return [value for run in self.finished if (value := run.last(key)) is not None]


def grouped(runs: Sequence[RunRecord]) -> list[Group]:
    """Runs by setting, in the order of their first; in a group by seed."""
    groups: list[list[RunRecord]] = []
    for run in runs:
        same = next((group for group in groups if group[0].settings == run.settings), None)
        if same is None:
            groups.append([run])
        else:
            same.append(run)
    return [Group(tuple(sorted(group, key=lambda run: (str(run.seed).zfill(20), run.name)))) for group in groups]


def differing(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """The settings that are not the same in all groups, each with its value in every group; ABSENT where it has none.

    Keys come in the order of the first configuration that has them.
    """
    keys = {key: None for group in groups for key in group.settings}
    values = {key: [group.settings.get(key, ABSENT) for group in groups] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def machines(groups: Sequence[Group]) -> set[str]:
    """On which kinds runs were trained, as far as is known."""
    return {run.device for group in groups for run in group.runs if run.device}


ABSENT = "—"
