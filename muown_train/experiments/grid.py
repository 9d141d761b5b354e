"""An experiment of the paper: a grid of runs, read from a file of configs/experiment/ that has a node `experiment`.

The rest of the file is a preset, what all its runs share: `python -m muown_train experiment=NAME` trains with it. The
node says which runs there are and what the paper reports of them:

    seeds       of every setting
    lr          grid of optim.lr; a series may have its own
    series      KEY: {label, set: [overrides], panel (of the figure), lr}
    over        {setting: numbers}, a further axis of the grid; no group of options
    report      which figures `experiment_report` draws
    quantity    of its tables: perplexity (default), loss or step_time
    measure     what scripts/analyze.py measures of the runs that are done: words, the run's folder left out; in small
                --all takes the place of --steps
    same        settings that a run must share to count, besides those that define a run: what it measures, or keeps
    gpus        {paper: what it says, device, ranks}, for gpu_hours; none: for a CPU
    gpu_hours   of all runs, as `scripts/reproduce.py action=plan` estimates them
    paper       KEY: for each lr what the paper reports: mean, [mean, deviation], diverged, or null

torch is not loaded.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf

from muown_train.cli.help import first_sentence
from muown_train.config.compose import CONFIG_DIR, compose_config
from muown_train.config.run_name import make_folder_name, list_naming_overrides
from muown_train.config.overrides import parse_overrides
from muown_train.config.checks import is_number, check_int
from muown_train.experiments.scale import SCALES, scaled
from muown_train.runtime.suggest import nearest

REPORTS = ("rates", "curves", "spectral", "effective_rank", "gradient_noise", "step_time")
QUANTITIES = ("perplexity", "loss", "step_time")
_KEYS = ("seeds", "lr", "series", "over", "report", "quantity", "measure", "same", "gpus", "gpu_hours", "paper")
_SERIES_KEYS = ("label", "panel", "set", "lr")
# what the grid, or the program, decides of every run
_NOT_FOR_ALL = {
    "seed": "seeds=N takes the first N seeds",
    "optim.lr": "points=N takes N rates of the grid",
    "name": "runs are named by what they are",
    "checkpoint": "runs of an experiment start anew",
}

Reported = float | tuple[float, float] | str | None  # mean, mean and deviation, "diverged", or nothing


@dataclass(frozen=True)
class Series:
    """Runs that differ in the learning rate (and the experiment's further axis) and the seed alone: a line."""

    key: str
    label: str
    panel: str
    overrides: tuple[str, ...]
    lr: tuple[float, ...]


@dataclass(frozen=True)
class Gpus:
    """What the paper says it ran on, and what gpu_hours are estimated for."""

    paper: str | None
    device: str
    ranks: int


@dataclass(frozen=True)
class Experiment:
    """A grid of runs."""

    name: str
    sentence: str
    seeds: tuple[int, ...]
    series: tuple[Series, ...]
    over: str | None  # a further setting, with its values
    values: tuple[Any, ...]  # (None,) without one
    report: str
    quantity: str
    measure: tuple[str, ...]
    same: tuple[str, ...]
    gpus: Gpus | None  # None: for a CPU
    gpu_hours: float | None
    paper: Mapping[str, Mapping[float, Reported]]  # by series and lr
    scale: str | None = None

    @property
    def folder(self) -> str:
        """Of its runs, in that of all runs."""
        return f"{self.name}-{self.scale}" if self.scale else self.name

    def part(
        self, points: int | None = None, seeds: int | None = None, series: Iterable[str] | None = None
    ) -> "Experiment":
        """A smaller grid: so many of each series' learning rates, evenly; the first seeds; these series.

        Raises:
            ValueError: a number below 1, or a series that there is not.
        """
        for key, count in (("points", points), ("seeds", seeds)):
            if count is not None:
                check_int(key, count, 1)
        chosen = self.series
        if series is not None:
            known = {each.key: each for each in self.series}
            for key in series:
                if key not in known:
                    there = ", ".join(known)
                    near = nearest(key, known)
                    raise ValueError(f"series={key}: {self.name} has none of that name{near}; there are {there}")
            chosen = tuple(known[key] for key in dict.fromkeys(series))
        if points is not None:
            chosen = tuple(replace(each, lr=evenly(each.lr, points)) for each in chosen)
        return replace(self, series=chosen, seeds=self.seeds[:seeds])

    def cells(self, further: Sequence[str] = ()) -> list["Cell"]:
        """Every run of the grid; seeds change fastest, then learning rates.

        Args:
            further: overrides for all of them, which win over the experiment's.

        Raises:
            ValueError: one that the grid decides; OmegaConf's and Hydra's errors for one that cannot be.
        """
        for override in parse_overrides(further):
            if reason := _NOT_FOR_ALL.get(override.key_or_group):
                raise ValueError(f"{override.input_line} cannot be given to all runs: {reason}")
            if override.key_or_group == self.over:
                values = ", ".join(map(str, self.values))
                raise ValueError(f"{override.input_line} cannot be given to all runs: the grid has {values}")
        return [cell for series in self.series for cell in self._cells(series, list(further))]

    def _cells(self, series: Series, further: list[str]) -> Iterator["Cell"]:
        config: DictConfig | None = None
        for value in self.values:
            axis = [f"{self.over}={value!r}"] if self.over else []
            shared = unique([f"experiment={self.name}", *series.overrides, *axis])
            if self.scale:
                shared = scaled(SCALES[self.scale], shared, further)
            shared = unique([*shared, *further])
            if config is None or self.scale:
                config = compose_config(shared)
            else:  # set rather than compose_config again, as the rate and the seed are: that takes a tenth of a second
                OmegaConf.update(config, str(self.over), value)
            named = [part for _, part in list_naming_overrides([*axis, *further])]
            for lr in series.lr:
                for seed in self.seeds:
                    config.optim.lr, config.seed = lr, seed
                    resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
                    name = make_folder_name([series.key, *named, f"lr={lr:g}", f"seed={seed}"])
                    words = (*shared, f"optim.lr={lr!r}", f"seed={seed}")
                    yield Cell(series, value, lr, seed, name, words, resolved)


@dataclass(frozen=True, eq=False)
class Cell:
    """A run of an experiment, there or not."""

    series: Series
    value: Any  # of the further axis
    lr: float
    seed: int
    name: str
    overrides: tuple[str, ...]  # of `python -m muown_train`, but for name and out
    config: Mapping[str, Any]  # resolved

    @cached_property
    def setting(self) -> tuple[str, Any, float]:
        """The same for cells that differ in the seed alone."""
        return self.series.key, self.value, self.lr


def unique(overrides: Iterable[str]) -> list[str]:
    """Of overrides of one key the last, since Hydra refuses two choices of a group."""
    return list({override.partition("=")[0].lstrip("+"): override for override in overrides}.values())


def evenly(values: Sequence[float], count: int) -> tuple[float, ...]:
    """So many of the values: both ends and what lies evenly between; a single one from the middle."""
    last = len(values) - 1
    if count == 1:
        return (values[len(values) // 2],)
    return tuple(values[i] for i in sorted({round(k * last / (count - 1)) for k in range(count)}))


def names() -> dict[str, str]:
    """Every experiment that has a grid, with a sentence on it."""
    found = {}
    for path in sorted((CONFIG_DIR / "experiment").glob("*.yaml")):
        text = path.read_text()
        if "experiment" in (OmegaConf.create(text) or {}):
            found[path.stem] = first_sentence(text).rstrip(".")
    return found


def load_experiment(name: str, scale: str | None = None) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: there is none, it has no grid, or its file says what cannot be.
    """
    if scale is not None and scale not in SCALES:
        raise ValueError(f"there is no scale={scale}{nearest(scale, SCALES)}; there are {', '.join(SCALES)}")
    path = CONFIG_DIR / "experiment" / f"{name}.yaml"
    if path.stem != name or not path.exists():
        known = names()
        raise ValueError(f"there is no experiment={name}{nearest(name, known)}; there are {', '.join(known)}")
    text = path.read_text()
    node = OmegaConf.to_container(OmegaConf.create(text)).get("experiment")  # type: ignore[union-attr]
    if not isinstance(node, dict):
        raise ValueError(f"experiment={name} is a single run, not a grid: python -m muown_train experiment={name}")
    try:
        experiment = replace(_read(name, first_sentence(text).rstrip("."), node), scale=scale)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: experiment: {missing}") from error
    if scale is None:
        return experiment
    return replace(experiment, measure=tuple(re.sub(r"--steps \S+", "--all", words) for words in experiment.measure))


def _read(name: str, sentence: str, node: dict[str, Any]) -> Experiment:
    _known(node, _KEYS, "")
    _known({node["report"]: 0}, REPORTS, "report=")
    quantity = node.get("quantity", "perplexity")
    _known({quantity: 0}, QUANTITIES, "quantity=")
    series = []
    for key, each in node["series"].items():
        _known(each, _SERIES_KEYS, f"series.{key}.")
        rates = _rates(f"series.{key}.lr", each.get("lr", node["lr"]))
        series.append(Series(str(key), each["label"], each.get("panel", ""), tuple(each["set"]), rates))
    over = node.get("over") or {}
    if len(over) > 1:
        raise ValueError(f"over has {len(over)} settings, {', '.join(over)}: it may have one")
    axis, values = next(iter(over.items()), (None, [None]))
    if axis and not all(is_number(value) for value in values):
        raise ValueError(f"over.{axis}={values!r} must be numbers: make a series of each for anything else")
    gpus = node.get("gpus")
    return Experiment(
        name,
        sentence,
        tuple(check_int("seeds", seed, 0) for seed in node["seeds"]),
        tuple(series),
        axis,
        tuple(values),
        node["report"],
        quantity,
        _texts("measure", node.get("measure", [])),
        _texts("same", node.get("same", [])),
        Gpus(gpus["paper"], gpus["device"], gpus["ranks"]) if gpus else None,
        node["gpu_hours"] if gpus else None,
        _of_paper(node.get("paper") or {}, series),
    )


def _known(keys: Iterable[str], known: Sequence[str], prefix: str) -> None:
    for key in keys:
        if key not in known:
            raise ValueError(f"there is no {prefix}{key}{nearest(key, known)}; there are {', '.join(known)}")


def _texts(key: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{key}={values!r} must be a list of texts")
    return tuple(values)


def _rates(key: str, values: Any) -> tuple[float, ...]:
    if not values or not all(is_number(value) and value > 0 for value in values):
        raise ValueError(f"{key}={values!r} must be learning rates")
    return tuple(map(float, values))


def _of_paper(node: Mapping[str, Any], series: Sequence[Series]) -> dict[str, dict[float, Reported]]:
    rates = {each.key: each.lr for each in series}
    _known(node, list(rates), "paper.")
    found: dict[str, dict[float, Reported]] = {}
    for key, values in node.items():
        if len(values) != len(rates[key]):
            raise ValueError(f"paper.{key} has {len(values)} numbers for {len(rates[key])} learning rates")
        found[key] = {
            lr: tuple(value) if isinstance(value, list) else value for lr, value in zip(rates[key], values, strict=True)
        }
    return found
