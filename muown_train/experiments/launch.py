"""Tasks for an experiment's runs, such as to train them, several at a time, each in a process of its own.

A run that is stopped, or dies, goes on from its last checkpoint when it is started again. torch is not loaded.
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

from muown_train.experiments.progress import Found, in_use, shown
from muown_train.runs.record import NoRun, read_run
from muown_train.runs.status import read_status
from muown_train.runtime.formatting import format_duration

STOPPED, REFUSED = 130, 2  # exit status
_ASKED = (STOPPED, 128 + signal.SIGTERM, -signal.SIGTERM)  # how a process ends that was asked to before it was ready
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command(found: Found, ranks: int = 1) -> list[str]:
    """The command of a run, which trains it from wherever it is."""
    return [*python(ranks), "-m", "muown_train", *words(found)]


def python(ranks: int) -> list[str]:
    """Python, or torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *(launcher if ranks > 1 else [])]


def words(found: Found) -> list[str]:
    """What follows `python -m muown_train`."""
    return [*found.cell.overrides, f"out={found.folder.parent}", f"name={found.folder.name}"]


def training(found: Found, ranks: int = 1) -> "Task":
    """What trains a run, from wherever it is."""
    folder = found.folder

    def at() -> str:
        """How far it is: its last update, of those that it will make, and the loss, of validation at the end."""
        try:
            run = read_run(folder)
        except NoRun:
            return "starting"
        key, called = ("valid/loss", "validation loss") if run.step == run.steps else ("train/loss", "loss")
        loss = run.last(key)
        at = f"step {run.step:,}/{run.steps:,}" if run.steps else "starting"
        return at + ("" if loss is None else f"  {called} {loss:.4f}")

    def end() -> str:
        return f"{shown(str(read_status(folder).get('state')))}  {at()}"

    def stopped() -> bool:
        return read_status(folder).get("state") in ("stopped", None)  # None: nothing to save yet

    begins = "goes on" if found.run and found.run.step else "begins"
    return Task(found.cell.name, folder.name, command(found, ranks), begins, at, end, lambda: in_use(folder), stopped)


def line_of(found: Found) -> str:
    """The same for a file of commands, which a shell's rules divide into words."""
    return shlex.join(words(found))


@dataclass(frozen=True)
class Task:
    """A process for a run."""

    name: str
    log: str
    command: list[str]
    begins: str  # what is said then
    at: Callable[[], str]  # how far it is
    end: Callable[[], str]  # what it came to
    taken: Callable[[], bool] = lambda: False  # whether another process does it by now: it is left to that one
    stopped: Callable[[], bool] = lambda: True  # whether it has, with nothing lost, when it was asked to


@dataclass
class _Job:
    """A task on its way."""

    task: Task
    slot: int
    process: subprocess.Popen[bytes]
    began: float


class Launcher:
    """Does tasks, at most `jobs` at a time.

    Args:
        logs: folder of what they print, a file for each.
        ranks: processes of each, on a GPU each where there are GPUs.
        gpus: of this machine.
        every: seconds between two lines about what is in training.
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
        self.first: int | None  # status of the first that ended
        self.stopping: str | None = None
        self.killed = False

    def run(self, tasks: Sequence[Task]) -> int:
        """Do them, one after the other or side by side; one that fails does not hold the others up.

        Where the first that ends has a setting that cannot be, the others are not begun.

        Returns:
            0; 1 if one failed; 130 if it was interrupted, by Ctrl-C, SIGTERM or SIGHUP, after all have saved.
        """
        self.failed, self.first = [], None
        self.logs.mkdir(parents=True, exist_ok=True)
        self.say(f"what they print: {self.logs}")
        waiting = list(tasks)
        heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        before = {number: signal.signal(number, self._stop) for number in heeded}
        told = time.monotonic()
        try:
            while self.running or (waiting and not self.stopping):
                while waiting and not self.stopping and len(self.running) < self.jobs:
                    self._start(waiting.pop(0))
                time.sleep(0.2)
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self._end(job, len(waiting))
                if waiting and self.first == REFUSED:
                    self.say(f"{len(waiting)} more are not begun: the first that ended has a setting that cannot be")
                    waiting.clear()
                if self.running and time.monotonic() - told >= self.every:
                    told = time.monotonic()
                    for job in self.running:
                        self.say(f"  {job.task.name}  {job.task.at()}")
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
            return STOPPED
        return 1 if self.failed else 0

    def _start(self, task: Task) -> None:
        if task.taken():
            self._leave(task)
            return
        slot = min(set(range(self.jobs)) - {job.slot for job in self.running})
        environment = os.environ | {"OMP_NUM_THREADS": str(self._threads())}
        if self.gpus:
            mine = range(slot * self.ranks, (slot + 1) * self.ranks)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(_visible(self.gpus)[i] for i in mine)
        self.say(f"{task.name}  {task.begins}")
        log = self.logs / f"{task.log}.log"
        with log.open("ab") as file:  # in a session of its own: Ctrl-C reaches it through this process alone
            process = subprocess.Popen(
                task.command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.running.append(_Job(task, slot, process, time.monotonic()))
        if self.stopping:  # while it was being started
            process.terminate()

    def _leave(self, task: Task) -> None:
        self.say(f"{task.name}  another process has begun it meanwhile: left to that one")

    def _threads(self) -> int:
        """The cores divided among all processes, unless the caller has said how many threads each may have."""
        given = os.environ.get("OMP_NUM_THREADS", "")
        if given.isdigit() and int(given):
            return int(given)
        return max(1, len(os.sched_getaffinity(0)) // (self.jobs * self.ranks))

    def _end(self, job: _Job, waiting: int) -> None:
        self.running.remove(job)
        status, name = job.process.returncode, job.task.name
        if status == REFUSED and job.task.taken():  # both were starting
            self._leave(job.task)
            return
        self.first = status if self.first is None else self.first
        left = f"{waiting + len(self.running)} to go"
        if status == 0:
            self.say(f"{name}  {job.task.end()}  in {format_duration(time.monotonic() - job.began)}; {left}")
            return
        reason = f"status {status}, {_last_words(self.logs / f'{job.task.log}.log')}"
        if status < 0:
            reason = f"killed by {signal.Signals(-status).name}  {job.task.at()}; the same command goes on"
        if self.stopping and (self.killed or status in _ASKED or job.task.stopped()):
            self.say(f"{name}  stopped  {job.task.at()}")
            return
        self.failed.append((name, reason))
        self.say(f"{name}  failed  {reason}; {left}")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ask all runs to stop and save; at a second Ctrl-C at once."""
        self.killed |= self.stopping is not None and number == signal.SIGINT
        self.stopping = signal.Signals(number).name
        for job in self.running:
            if self.killed:
                _kill(job.process)
            else:
                job.process.terminate()
        doing = "ending" if self.killed else "stopping after this update and saving"
        os.write(2, f"{self.stopping}: {doing}\n".encode())


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With its ranks, if it is torchrun: they have sessions of their own, and would go on."""
    try:
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:  # no such file on this system, or it is gone
        ranks = []
    process.kill()
    for pid in map(int, ranks):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _visible(gpus: int) -> list[str]:
    """The names that GPUs have in CUDA_VISIBLE_DEVICES."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(gpus)]


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"see {log}"
