"""The jobs of `--multirun`: judged before the first one starts, counted while they run, and listed at the end.

`Sweep` is a callback of Hydra's, which configs/train.yaml names. With Hydra's own sweeper a job that fails does not end
the sweep. Other sweepers choose the settings of a job while they run and decide themselves what a failure means, so
there nothing is judged before, and the number of jobs is not known. Other launchers start jobs in other processes: the
table then shows what their folders say.

This module does not load torch.
"""

import gc
import math
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from muown_train.cli.errors import CommandFailed, report_errors
from muown_train.cli.messages import explain_error
from muown_train.cli.process import FAILED, check_ranks, exit_with, is_output_closed
from muown_train.config.compose import CONFIG_DIR, check_config, load_config
from muown_train.config.overrides import expand_grid, find_varying_words, parse_overrides
from muown_train.config.run_name import locate_run_folder
from muown_train.config.schema import RunConfig
from muown_train.runs.status import FolderInUse, RepeatedFailure, read_status
from muown_train.runtime.atomic_files import write_atomic
from muown_train.runtime.formatting import escape_controls
from muown_train.runtime.redaction import redact

_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
# errors that one sentence explains; others show a traceback as well
_EXPLAINED = (ValueError, OSError, HydraException, OmegaConfBaseException, CommandFailed, RepeatedFailure)
_BUSY = "another process trains it"


@dataclass
class Job:
    """A job of a sweep."""

    text: str  # the words that tell it from the others
    folder: Path  # of its run
    failure: str | None = None  # the sentence of the error that ended it in this process
    is_busy: bool = False  # whether another process trains the run

    @property
    def state(self) -> str:
        """The state that the table shows."""
        if self.is_busy:
            return _BUSY
        state = "failed" if self.failure else str(read_status(self.folder).get("state", "failed"))
        return {"finished": "done"}.get(state, state)


def judge_jobs(
    jobs: Sequence[Sequence[str]], load: Callable[[Sequence[str]], RunConfig] = load_config
) -> list[RunConfig]:
    """Return the checked configuration of each job.

    Args:
        jobs: the overrides of each job.
        load: makes a configuration of overrides.

    Raises:
        ValueError: a setting of a job is wrong, or two jobs would train in one folder; it names the words of the job.
    """
    configs: list[RunConfig] = []
    first_with: dict[Path, int] = {}
    for i, (words, text) in enumerate(zip(jobs, find_varying_words(jobs), strict=True)):
        job = f"job {i + 1} of {len(jobs)} ({text}): " if text else ""
        try:
            config = load(words)
            folder = locate_run_folder(config.out, config.name)
        except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
            raise ValueError(redact(f"{job}{explain_error(error, words)}")) from error
        other = first_with.setdefault(folder, i)
        if other != i:
            hint = "give name='…-${KEY}' with what varies"
            if not any(word.startswith("name=") for word in words):
                hint = f"what varies is no part of a name by default, so {hint}"
            raise ValueError(redact(f"{job}it would train in {folder}, as job {other + 1} does: {hint}"))
        configs.append(config)
    return configs


def list_words(hydra: Any) -> list[str]:
    """Return the overrides of a job or a sweep as given: a `${…}` in them belongs to a job's configuration."""
    words: list[str] = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # type: ignore[assignment]
    return words


def find_best_loss(folder: Path) -> float:
    """Return the lowest validation loss of a run; infinity where none is a number."""
    from muown_train.runs.metrics import Metrics

    losses = [line["valid/loss"] for line in Metrics(folder).read() if "valid/loss" in line]
    return min((loss for loss in map(float, losses) if math.isfinite(loss)), default=math.inf)


class Sweep(Callback):
    """What Hydra calls when a sweep and its jobs start and end; with a single run it does nothing."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}  # by Hydra's number
        self.total: int | None = None  # the number of all jobs, where it is known
        self.plain_keys: set[str] = set()  # keys of the command line that do not vary

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Judge all jobs; nothing has started yet."""
        with report_errors([]):  # Hydra makes warnings of errors in callbacks, and lets an exit pass
            if check_ranks() > 1:
                raise ValueError(
                    "--multirun trains one job after the other in one process: under torchrun start each alone"
                )
            words = list_words(config.hydra)
            self.plain_keys = {
                override.key_or_group for override in parse_overrides(words) if not override.is_sweep_override()
            }
            if config.hydra.sweeper._target_ != _SWEEPER:
                return
            axes = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
            loader = GlobalHydra.instance().config_loader()
            jobs = expand_grid([*axes, *words], loader)
            try:
                configs = judge_jobs(jobs, _choose_loading(loader, config))
            except ValueError as error:
                raise ValueError(f"{error}; nothing was started") from error
            self.total = len(jobs)
            texts = find_varying_words(jobs)
            for i, (text, each) in enumerate(zip(texts, configs, strict=True)):
                self.jobs[i] = Job(redact(text), locate_run_folder(each.out, each.name))

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Say which job starts."""
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        _hide_secrets(config)
        number = config.hydra.job.num
        if number in self.jobs:
            text = self.jobs[number].text
        else:
            varying = [o for o in parse_overrides(list_words(config.hydra)) if o.key_or_group not in self.plain_keys]
            text = redact(" ".join(str(override.input_line) for override in varying))
        of = f" of {self.total}" if self.total else ""
        print(f"\njob {number + 1}{of}" + (f": {text}" if text else ""), flush=True)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Say why a job has failed; with Hydra's own sweeper the sweep goes on."""
        if config.hydra.mode != RunMode.MULTIRUN or job_return.status != JobStatus.FAILED:
            return
        error = job_return._return_value
        if not isinstance(error, _EXPLAINED):
            print(redact("".join(traceback.format_exception(error))), end="", file=sys.stderr, flush=True)
        sentence = explain_error(error, list_words(config.hydra))
        if is_output_closed():
            exit_with(f"error: {sentence}", FAILED)
        number = config.hydra.job.num
        print(f"error: job {number + 1}: {sentence}", file=sys.stderr, flush=True)
        job_return.overrides = [redact(word) for word in job_return.overrides or ()]  # Hydra prints them
        if config.hydra.sweeper._target_ != _SWEEPER:
            return
        if number in self.jobs:
            self.jobs[number].failure = sentence
            self.jobs[number].is_busy = isinstance(error, FolderInUse)
        job_return.status, job_return.return_value = JobStatus.COMPLETED, math.inf
        del error
        gc.collect()  # the tensors of the run, which its exception held

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print the table of jobs, and exit with status 1 if one of them failed."""
        if not self.jobs:
            return
        jobs = [job for _, job in sorted(self.jobs.items())]
        print(escape_controls("\n" + "\n".join(format_jobs(jobs))), flush=True)
        if any(job.state not in ("done", "diverged", _BUSY) for job in jobs):
            sys.exit(FAILED)


def format_jobs(jobs: Sequence[Job]) -> list[str]:
    """Return the lines that end a sweep: a table of jobs, why some failed, the best setting, and what compares them."""
    states = [job.state for job in jobs]
    losses = [find_best_loss(job.folder) for job in jobs]
    shown = [f"{loss:.4f}" if math.isfinite(loss) else "—" for loss in losses]
    width = max(len("state"), *map(len, states))
    lines = [f"job  best validation loss  {'state':<{width}}  setting"]
    for i, job in enumerate(jobs):
        lines.append(f"{i + 1:>3}  {shown[i]:>20}  {states[i]:<{width}}  {job.text}".rstrip())
    for i, job in enumerate(jobs):
        reason = job.failure or read_status(job.folder).get("reason")
        if states[i] != "running" and reason:
            lines.append(f"job {i + 1}: {reason}")
    done = [i for i, state in enumerate(states) if state == "done"]
    if done:
        best = min(done, key=lambda i: losses[i])
        lines.append(
            f"best: {jobs[best].text or f'job {best + 1}'}, validation loss {shown[best]}, in {jobs[best].folder}"
        )
    if len(done) > 1:
        lines.append(f"compare them: {shlex.join(['muown-train', 'compare', *(str(jobs[i].folder) for i in done)])}")
    return lines


def _choose_loading(loader: ConfigLoader, config: DictConfig) -> Callable[[Sequence[str]], RunConfig]:
    """Return what makes a configuration of overrides: `load_config`, or Hydra where --config-dir adds other files."""
    job = config.hydra.job
    own = [source for source in loader.get_sources() if source.provider not in ("hydra", "schema")]
    if job.config_name == "train" and [Path(source.path) for source in own] == [CONFIG_DIR]:
        return load_config

    def load(words: Sequence[str]) -> RunConfig:
        composed = loader.load_sweep_config(config, list(words))
        return check_config(_without_hydra(composed), composed.hydra.runtime.choices, words)

    return load


def _without_hydra(composed: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])


def _hide_secrets(config: DictConfig) -> None:
    """Replace secrets in the file to which Hydra writes the command line of a sweep."""
    file = Path(config.hydra.sweep.dir) / "multirun.yaml"
    if file.exists():
        write_atomic(file, redact(file.read_text()).encode())
