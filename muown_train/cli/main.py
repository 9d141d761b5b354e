"""`python -m muown_train key=value …`: train a language model, or go on where this run stopped.

Exit status: 0 the run is finished, has diverged (a result), or was stopped and saved; 1 it failed, and the same command
goes on; 2 a setting that cannot be; 3 the same update has failed too often; 130 interrupted at once; 141 nobody
reads its standard output any more.
"""

import argparse
import atexit
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from muown_train.cli.collector import loading_torch
from muown_train.cli.help import help_text, version_text
from muown_train.cli.process import status_of, unread
from muown_train.config.compose import (
    CONFIG_DIR,
    check_flags,
    check_overrides,
    check_trust,
    one_run,
    one_sentence,
    plain_text,
    register_resolvers,
    run_name,
)
from muown_train.config.schema import top_level
from muown_train.runtime.atomic_files import replace
from muown_train.runtime.redaction import redacted, redacted_tracebacks

if TYPE_CHECKING:
    from muown_train.runs.status import Outcome
    from muown_train.training.build import Run

FAILED, WRONG, GAVE_UP, INTERRUPTED = 1, 2, 3, 130
# of the machine, not of a setting: the same command may go on later
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


class Failed(Exception):
    """Training failed in a way that one sentence tells."""


@contextmanager
def explained(settings: list[str] | None = None) -> Iterator[None]:
    """What a user can cause ends with one sentence; with MUOWN_TRACEBACK=1 with where it came from.

    Args:
        settings: `key=value` words that were given; by default those of the command line.
    """
    if settings is None:
        settings = [word for word in sys.argv[1:] if not word.startswith("-")]
    try:
        yield
    except KeyboardInterrupt:
        leave("interrupted; the same command goes on from the last checkpoint, if there is one", INTERRUPTED)
    except (ValueError, OSError, HydraException, OmegaConfBaseException, Failed) as error:
        if os.environ.get("MUOWN_TRACEBACK") == "1" or (isinstance(error, BrokenPipeError) and unread()):
            raise
        sentence = one_sentence(error, settings)
        passing = isinstance(error, OSError) and error.errno in _PASSING
        leave(f"error: {sentence}", FAILED if passing or isinstance(error, Failed | ConnectionError) else WRONG)


def leave(sentence: str, status: int) -> NoReturn:
    """Say why, on standard error, and end."""
    rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    print(f"{rank}{sentence}", file=sys.stderr, flush=True)
    sys.exit(status)


class Parser(argparse.ArgumentParser):
    """Of a script with flags: its documentation is its help, and what is wrong is one sentence."""

    def __init__(self, description: str | None = None, **further: Any) -> None:
        further.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=description, **further)

    def error(self, message: str) -> NoReturn:
        leave(f"error: {message}; see --help", WRONG)

    def steps(self, words: str | None) -> list[int] | None:
        """Updates after which there were checkpoints, as `--steps A,B` gives them."""
        try:
            return None if words is None else [int(step) for step in words.split(",")]
        except ValueError:
            self.error(f"--steps {words} must be updates with commas between them, such as 100,200,300")


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="train")
def train(config: DictConfig) -> None:
    """Build the run of a configuration and train it."""
    # Hydra reports what leaves this function in its own words, but lets an exit pass
    with redacted_tracebacks(), explained():
        name = checked(one_run(config))
        with loading_torch():  # which takes seconds, and so not before
            from muown_train.cli.summary import finish
            from muown_train.runs.status import GaveUp
            from muown_train.runtime.distributed import world
            from muown_train.training.build import build
            from muown_train.training.continuation import continued

    with redacted_tracebacks(), explained(), world() as here:
        if here.size > 1 and HydraConfig.get().mode == RunMode.MULTIRUN:
            raise ValueError(
                "--multirun trains one job after the other in one process: under torchrun start each alone"
            )
        try:
            overrides = list(HydraConfig.get().overrides.task)
            config, origin = here.on_main(lambda: continued(config, overrides, name))  # the newest may change
            run = build(config, name, here, origin)
        except GaveUp as error:
            leave(str(error), GAVE_UP)
        try:
            before = run.resume()
            outcome = before or trained(run)
            if here.is_main:
                with undisturbed():
                    finish(run, outcome, already=before is not None)
        except OSError as error:  # no wrong setting: what wrote and read until now cannot
            sentence = one_sentence(error, [])
            goes_on = "" if "the same command" in sentence else "; the same command goes on from the last checkpoint"
            raise Failed(f"{sentence}{goes_on}") from error
        finally:
            run.close()
        if outcome.state == "stopped":
            sys.exit(0)  # nor are further jobs of --multirun begun


def checked(config: DictConfig) -> str:
    """Check what can be checked without torch; `build` checks all.

    Returns:
        The run's name where the configuration gives none.
    """
    chosen = HydraConfig.get()
    overrides = list(chosen.overrides.task)
    if chosen.mode == RunMode.MULTIRUN:
        hide_secrets(Path(chosen.sweep.dir) / "multirun.yaml")  # Hydra's, of the command line as it is
    check_overrides(overrides)
    if OmegaConf.is_list(config.trust):
        check_trust(config.trust, overrides)
    name = run_name(chosen.runtime.choices, overrides, config.seed)
    top_level(OmegaConf.to_container(config, resolve=True), name)  # type: ignore[arg-type]
    return name


def hide_secrets(file: Path) -> None:
    """Replace a text file by itself with *** for secrets."""
    if file.exists():
        replace(file, redacted(file.read_text()).encode())


@contextmanager
def undisturbed() -> Iterator[None]:
    """What asks for a stop comes too late to matter: SLURM sends some signals twice."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def trained(run: "Run") -> "Outcome":
    """Train; from here on a ValueError is no longer a wrong setting and keeps its traceback."""
    import torch

    try:
        return run.train()
    except ValueError as error:
        raise RuntimeError(f"training failed after update {run.trainer.step}") from error
    except torch.OutOfMemoryError as error:
        raise Failed(f"{str(error).splitlines()[0]} Lower micro_batch, now {run.config.micro_batch}") from error


def main() -> None:
    """What the command line does; it raises SystemExit for any status but 0."""
    register_resolvers()
    if {"--help", "-h"} & set(sys.argv):
        print(help_text(CONFIG_DIR))
        return
    if "--version" in sys.argv:
        print(version_text())
        return
    with explained([]):
        check_flags(sys.argv[1:])
    if "-sc" in sys.argv or "--shell-completion" in sys.argv:
        sys.argv[0] = "muown-train"  # what shells complete; Hydra's functions cannot for `python -m`
    sys.argv[1:] = [word if word.startswith("-") else plain_text([word])[0] for word in sys.argv[1:]]
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors in the overrides reach `explained`
    try:
        with explained():
            train()
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]


def command() -> None:
    """Entry of the command line; a process with threads of others ends without tearing the interpreter down.

    Python ends a daemon thread that asks for the interpreter while it goes, and the C++ of a library may not bear that:
    the process aborts, status 134. So did a thread of gloo that held the tensors of a collective (a module that torch
    imports late keeps the default group alive, a traceback what it led through), and one that waits for W&B.
    """
    status = status_of(main) or 0
    if isinstance(status, int) and (int(os.environ.get("WORLD_SIZE", "1")) > 1 or threading.active_count() > 1):
        end_process(status)
    sys.exit(status)  # type: ignore[arg-type]


def end_process(status: int) -> NoReturn:
    """What Python does first when it ends, and then no more, as multiprocessing for its processes."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    command()
