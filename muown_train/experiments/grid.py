"""An experiment of the paper as a grid of runs, read from the node `experiment` of a file in configs/experiment/.

The rest of the file is a preset that all runs share: `muown-train experiment=NAME` trains with it. Where it has
`paper_exact: true` the runs are those of the paper, and series with `paper_exact=false` are a fair setting beside them.
The node says which runs there are and what the paper reports about them:

    seeds       the seeds of every setting; a series may have its own
    lr          the values of optim.lr; a series may have its own
    series      KEY: {label, set: [overrides], panel (of the figure), lr, seeds}; each is a curve of the figure
    over        {setting: numbers}, a further axis of the grid; the setting cannot be a config group
    report      the figures that the report draws
    quantity    what its tables show: perplexity (default), loss or step_time
    rate_seed   the seed that chooses the best rate of a setting and enters no mean; without it means choose
    claims      [{text, lower, higher, lr}]: the series `lower` ends below `higher`, at lr, or each at its best rate
    measure     what `muown-train analyze` measures of finished runs, as its words without the run's folder; a small
                version of the experiment replaces --steps by --all
    same        settings that a run must share to count although they do not define a run: what it measures, or keeps
    gpus        {paper: what the paper says, device, ranks}, which gpu_hours are for; runs without it are for a CPU
    gpu_hours   the GPU hours of all runs, as `muown-train reproduce action=plan` estimates them
    paper       KEY: what the paper reports for each lr, which is a mean, [mean, deviation], diverged, or null

This module does not load torch.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf

from muown_train.config.checks import check_int, is_number
from muown_train.config.compose import CONFIG_DIR, compose_config, read_first_sentence
from muown_train.config.overrides import parse_overrides
from muown_train.config.run_name import list_naming_overrides, make_folder_name
from muown_train.experiments.scale import SCALES, scale_down
from muown_train.runtime.formatting import format_lr
from muown_train.runtime.suggest import suggest_nearest

REPORTS = ("rates", "curves", "spectral", "effective_rank", "gradient_noise", "step_time", "copying")
QUANTITIES = ("perplexity", "loss", "step_time")
_KEYS = (
    *("seeds", "lr", "series", "over", "report", "quantity", "rate_seed", "claims", "measure", "same"),
    *("gpus", "gpu_hours", "paper"),
)
_SERIES_KEYS = ("label", "panel", "set", "lr", "seeds")
_CLAIM_KEYS = ("text", "lower", "higher", "lr")
# the grid, or the program, decides these settings of every run
_NOT_FOR_ALL = {
    "seed": "seeds=N takes the first N seeds",
    "optim.lr": "points=N takes N rates of the grid",
    "name": "runs are named by what they are",
    "checkpoint": "runs of an experiment start anew",
}

PaperValue = float | tuple[float, float] | str | None  # a mean, a mean and a deviation, "diverged", or nothing


@dataclass(frozen=True)
class Curve:
    """The runs of a series: they differ only in learning rate, in the grid's further axis and in seed."""

    key: str
    label: str
    panel: str
    overrides: tuple[str, ...]
    lr: tuple[float, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Claim:
    """A statement that one series ends below another, seed by seed: at a learning rate, or each at its best one."""

    text: str
    lower: str
    higher: str
    lr: float | None


@dataclass(frozen=True)
class GpuSetup:
    """The GPUs that the paper names, and those that gpu_hours are estimated for."""

    paper: str | None
    device: str
    ranks: int


@dataclass(frozen=True)
class Grid:
    """The runs of an experiment, and what the paper reports about them."""

    name: str
    sentence: str
    curves: tuple[Curve, ...]
    over: str | None  # the setting of the further axis
    values: tuple[Any, ...]  # the values of that setting; (None,) without a further axis
    report: str
    quantity: str
    measure: tuple[str, ...]
    same: tuple[str, ...]
    gpus: GpuSetup | None  # None means that the runs are for a CPU
    gpu_hours: float | None
    paper: Mapping[str, Mapping[float, PaperValue]]  # keys are series and lr
    rate_seed: int | None = None
    claims: tuple[Claim, ...] = ()
    scale: str | None = None
    paper_exact: bool = False  # whether its preset asks for the paper's treatment of fused matrices

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of all curves."""
        return tuple(dict.fromkeys(seed for curve in self.curves for seed in curve.seeds))

    @property
    def folder(self) -> str:
        """The name of the folder of its runs in the folder of all runs."""
        return f"{self.name}-{self.scale}" if self.scale else self.name

    def select(
        self, points: int | None = None, seeds: int | None = None, series: Iterable[str] | None = None
    ) -> "Grid":
        """Return a smaller grid.

        Args:
            points: how many learning rates to keep of each curve, evenly spread.
            seeds: how many seeds to keep of each curve, the first ones.
            series: the keys of the curves to keep.

        Raises:
            ValueError: a number is below 1, or there is no such series.
        """
        for key, count in (("points", points), ("seeds", seeds)):
            if count is not None:
                check_int(key, count, 1)
        curves = self.curves
        if series is not None:
            known = {curve.key: curve for curve in curves}
            for key in series:
                if key not in known:
                    near, there = suggest_nearest(key, known), ", ".join(known)
                    raise ValueError(f"series={key}: {self.name} has none of that name{near}; there are {there}")
            curves = tuple(known[key] for key in dict.fromkeys(series))
        if points is not None:
            curves = tuple(replace(curve, lr=pick_evenly(curve.lr, points)) for curve in curves)
        curves = tuple(replace(curve, seeds=curve.seeds[:seeds]) for curve in curves)
        return replace(self, curves=curves)

    def describe_settings(self, points: Iterable["GridPoint"]) -> list[str]:
        """Return lines that say which curves have the paper's setting and which take q, k and v apart.

        There are none where the experiment does not ask for `paper_exact`.
        """
        exact = {point.curve.key: bool(point.config["paper_exact"]) for point in points if self.paper_exact}
        kinds = {
            "the paper's setting (paper_exact=true)": [key for key, is_exact in exact.items() if is_exact],
            "the fair setting, q, k and v apart (paper_exact=false)": [key for key in exact if not exact[key]],
        }
        return [f"Series with {kind}: {', '.join(keys)}" for kind, keys in kinds.items() if keys]

    def expand(self, overrides: Sequence[str] = ()) -> list["GridPoint"]:
        """Return every run of the grid; seeds change fastest, then learning rates.

        Args:
            overrides: settings for all runs, which win over the experiment's.

        Raises:
            ValueError: the grid decides one of these settings; OmegaConf and Hydra raise their own errors for a setting
                that cannot be.
        """
        for override in parse_overrides(overrides):
            if reason := _NOT_FOR_ALL.get(override.key_or_group):
                raise ValueError(f"{override.input_line} cannot be given to all runs: {reason}")
            if override.key_or_group == self.over:
                values = ", ".join(map(str, self.values))
                raise ValueError(f"{override.input_line} cannot be given to all runs: the grid has {values}")
        return [point for curve in self.curves for point in self._expand_curve(curve, list(overrides))]

    def _expand_curve(self, curve: Curve, overrides: list[str]) -> Iterator["GridPoint"]:
        for value in self.values:
            axis = [f"{self.over}={value!r}"] if self.over else []
            shared = keep_last_of_key([f"experiment={self.name}", *curve.overrides, *axis])
            if self.scale:
                shared = scale_down(SCALES[self.scale], shared, overrides)
            shared = keep_last_of_key([*shared, *overrides])
            config = compose_config(shared)
            named = [word for _, word in list_naming_overrides([*axis, *overrides])]
            for lr in curve.lr:
                for seed in curve.seeds:
                    config.optim.lr, config.seed = lr, seed
                    resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
                    name = make_folder_name([curve.key, *named, f"lr={lr:g}", f"seed={seed}"])
                    words = (*shared, f"optim.lr={lr!r}", f"seed={seed}")
                    yield GridPoint(curve, value, lr, seed, name, words, resolved)


@dataclass(frozen=True, eq=False)
class GridPoint:
    """A run that a grid asks for, whether it exists or not."""

    curve: Curve
    value: Any  # on the further axis
    lr: float
    seed: int
    name: str
    overrides: tuple[str, ...]  # the words of `muown-train` but for name and out
    config: Mapping[str, Any]  # resolved

    @property
    def title(self) -> str:
        """The name for a list, with the learning rate as a power of two where it is one."""
        rate = format_lr(self.lr)
        return f"{self.name} ({rate})" if "^" in rate else self.name

    @property
    def setting(self) -> tuple[str, Any, float]:
        """The key that is equal for points that differ in the seed alone."""
        return self.curve.key, self.value, self.lr


def keep_last_of_key(overrides: Iterable[str]) -> list[str]:
    """Drop overrides whose key occurs again later, since Hydra refuses two choices of a group."""
    return list({override.partition("=")[0].lstrip("+"): override for override in overrides}.values())


def pick_evenly(values: Sequence[float], count: int) -> tuple[float, ...]:
    """Return `count` of the values: both ends and evenly spread ones between, or the middle one if count is 1."""
    if count == 1:
        return (values[len(values) // 2],)
    last = len(values) - 1
    return tuple(values[i] for i in sorted({round(k * last / (count - 1)) for k in range(count)}))


def list_grids() -> dict[str, str]:
    """Return the name of every experiment that has a grid, with a sentence about it."""
    sentences = {}
    for path in sorted((CONFIG_DIR / "experiment").glob("*.yaml")):
        text = path.read_text()
        if "experiment" in (OmegaConf.create(text) or {}):
            sentences[path.stem] = read_first_sentence(text).rstrip(".")
    return sentences


def load_grid(name: str, scale: str | None = None) -> Grid:
    """Read the grid of an experiment, at full size or small.

    Raises:
        ValueError: there is no such experiment, it has no grid, or its file contains an error.
    """
    if scale is not None:
        _check_known([scale], SCALES, "scale=")
    path = CONFIG_DIR / "experiment" / f"{name}.yaml"
    if path.stem != name or not path.exists():
        known = list_grids()
        raise ValueError(f"there is no experiment={name}{suggest_nearest(name, known)}; there are {', '.join(known)}")
    text = path.read_text()
    preset: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(text))  # type: ignore[assignment]
    node = preset.get("experiment")
    if not isinstance(node, dict):
        raise ValueError(f"experiment={name} is a single run, not a grid: muown-train experiment={name}")
    try:
        grid = _parse_grid(name, read_first_sentence(text).rstrip("."), node)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        sentence = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: experiment: {sentence}") from error
    grid = replace(grid, scale=scale, paper_exact=bool(preset.get("paper_exact")))
    if scale is None:
        return grid
    return replace(grid, measure=tuple(re.sub(r"--steps \S+", "--all", words) for words in grid.measure))


def _parse_grid(name: str, sentence: str, node: Mapping[str, Any]) -> Grid:
    _check_known(node, _KEYS, "")
    _check_known([node["report"]], REPORTS, "report=")
    quantity = node.get("quantity", "perplexity")
    _check_known([quantity], QUANTITIES, "quantity=")
    seeds = _parse_seeds("seeds", node["seeds"])
    curves = []
    for key, fields in node["series"].items():
        _check_known(fields, _SERIES_KEYS, f"series.{key}.")
        lr = fields.get("lr", node["lr"])
        if not lr or not all(is_number(value) and value > 0 for value in lr):
            raise ValueError(f"series.{key}.lr={lr!r} must be learning rates")
        rates = tuple(map(float, lr))
        own = _parse_seeds(f"series.{key}.seeds", fields["seeds"]) if "seeds" in fields else seeds
        curves.append(Curve(str(key), fields["label"], fields.get("panel", ""), tuple(fields["set"]), rates, own))
    over = node.get("over") or {}
    if len(over) > 1:
        raise ValueError(f"over has {len(over)} settings, {', '.join(over)}: it may have one")
    axis, values = next(iter(over.items()), (None, [None]))
    if axis and not all(is_number(value) for value in values):
        raise ValueError(f"over.{axis}={values!r} must be numbers: make a series of each for anything else")
    if axis and node.get("claims"):
        raise ValueError(f"claims compare series, and cannot be made with over.{axis}: make a series of each value")
    gpus = node.get("gpus")
    return Grid(
        name,
        sentence,
        curves=tuple(curves),
        over=axis,
        values=tuple(values),
        report=node["report"],
        quantity=quantity,
        measure=_parse_texts("measure", node.get("measure", [])),
        same=_parse_texts("same", node.get("same", [])),
        gpus=GpuSetup(gpus["paper"], gpus["device"], gpus["ranks"]) if gpus else None,
        gpu_hours=node["gpu_hours"] if gpus else None,
        paper=_parse_paper_values(node.get("paper") or {}, curves),
        rate_seed=check_int("rate_seed", node["rate_seed"], 0) if "rate_seed" in node else None,
        claims=tuple(_parse_claim(claim, curves) for claim in node.get("claims", [])),
    )


def _parse_seeds(key: str, values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(check_int(key, seed, 0) for seed in values)


def _parse_claim(node: Mapping[str, Any], curves: Sequence[Curve]) -> Claim:
    _check_known(node, _CLAIM_KEYS, "claims.")
    rates = {curve.key: curve.lr for curve in curves}
    sides, lr = (node["lower"], node["higher"]), node.get("lr")
    _check_known(sides, rates, "series of a claim ")
    for key in sides:
        if lr is not None and lr not in rates[key]:
            raise ValueError(
                f"claims: lr={lr!r} is no learning rate of {key}, which has {', '.join(map(str, rates[key]))}"
            )
    return Claim(str(node["text"]), *sides, lr)


def _check_known(keys: Iterable[str], known: Iterable[str], prefix: str) -> None:
    for key in keys:
        if key not in known:
            raise ValueError(f"there is no {prefix}{key}{suggest_nearest(key, known)}; there are {', '.join(known)}")


def _parse_texts(key: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{key}={values!r} must be a list of texts")
    return tuple(values)


def _parse_paper_values(node: Mapping[str, Any], curves: Sequence[Curve]) -> dict[str, dict[float, PaperValue]]:
    rates = {curve.key: curve.lr for curve in curves}
    _check_known(node, rates, "paper.")
    paper: dict[str, dict[float, PaperValue]] = {}
    for key, values in node.items():
        if len(values) != len(rates[key]):
            raise ValueError(f"paper.{key} has {len(values)} numbers for {len(rates[key])} learning rates")
        plain = [tuple(value) if isinstance(value, list) else value for value in values]
        paper[key] = dict(zip(rates[key], plain, strict=True))
    return paper
