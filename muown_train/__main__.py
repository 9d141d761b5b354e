"""`python -m muown_train key=value …`: train a language model, or go on where this run stopped."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from muown_train.config import CONFIG_DIR, check_overrides, one_sentence, register_resolvers, run_name

if TYPE_CHECKING:
    from muown_train.trainer import Trainer


@contextmanager
def explained() -> Iterator[None]:
    """What a user can cause ends with one sentence and exit status 1; with MUOWN_TRACEBACK=1 where it came from."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from the last checkpoint")
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        if os.environ.get("MUOWN_TRACEBACK") == "1":
            raise
        rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
        sys.exit(f"{rank}error: {one_sentence(error, [word for word in sys.argv[1:] if not word.startswith('-')])}")


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="train")
def train(config: DictConfig) -> None:
    """Build the run of a configuration and train it."""
    from muown_train.build import build
    from muown_train.distributed import world
    from muown_train.report import finish

    chosen = HydraConfig.get()
    # Hydra reports what leaves this function in its own words, but lets an exit pass
    with explained(), world() as here:
        check_overrides(chosen.overrides.task)
        if here.size > 1 and chosen.mode == RunMode.MULTIRUN:
            raise ValueError(
                "--multirun trains one job after the other in one process: under torchrun start each alone"
            )
        name = run_name(chosen.runtime.choices, list(chosen.overrides.task), config.seed)
        run = build(config, name, here)
        try:
            already = run.resume()
            train_to_the_end(run.trainer)
            if here.is_main:
                finish(run, already)
        finally:
            run.close()


def train_to_the_end(trainer: "Trainer") -> None:
    """Fit; a ValueError is no longer the user's from here on and keeps its traceback."""
    try:
        trainer.fit()
    except ValueError as error:
        raise RuntimeError(f"training failed after update {trainer.step}") from error


def main() -> None:
    """Entry of the command line."""
    register_resolvers()
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors in the overrides reach `explained`
    try:
        with explained():
            train()
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]


if __name__ == "__main__":
    main()
