"""Small runs in this process: compose a configuration as the command line would, build and train it."""

import copy
import functools
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from muown_train.config.compose import compose_config, load_config
from muown_train.config.schema import RunConfig
from muown_train.runtime.distributed import World
from muown_train.training.build import build_run
from muown_train.training.run import Run
from muown_train.training.step_metrics import StepRecord
from muown_train.training.trainer import Trainer

HERE = World(0, 1, torch.device("cpu"))
# A model of 0.15M parameters on `data=files`: a step takes some milliseconds.
SMALL = (
    "data=files",
    "model.layers=2",
    "model.dim=32",
    "model.heads=2",
    "seq_len=32",
    "batch_tokens=256",
    "micro_batch=2",
    "tokens=3072",
    "valid_tokens=200",
    "eval_every=5",
    "save_every=4",
    "log_every=3",
    "precision=float32",
    "sample_tokens=0",
)


def slow_but(quick: Iterable[Any], values: Iterable[Any], several: bool = False) -> list[Any]:
    """Parameters of a test that is slow for all values but some; `several` if a value is a tuple of several of them."""
    few = list(quick)
    return [
        value if value in few else pytest.param(*(value if several else [value]), marks=pytest.mark.slow)
        for value in values
    ]


def configured(*overrides: str) -> DictConfig:
    """The configuration that these overrides make."""
    return compose_config(list(overrides))


def make_config(corpus: Path, out: Path, *overrides: str) -> RunConfig:
    """The configuration of a small run on `corpus`, named "run" unless the overrides say otherwise."""
    config = copy.deepcopy(_load_config(("name=run", *SMALL, *overrides)))
    given = {override.partition("=")[0] for override in overrides}
    config.out = config.out if "out" in given else str(out)
    config.cache = config.cache if "cache" in given else f"{corpus}/cache"
    if "train" in config.data and "data.train" not in given:
        config.data["train"] = f"{corpus}/*.txt"
    return config


def built(corpus: Path, out: Path, *overrides: str, world: World = HERE) -> Run:
    """A small run of such a configuration."""
    return build_run(make_config(corpus, out, *overrides), world)


@functools.lru_cache(maxsize=64)
def _load_config(overrides: tuple[str, ...]) -> RunConfig:
    """A configuration without the places of a test: composing it takes a third of a small run's time."""
    return load_config(list(overrides))


def trained(corpus: Path, out: Path, *overrides: str, world: World = HERE) -> Run:
    """Such a run, trained to its end from wherever it was."""
    run = built(corpus, out, *overrides, world=world)
    if not run.resume():
        run.train()
    run.close()
    return run


class _Killed(BaseException):
    """Stands for a kill: nothing after it runs."""


def train_until_killed(run: Run, at: int) -> None:
    """Train a run and end it as a kill would, before the step after `at`."""
    step = Trainer.train_step

    def kill(trainer: Trainer) -> StepRecord:
        if trainer.step == at:
            raise _Killed
        return step(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", kill)
        with pytest.raises(_Killed):
            run.trainer.fit()
    run.close()


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    """Training losses, step by step."""
    return [line["train/loss"] for line in metrics(folder) if "train/loss" in line]


def wait_until(true, seconds: float = 120) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def find_probes(trainer: Trainer) -> Any:
    """The function by which a run takes the measurements of its probes, or None."""
    return next((m.measure for m in trainer.measurements if m.key == "probe/seconds"), None)
