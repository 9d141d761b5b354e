"""The checked configuration of a run: one object that the command line is parsed into and that is passed on."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from muown_train.config.checks import check_bool, check_choice, check_int, check_path, check_positive
from muown_train.config.renamed_names import update_stored_config
from muown_train.config.run_name import check_run_name
from muown_train.runtime.suggest import suggest_nearest

Section = dict[str, Any]
Schedule = Callable[[int, int], float]  # (step, steps) -> multiplier of the base learning rate


@dataclass(kw_only=True)
class RunConfig:
    """The settings of one run. configs/train.yaml says what each key means.

    Keys with a default were added after the first stored runs; the default is what those runs did.
    """

    name: str
    out: str
    cache: str | None
    seed: int
    init_from: str | None = None
    checkpoint: str | None = None
    tokens: float | None
    tokens_per_parameter: float | None
    seq_len: int
    batch_tokens: int
    micro_batch: int
    workers: int | None
    device: str = "auto"
    precision: str
    reduce_dtype: str | None
    compile: bool
    parallel: str = "ddp"
    shard_optimizer: str
    grad_clip: float | None
    eval_every: int
    valid_tokens: int
    save_every: int
    keep_checkpoints: int
    keep_every: int | None
    keep_best: bool
    on_save_error: str
    time_limit: float | None
    give_up_after: int | None
    max_bad_updates: int
    on_bad_updates: str
    max_rollbacks: int
    diverged_above: float | None
    diverged_from: int
    replica_check_every: int | None
    probe_every: int = 100
    log_every: int
    profile_steps: list[int] | None = None
    sample_tokens: int
    sample_every: int | None = None
    tasks: list[str] = field(default_factory=list)
    eval_tasks_every: int | None = None
    eval_tasks_limit: int | None = None
    paper_exact: bool
    trust: list[str]
    model: Section
    data: Section
    optim: Section
    schedule: Section
    tracking: Section | None = None
    probes: Section = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, check in _CHECKS.items():
            setattr(self, key, check(key, getattr(self, key)))
        if self.keep_every and self.keep_every % self.save_every:
            raise ValueError(f"keep_every={self.keep_every} must be a multiple of save_every={self.save_every}")
        if self.sample_every and not self.sample_tokens:
            raise ValueError(f"sample_every={self.sample_every} writes samples of sample_tokens=0: give it 1 or more")
        for key in ("eval_tasks_every", "eval_tasks_limit"):
            if getattr(self, key) and not self.tasks:
                raise ValueError(f"{key}={getattr(self, key)} needs tasks=[…], names of lm_eval's or YAML files")

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain data, as a run stores them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def parse_config(tree: Mapping[str, Any], default_name: str) -> RunConfig:
    """Make a run's configuration of plain nested data, in which nothing is interpolated.

    Args:
        tree: from the command line, a run's folder or a checkpoint; earlier names of keys and targets are understood.
        default_name: the run's name where the tree gives none.

    Raises:
        ValueError: a key is unknown (with the nearest one that exists) or missing, or a value is wrong.
    """
    known = {each.name for each in fields(RunConfig)}
    settings = update_stored_config(tree)
    for key in settings:
        if key not in known:
            raise ValueError(f"there is no key {key}{suggest_nearest(key, known)}")
    if settings.get("name") is None:
        settings["name"] = default_name
    try:
        return RunConfig(**settings)
    except TypeError as error:  # the dataclass's own words for a key that is missing
        missing = str(error).partition("argument")[2].lstrip("s: ")
        raise ValueError(f"the configuration lacks {missing}") from None


@dataclass(frozen=True)
class TrainerSettings:
    """The settings that the training loop reads; intervals are in steps."""

    steps: int
    batch_tokens: int  # per step, over all ranks
    seq_len: int
    micro_batch: int  # rows per rank and forward pass
    eval_every: int
    save_every: int
    log_every: int
    valid_tokens: int
    check_every: int | None = None  # steps between two comparisons of the weights of all ranks
    stop_if_unsaved: bool = True  # whether a checkpoint that cannot be written ends the run
    grad_clip: float | None = 1.0
    autocast: bool = False  # bfloat16 in the forward pass, float32 weights
    reduce_in_bfloat16: bool = False  # whether ranks exchange gradients in bfloat16
    flops_per_token: float | None = None
    peak_flops: float | None = None  # FLOP/s of one device


_Check = Callable[[str, Any], Any]


def _expect_int(least: int, most: int = 2**63 - 1) -> _Check:
    return lambda key, value: check_int(key, value, least, most)


def _expect_choice(*choices: str) -> _Check:
    return lambda key, value: check_choice(key, value, choices)


def _allow_null(check: _Check) -> _Check:
    return lambda key, value: None if value is None else check(key, value)


def _expect_positive_or_null(unit: str = "") -> _Check:
    return _allow_null(lambda key, value: check_positive(key, value, f"{unit} or null"))


def _check_reduce_dtype(key: str, value: Any) -> Any:
    if value is not None and value not in ("bfloat16", "float32"):
        raise ValueError(f"{key}={value!r} must be bfloat16, float32 or null")
    return value


def _check_span(key: str, value: Any) -> list[int]:
    words = value.split(":") if isinstance(value, str) else value
    if (
        not isinstance(words, list)
        or len(words) != 2
        or not all(re.fullmatch(r"\d{1,15}", str(word)) for word in words)
    ):
        raise ValueError(f"{key}={value!r} must be the first and the last of some steps, as in {key}=10:13, or null")
    first, last = map(int, words)
    if not 1 <= first <= last:
        raise ValueError(f"{key}={value!r} must begin at step 1 or later, and not after its end")
    return [first, last]


def _check_source(key: str, value: Any) -> str:
    # a slash at the end makes no difference
    return str(Path(check_path(key, value, "the folder of a run or of a checkpoint, or null")))


def _check_trusted_names(key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key}={value!r} must be a list of dotted names, such as [my_package.MyOptimizer]")
    return value


def _check_tasks(key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ValueError(
            f"{key}={value!r} must be a list of tasks of lm_eval, such as [hellaswag] or [tasks/mine.yaml]"
        )
    return value


def _check_section(key: str, value: Any) -> Section:
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}={value!r} must be a mapping of settings")
    return dict(value)


_CHECKS: dict[str, _Check] = {
    "name": lambda key, value: check_run_name(value),  # YAML reads name=5 as a number
    "out": check_path,
    "cache": _allow_null(check_path),
    "init_from": _allow_null(_check_source),
    "checkpoint": _allow_null(_check_source),
    # what a run holds in memory, and what it does at its end, has a limit
    **dict.fromkeys(("batch_tokens", "valid_tokens"), _expect_int(1, 10**10)),
    **dict.fromkeys(("seq_len", "micro_batch"), _expect_int(1, 2**24)),
    "sample_tokens": _expect_int(0, 100_000),
    "workers": _allow_null(_expect_int(0, 1024)),
    **dict.fromkeys(("eval_every", "save_every", "keep_checkpoints", "log_every", "probe_every"), _expect_int(1)),
    "max_bad_updates": _expect_int(1),
    **dict.fromkeys(("seed", "max_rollbacks", "diverged_from"), _expect_int(0)),
    **dict.fromkeys(("keep_every", "give_up_after", "replica_check_every"), _allow_null(_expect_int(1))),
    **dict.fromkeys(("sample_every", "eval_tasks_every", "eval_tasks_limit"), _allow_null(_expect_int(1))),
    "tasks": _check_tasks,
    **dict.fromkeys(("tokens", "tokens_per_parameter", "grad_clip", "diverged_above"), _expect_positive_or_null()),
    "profile_steps": _allow_null(_check_span),
    "time_limit": _expect_positive_or_null(" of minutes"),
    **dict.fromkeys(("compile", "paper_exact", "keep_best"), check_bool),
    "parallel": _expect_choice("ddp", "fsdp", "hsdp"),
    "shard_optimizer": _expect_choice("node", "all", "none"),
    "on_save_error": _expect_choice("stop", "continue"),
    "on_bad_updates": _expect_choice("rollback", "stop"),
    "device": _expect_choice("auto", "cpu", "cuda"),
    "precision": _expect_choice("auto", "bfloat16", "float32"),
    "reduce_dtype": _check_reduce_dtype,
    "trust": _check_trusted_names,
    **dict.fromkeys(("model", "data", "optim", "schedule"), _check_section),
    "tracking": _allow_null(_check_section),
    "probes": lambda key, value: _check_section(key, value or {}),
}
