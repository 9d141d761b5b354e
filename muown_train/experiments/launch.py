"""Tasks of an experiment, such as training a run, each in a process of its own, several at a time.

A run that is stopped, or dies, goes on from its last checkpoint when it is started again. This module does not load
torch.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from muown_train.experiments.progress import GridPointStatus, is_in_use, rename_state
from muown_train.runs.record import NoRun, read_run
from muown_train.runs.status import read_status
from muown_train.runtime.formatting import format_duration

REFUSED = 2  # exit status
# exit statuses of a process that was asked to stop before it was ready to save
_ASKED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGTERM)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = tuple(128 + number for number in _SIGNALS)  # exit statuses of a launcher that they have stopped


@dataclass(frozen=True)
class Task:
    """A piece of work for a run, which a process of its own does."""

    name: str
    log: str
    command: list[str]
    start_text: str  # is printed when it starts
    get_progress: Callable[[], str]
    get_result: Callable[[], str]
    is_taken: Callable[[], bool] = lambda: False  # whether another process does it by now, which it is left to
    has_stopped: Callable[[], bool] = lambda: True  # whether it stopped, with nothing lost, when it was asked to


def make_training_task(status: GridPointStatus, ranks: int = 1) -> Task:
    """Return the task that trains a run, from the start or from where it is."""
    folder = status.folder

    def get_progress() -> str:
        try:
            run = read_run(folder)
        except NoRun:
            return "starting"
        key, name = ("valid/loss", "validation loss") if run.step == run.steps else ("train/loss", "loss")
        loss = run.last(key)
        steps = f"step {run.step:,}/{run.steps:,}" if run.steps else "starting"
        return steps + ("" if loss is None else f"  {name} {loss:.4f}")

    def get_result() -> str:
        return f"{rename_state(str(read_status(folder).get('state')))}  {get_progress()}"

    def has_stopped() -> bool:
        return read_status(folder).get("state") in ("stopped", None)  # None means that there is nothing to save yet

    return Task(
        status.point.name,
        folder.name,
        [*make_launch_words(ranks), *make_overrides(status)],
        "goes on" if status.run and status.run.step else "begins",
        get_progress,
        get_result,
        lambda: is_in_use(folder),
        has_stopped,
    )


def make_measuring_task(status: GridPointStatus, measure: str, ranks: int = 1) -> Task:
    """Return the task that measures the checkpoints of a run; `muown-train analyze` measures nothing twice.

    Args:
        measure: one of `Grid.measure`.
    """
    kind, *words = shlex.split(measure)
    device = [f"--{word}" for word in status.point.overrides if word.startswith("device=")]
    command = [*make_launch_words(ranks), "analyze", kind, str(status.folder), *words, *device]
    log = f"{status.folder.name}-{kind}"
    return Task(status.point.name, log, command, kind, lambda: kind, lambda: f"{kind} measured")


def make_launch_words(ranks: int) -> list[str]:
    """Return the words that start the command line of this program, on several ranks by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "muown_train"]


def make_overrides(status: GridPointStatus) -> list[str]:
    """Return the words of `muown-train` that train a run."""
    return [*status.point.overrides, f"out={status.folder.parent}", f"name={status.folder.name}"]


@dataclass
class _Job:
    """A task whose process runs."""

    task: Task
    slot: int
    process: subprocess.Popen[bytes]
    start_time: float


class Launcher:
    """Runs tasks, at most `jobs` at a time.

    Args:
        logs: the folder of what they print, with a file for each.
        ranks: the number of processes of each task, with a GPU each where there are GPUs.
        gpus: the number of GPUs of this machine.
        every: seconds between two lines about the progress of a task.
        say: prints a line.
    """

    def __init__(
        self, logs: Path, jobs: int, ranks: int, gpus: int, every: float = 30.0, say: Callable[[str], None] = print
    ) -> None:
        if gpus and jobs * ranks > gpus:
            raise ValueError(f"jobs={jobs} runs of ranks={ranks} need {jobs * ranks} GPUs, there are {gpus}")
        self.logs, self.jobs, self.ranks, self.gpus, self.every, self.say = logs, jobs, ranks, gpus, every, say
        self.running: list[_Job] = []
        self.failed: list[tuple[str, str]]
        self.first: int | None  # exit status of the first task that ended
        self.stopping: str | None = None
        self.killed = False

    def run(self, tasks: Sequence[Task]) -> int:
        """Run tasks one after the other or side by side; one that fails does not hold up the others.

        If the first task that ends was refused a setting, the others are not started.

        Returns:
            0; 1 if a task failed; 128 and the number of the signal (Ctrl-C, SIGTERM or SIGHUP) that stopped them, after
            all have saved.
        """
        self.failed, self.first = [], None
        self.logs.mkdir(parents=True, exist_ok=True)
        self.say(f"logs: {self.logs}")
        waiting = list(tasks)
        heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        before = {number: signal.signal(number, self._stop) for number in heeded}
        last_report = time.monotonic()
        try:
            while self.running or (waiting and not self.stopping):
                while waiting and not self.stopping and len(self.running) < self.jobs:
                    self._start(waiting.pop(0))
                time.sleep(0.2)
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self._end(job, len(waiting))
                if waiting and self.first == REFUSED:
                    self.say(f"{len(waiting)} more are not started: the first that ended was refused a setting")
                    waiting.clear()
                if self.running and time.monotonic() - last_report >= self.every:
                    last_report = time.monotonic()
                    for job in self.running:
                        self.say(f"  {job.task.name}  {job.task.get_progress()}")
        finally:
            for job in self.running:
                job.process.terminate()
            for job in self.running:
                job.process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        for name, reason in self.failed:
            self.say(f"failed: {name}: {reason}")
        if self.stopping:
            saved = "all other runs have saved" if self.failed else "all runs have saved"
            if self.killed:
                saved = "runs were killed, and go on from what they had saved"
            self.say(f"{self.stopping}: {saved}; the same command goes on")
            return 128 + signal.Signals[self.stopping]
        return 1 if self.failed else 0

    def _start(self, task: Task) -> None:
        if task.is_taken():
            self._leave(task)
            return
        slot = min(set(range(self.jobs)) - {job.slot for job in self.running})
        # torchrun gives ranks 30 seconds to save, unless it is told otherwise
        environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"} | os.environ
        environment["OMP_NUM_THREADS"] = str(self._count_threads())
        if self.gpus:
            mine = range(slot * self.ranks, (slot + 1) * self.ranks)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(_list_gpu_names(self.gpus)[i] for i in mine)
        self.say(f"{task.name}  {task.start_text}")
        log = self.logs / f"{task.log}.log"
        with log.open("ab") as file:  # a session of its own lets Ctrl-C reach it through this process alone
            process = subprocess.Popen(
                task.command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.running.append(_Job(task, slot, process, time.monotonic()))
        if self.stopping:  # a signal came while the process was started
            process.terminate()

    def _leave(self, task: Task) -> None:
        self.say(f"{task.name}  another process has begun it meanwhile: left to that one")

    def _count_threads(self) -> int:
        """Return the number of threads of a process: OMP_NUM_THREADS, or its share of the cores."""
        given = os.environ.get("OMP_NUM_THREADS", "")
        if given.isdigit() and int(given):
            return int(given)
        return max(1, len(os.sched_getaffinity(0)) // (self.jobs * self.ranks))

    def _end(self, job: _Job, waiting: int) -> None:
        self.running.remove(job)
        status, name = job.process.returncode, job.task.name
        if status == REFUSED and job.task.is_taken():  # another process started the same run at the same time
            self._leave(job.task)
            return
        self.first = status if self.first is None else self.first
        left = f"{waiting + len(self.running)} to go"
        if status == 0:
            self.say(
                f"{name}  {job.task.get_result()}  in {format_duration(time.monotonic() - job.start_time)}; {left}"
            )
            return
        reason = f"status {status}, {_read_last_line(self.logs / f'{job.task.log}.log')}"
        if status < 0:
            reason = f"killed by {signal.Signals(-status).name}  {job.task.get_progress()}; the same command goes on"
        if self.stopping and (self.killed or status in _ASKED or job.task.has_stopped()):
            self.say(f"{name}  stopped  {job.task.get_progress()}")
            return
        self.failed.append((name, reason))
        self.say(f"{name}  failed  {reason}; {left}")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: ask all runs to stop and save, or kill them at a second Ctrl-C."""
        self.killed |= self.stopping is not None and number == signal.SIGINT
        self.stopping = signal.Signals(number).name
        for job in self.running:
            if self.killed:
                _kill(job.process)
            else:
                job.process.terminate()
        doing = "ending" if self.killed else "stopping after this step and saving"
        os.write(2, f"{self.stopping}: {doing}\n".encode())


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and, if it is torchrun, its ranks, which have sessions of their own and would go on."""
    try:
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:  # this system has no such file, or the process has ended
        ranks = []
    process.kill()
    for pid in map(int, ranks):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _list_gpu_names(gpus: int) -> list[str]:
    """Return the names that the GPUs have in CUDA_VISIBLE_DEVICES."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(gpus)]


def _read_last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"see {log}"
