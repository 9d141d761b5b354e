"""The plain keys of train.yaml, checked."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from muown_train.config.compose import check_name
from muown_train.config.instantiate import is_number, whole
from muown_train.runtime.suggest import nearest


@dataclass(kw_only=True)
class TopLevel:
    """What each key means stands in train.yaml. A default is for runs from before there was the key."""

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
    precision: str
    reduce_dtype: str | None
    compile: bool
    shard_optimizer: bool
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
    check_every: int | None
    probe_every: int = 100
    log_every: int
    sample_tokens: int
    paper_exact: bool
    trust: list[str]

    def __post_init__(self) -> None:
        self.name = check_name(self.name)  # name=5 is a number in YAML
        for key, allowed in (("out", str), ("cache", str | None)):
            if not isinstance(getattr(self, key), allowed):
                raise ValueError(f"{key}={getattr(self, key)!r} must be a folder")
        for key in ("init_from", "checkpoint"):
            if (value := getattr(self, key)) is not None:
                if not (isinstance(value, str) and value):
                    raise ValueError(f"{key}={value!r} must be the folder of a run or of a checkpoint, or null")
                setattr(self, key, str(Path(value).expanduser()))  # the same without a slash at its end
        at_least_1 = ("seq_len", "batch_tokens", "micro_batch", "eval_every", "valid_tokens", "save_every")
        for key in (*at_least_1, "keep_checkpoints", "log_every", "probe_every", "max_bad_updates"):
            self._whole(key, 1)
        for key in ("sample_tokens", "seed", "max_rollbacks", "diverged_from"):
            self._whole(key, 0)
        for key, least in (("workers", 0), ("keep_every", 1), ("give_up_after", 1), ("check_every", 1)):
            if getattr(self, key) is not None:
                self._whole(key, least)
        if self.keep_every and self.keep_every % self.save_every:
            raise ValueError(f"keep_every={self.keep_every} must be a multiple of save_every={self.save_every}")
        for key in ("tokens", "tokens_per_parameter", "grad_clip", "time_limit", "diverged_above"):
            value = getattr(self, key)
            if value is not None and not (is_number(value) and value > 0):
                unit = " of minutes" if key == "time_limit" else ""
                raise ValueError(f"{key}={value!r} must be a positive number{unit} or null")
        for key in ("compile", "shard_optimizer", "paper_exact", "keep_best"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"{key}={getattr(self, key)!r} must be true or false")
        self._word("on_save_error", "stop or continue")
        self._word("on_bad_updates", "rollback or stop")
        self._word("precision", "auto, bfloat16 or float32")
        if self.reduce_dtype is not None:
            self._word("reduce_dtype", "bfloat16, float32 or null")
        if not isinstance(self.trust, list) or not all(isinstance(name, str) for name in self.trust):
            raise ValueError(f"trust={self.trust!r} must be a list of dotted names, such as [my_package.MyOptimizer]")

    def _word(self, key: str, words: str) -> None:
        known, value = re.findall(r"\b(?!or\b|null\b)\w+", words), getattr(self, key)
        if value not in known:
            raise ValueError(f"{key}={value!r} must be {words}{nearest(str(value), known)}")

    def _whole(self, key: str, least: int) -> None:
        setattr(self, key, whole(key, getattr(self, key), least))  # 5e9 is a float in YAML


def top_level(resolved: dict[str, Any], name: str) -> TopLevel:
    """The plain keys; an unknown one is an error with the nearest name."""
    known = [field.name for field in fields(TopLevel)]
    groups = ("model", "data", "optim", "schedule", "tracking", "probes")
    for key in resolved:
        if key not in (*known, *groups):
            raise ValueError(f"there is no key {key}{nearest(key, (*known, *groups))}")
    plain = {key: resolved[key] for key in known if key in resolved}
    if plain.get("name") is None:
        plain["name"] = name
    return TopLevel(**plain)
