"""Kill runs at random moments, go on with the same command, and compare with a run that nothing disturbed.

    python -m tests.helpers.kill_runs --kind one|all|writing [--times 20] [--seed 0] [--ranks 2]

    one      kill -9 of one rank; the others must end by themselves, unless the ranks have not met yet: until then only
             what started them (torchrun, srun) can know, whose part the script plays
    all      kill -9 of all ranks
    writing  kill -9 of all ranks while a checkpoint lies half written

The ranks are processes of the command `muown-train`. Every run must go on and end with the losses of the undisturbed
run, bit for bit, and with each step once in its metrics. The exit status is 1 if one does not.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.helpers.ranks import free_port, start_command
from tests.helpers.runs import SMALL, losses, metrics

STEPS = 40
SAVE_EVERY = {"one": 3, "all": 3, "writing": 1}
OTHERS_END_WITHIN = 90.0  # seconds after one rank was killed
RUN_ENDS_WITHIN = 300.0  # seconds
START_UP = 3.0  # seconds within which a run is killed that is to be killed before its first step
WRITING = 0.03  # seconds that writing a checkpoint takes, roughly
WIDER = ("model.dim=128", "model.heads=4")  # so that writing takes some time


class Failure(Exception):
    """A run that did not go on as it should, with the end of its log."""


@dataclass
class Cluster:
    """Starts runs of one kind; `out` is for the runs, their logs and their cache."""

    kind: str
    ranks: int
    corpus: Path
    out: Path

    def command(self, name: str) -> list[str]:
        """Return the words that a user would type."""
        settings = [*SMALL, *(WIDER if self.kind == "writing" else ()), f"tokens={256 * STEPS}", "log_every=1"]
        settings += [f"save_every={SAVE_EVERY[self.kind]}", "eval_every=16"]
        places = [f"data.train={self.corpus}/*.txt", f"out={self.out}", f"cache={self.out}/cache", f"name={name}"]
        return [*settings, *places]

    @contextmanager
    def start(self, name: str) -> Iterator[list[BaseProcess]]:
        """Start the ranks of a run; none of them outlives the context."""
        shared = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = [
            start_command(
                self.command(name),
                self.log(name),
                environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(self.ranks)
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.join()

    def log(self, name: str) -> Path:
        """Return the log of all ranks and all starts of a run."""
        return self.out / f"{name}.log"

    def finish(self, name: str) -> None:
        """Start a run, or go on with it, and wait for its end."""
        with self.start(name) as processes:
            wait(RUN_ENDS_WITHIN, lambda: all(process.exitcode is not None for process in processes))
            statuses = [process.exitcode for process in processes]
        if any(statuses):
            tail = "\n".join(self.log(name).read_text().splitlines()[-20:])
            raise Failure(f"exit statuses {statuses} where 0 was due\n{tail}")


def wait(seconds: float, condition: Callable[[], object]) -> bool:
    """Return whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def steps_done(folder: Path) -> int:
    """Return the number of steps that a run has recorded."""
    path = folder / "metrics.jsonl"
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def is_half_written(folder: Path) -> bool:
    """Return whether a checkpoint is being written."""
    return any((folder / "checkpoints").glob("partial-step-*"))


def kill(cluster: Cluster, name: str, moment: random.Random) -> str | None:
    """Start a run and kill it at a random moment.

    Returns:
        What was done in words, or None if the run ended before.
    """
    folder = cluster.out / name
    with cluster.start(name) as processes:

        def is_over() -> bool:
            return any(process.exitcode is not None for process in processes)

        step = moment.choice([0, *range(STEPS)])
        if step == 0 and cluster.kind != "writing":
            time.sleep(moment.uniform(0, START_UP))
        wait(RUN_ENDS_WITHIN, lambda: is_over() or steps_done(folder) >= step)
        if cluster.kind == "writing":
            while not is_over() and not stop_while_writing(processes, folder, moment):
                pass
        else:
            time.sleep(moment.uniform(0, 0.05))
        if is_over():
            return None
        victims = [moment.randrange(len(processes))] if cluster.kind == "one" else range(len(processes))
        for rank in victims:
            processes[rank].kill()
        began = time.monotonic()
        met = folder.exists()  # it is made once the ranks have met
        if met and not wait(OTHERS_END_WITHIN, lambda: all(process.exitcode is not None for process in processes)):
            raise Failure(f"rank {victims[0]} was killed, and {OTHERS_END_WITHIN:.0f} s later others are still there")
        after = f", the others ended {time.monotonic() - began:.1f} s later" if met else ", before the ranks met"
    if cluster.kind == "writing" and not is_half_written(folder):
        raise Failure("the checkpoint that was being written is not there as partial-step-…")
    which = f"rank {victims[0]}" if cluster.kind == "one" else "all ranks"
    how = {"one": after, "all": "", "writing": " while writing"}[cluster.kind]
    return f"{which} killed after step {steps_done(folder)}{how}"


def stop_while_writing(processes: list[BaseProcess], folder: Path, moment: random.Random) -> bool:
    """Stop all ranks at a random moment of the next checkpoint; return False, and let them go on, if it is too late."""
    wait(5, lambda: is_half_written(folder))
    time.sleep(moment.uniform(0, WRITING))
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.001)  # for the signals to arrive
    if is_half_written(folder):
        return True
    for process in processes:
        os.kill(process.pid, signal.SIGCONT)
    return False


def compare(folder: Path, whole: Path) -> None:
    """Compare a run that was killed with the undisturbed one.

    Raises:
        Failure: they differ.
    """
    steps = [line["step"] for line in metrics(folder)]
    if steps != list(range(STEPS + 1)):
        raise Failure(f"steps in metrics.jsonl: {steps}")
    for key in ("train/loss", "train/grad_norm", "valid/loss", "data/hash"):
        found, due = ([line.get(key) for line in metrics(run)] for run in (folder, whole))
        differing = [step for step in steps if found[step] != due[step]]
        if differing:
            step = differing[0]
            raise Failure(f"{key} of step {step} is {found[step]}, in the undisturbed run {due[step]}")
    left = [path.name for path in (folder / "checkpoints").iterdir() if not path.name.startswith("step-")]
    if left:
        raise Failure(f"left among the checkpoints: {left}")


def run_trial(cluster: Cluster, number: int, seed: int) -> str:
    """Kill one run, go on with it, and return what was done in words.

    Raises:
        Failure: it did not go on, or ended elsewhere.
    """
    moment = random.Random(f"{cluster.kind} {seed} {number}")
    for attempt in range(5):
        name = f"killed-{number}-{attempt}"
        done = kill(cluster, name, moment)
        if done:
            cluster.finish(name)
            compare(cluster.out / name, cluster.out / "whole")
            return done
    raise Failure("five runs came to their end before they could be killed")


def run_trials(kind: str, times: int, seed: int, ranks: int, corpus: Path, out: Path) -> list[str]:
    """Train an undisturbed run, then kill so many others, and return the failures."""
    out.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(kind, ranks, corpus, out)
    cluster.finish("whole")
    assert len(losses(out / "whole")) == STEPS
    failures = []
    for number in range(times):
        try:
            said = f"{run_trial(cluster, number, seed)}; went on, bit-equal"
        except Failure as failure:
            said = f"FAILED: {failure}"
            failures.append(str(failure))
        print(f"{number + 1:2}/{times} {said}", flush=True)
    print(f"{kind}: {times - len(failures)} of {times} resumed, bit-equal ({ranks} ranks, seed {seed})", flush=True)
    return failures


def write_corpus(folder: Path) -> Path:
    """Some texts to train on."""
    folder.mkdir(parents=True, exist_ok=True)
    words = random.Random(0)
    for i in range(120):
        numbers = (f"{words.randint(2, 99)} and {words.randint(2, 99)} are two numbers." for _ in range(60))
        (folder / f"{i:03d}.txt").write_text(" ".join(numbers))
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=SAVE_EVERY, required=True)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where the runs stay; by default they are removed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.out or Path(temporary)
        corpus = write_corpus(out / "corpus")
        return bool(run_trials(arguments.kind, arguments.times, arguments.seed, arguments.ranks, corpus, out / "runs"))


if __name__ == "__main__":
    sys.exit(main())
