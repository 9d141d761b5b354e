"""`muown-train key=value …`: train a language model, or continue where this run stopped.

Exit status: 0 the run is finished, has diverged (a result), or was stopped and saved by SIGUSR1 or its time limit; 1 it
failed, and the same command goes on; 2 a setting is wrong; 3 it has failed too often without a new checkpoint; 141
nobody reads its standard output any more.

A run that SIGINT (Ctrl-C), SIGTERM or SIGHUP has stopped is saved, and then its process ends by that signal, which a
shell shows as 130, 143 or 129: so a shell ends the loop that the run is in, and whoever started it sees what happened.
There are two exceptions. Under torchrun and slurm/train.sbatch, which set RANK, a saved stop is always status 0: they
take the end of one rank by a signal for a failure, and torchrun would start all ranks anew. In other jobs of SLURM a
stop by SIGTERM or SIGHUP is status 0: SLURM has sent it, at a preemption or scancel, and notes that itself.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from muown_train.cli.errors import CommandFailed, report_errors
from muown_train.cli.help import format_help, format_version
from muown_train.cli.messages import check_flags, explain_error
from muown_train.cli.process import ENDING_SIGNALS, speed_up_torch_import
from muown_train.cli.sweep import find_best_loss, list_words
from muown_train.config.compose import CONFIG_DIR, check_choices, check_config, load_config, register_resolvers
from muown_train.config.overrides import quote_text
from muown_train.config.renamed_names import update_overrides
from muown_train.config.run_name import locate_run_folder
from muown_train.config.schema import RunConfig
from muown_train.runs.status import RepeatedFailure, count_start, forget_starts, lock_folder
from muown_train.runtime.redaction import redact_tracebacks

if TYPE_CHECKING:
    from filelock import FileLock

    from muown_train.runs.status import Outcome
    from muown_train.training.run import Run


def main(words: Sequence[str]) -> None:
    """Train what the words of a command line describe.

    Settings alone are composed here. Flags such as --multirun and --cfg are Hydra's, and go through its own main.
    """
    if {"--help", "-h"} & set(words):
        print(format_help(CONFIG_DIR))
    elif "--version" in words:
        print(format_version())
    elif any(word.startswith("-") for word in words):
        _run_hydra(words)
    else:
        # a traceback of a failure must not show secrets that stand in settings
        with redact_tracebacks(), report_errors(list(words)):
            config = load_config(words)
            train(config, words)


def train(config: RunConfig, overrides: Sequence[str]) -> float:
    """Build the run of a configuration, train it, and say how it ended. A stop ends the process.

    Args:
        overrides: the words of the command line that the configuration was made of.

    Returns:
        The lowest validation loss of the run; infinity where none is a number.
    """
    lock, refusal = begin_start(config)
    with ExitStack() as stack:
        if lock:
            stack.callback(lock.release)
        try:
            with speed_up_torch_import():  # this takes seconds, and errors in settings are known by now
                from muown_train.cli.summary import LossFigure, help_report_end, report_end
                from muown_train.runtime.distributed import join_world
                from muown_train.training.build import build_run
                from muown_train.training.continuation import continue_from_checkpoint

            world = stack.enter_context(join_world(device_name=config.device))
            if refusal := world.gather(refusal)[0]:
                raise refusal
            # the newest checkpoint may change meanwhile, so one rank looks for all
            config, source = world.run_on_main(lambda: continue_from_checkpoint(config, overrides))
            run = build_run(config, world, source, lock)
            run.sinks += [LossFigure(run)] if world.is_main else []
        except Exception:
            if isinstance(refusal, RepeatedFailure):  # also where the ranks do not even meet
                raise refusal from None
            raise
        try:
            ended_before = run.resume()
            outcome = ended_before or train_run(run)
            with ignore_stop_signals():
                if world.is_main:
                    forget_starts(run.folder)
                    report_end(run, outcome, already=ended_before is not None)
                else:
                    help_report_end(run, outcome)
        except OSError as error:  # settings are right: a file or a connection that worked until now does not
            sentence = explain_error(error, [])
            hint = "" if "the same command" in sentence else "; the same command goes on from the last checkpoint"
            raise CommandFailed(f"{sentence}{hint}") from error
        finally:
            run.close()
    if outcome.state == "stopped":
        sys.exit(choose_stop_status(outcome.reason))  # --multirun begins no further job
    return find_best_loss(run.folder)


def choose_stop_status(reason: str) -> int:
    """Return the exit status of a run that was stopped and saved: 0, or 128 and the signal that the process ends by.

    Args:
        reason: the name of the signal, or "time limit".
    """
    number = next((number for number in ENDING_SIGNALS if number.name == reason), None)
    if number is None or "RANK" in os.environ or ("SLURM_JOB_ID" in os.environ and number != signal.SIGINT):
        return 0
    return 128 + number


def begin_start(config: RunConfig) -> "tuple[FileLock | None, Exception | None]":
    """Lock the run's folder and count the start, if starts are counted; on the main rank, before anything can fail.

    Returns:
        The lock, and the error that all ranks end with once they have met, if there is one.
    """
    if config.give_up_after is None or os.environ.get("RANK", "0") != "0":
        return None, None
    folder = locate_run_folder(config.out, config.name)
    lock = None
    try:
        lock = lock_folder(folder)
        count_start(folder, config.give_up_after)
    except (ValueError, OSError, RepeatedFailure) as error:
        return lock, error
    return lock, None


def train_run(run: "Run") -> "Outcome":
    """Train a run. From here on a ValueError is not a wrong setting, and keeps its traceback."""
    import torch

    try:
        return run.train()
    except ValueError as error:
        raise RuntimeError(f"training failed after step {run.trainer.step}: {error}") from error
    except torch.OutOfMemoryError as error:
        sentence = f"{str(error).splitlines()[0]} Lower micro_batch, now {run.config.micro_batch}"
        raise CommandFailed(sentence) from error


@contextmanager
def ignore_stop_signals() -> Iterator[None]:
    """Ignore signals that ask for a stop: the run has ended, and SLURM sends some signals twice."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _run_hydra(words: Sequence[str]) -> None:
    """Let Hydra act on its flags: several jobs, the composed configuration, shell completion."""
    register_resolvers()
    with report_errors([]):
        settings = check_flags(words)
        check_choices(settings)
    if {"-sc", "--shell-completion"} & set(words):
        sys.argv[0] = "muown-train"  # the name that shells complete; Hydra's functions cannot for `python -m`
    sys.argv[1:] = [word if word.startswith("-") else quote_text(update_overrides([word]))[0] for word in words]
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # lets errors in the overrides reach `report_errors`
    try:
        with report_errors(settings):
            _train_job()
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="train")
def _train_job(composed: DictConfig) -> float:
    """Train a configuration that Hydra has composed, and return its lowest validation loss, for Hydra's sweepers."""
    hydra_config = HydraConfig.get()
    overrides = list_words(hydra_config)
    if hydra_config.mode == RunMode.MULTIRUN:  # cli/sweep.py says what failed
        return train(check_config(composed, hydra_config.runtime.choices, overrides), overrides)
    # Hydra reports errors that leave this function in its own words, but lets an exit pass. No word is at fault now.
    with redact_tracebacks(), report_errors([]):
        return train(check_config(composed, hydra_config.runtime.choices, overrides), overrides)
