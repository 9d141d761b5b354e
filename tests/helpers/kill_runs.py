"""Kill runs at random moments, go on with the same command, and compare with a run that nothing disturbed.

    python -m tests.helpers.kill_runs --kind one|all|writing [--times 20] [--seed 0] [--ranks 2]

    one      kill -9 of one rank; the others must end by themselves, unless the ranks have not met yet: until then only
             what started them (torchrun, srun) can know, whose part the script plays
    all      kill -9 of all ranks
    writing  kill -9 of all ranks while a checkpoint lies half written

Real processes of `python -m muown_train`. Every run must go on and end with the losses of the undisturbed run, bit for
bit, and each update once in its metrics. Exit status 1 if one does not.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.ranks import free_port
from tests.helpers.runs import SMALL, losses, metrics

STEPS = 40
SAVE_EVERY = {"one": 3, "all": 3, "writing": 1}
OTHERS_END_WITHIN = 90.0  # seconds after one rank was killed
RUN_ENDS_WITHIN = 300.0  # seconds
START_UP = 8.0  # seconds within which a run is killed that is to be killed before its first update
WRITING = 0.03  # seconds that writing a checkpoint takes, about
WIDER = ("model.dim=128", "model.heads=4")  # so that writing takes some time


class Trouble(Exception):
    """What went wrong, with the end of the log."""


@dataclass
class Cluster:
    """How runs of one kind are started; `out` is for the runs, their logs and their cache."""

    kind: str
    ranks: int
    corpus: Path
    out: Path

    def command(self, name: str) -> list[str]:
        """What a user would type."""
        settings = [*SMALL, *(WIDER if self.kind == "writing" else ()), f"tokens={256 * STEPS}", "log_every=1"]
        settings += [f"save_every={SAVE_EVERY[self.kind]}", "eval_every=16"]
        places = [f"data.train={self.corpus}/*.txt", f"out={self.out}", f"cache={self.out}/cache", f"name={name}"]
        return [sys.executable, "-m", "muown_train", *settings, *places]

    @contextmanager
    def started(self, name: str) -> Iterator[list[subprocess.Popen]]:
        """The ranks of a run; none of them outlives the context."""
        common = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common["WORLD_SIZE"] = str(self.ranks)
        with self.log(name).open("a") as log:
            processes = [
                subprocess.Popen(
                    self.command(name),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(self.ranks)
            ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def log(self, name: str) -> Path:
        """Of all ranks and all starts of a run."""
        return self.out / f"{name}.log"

    def to_the_end(self, name: str) -> None:
        """Start a run, or go on with it, and wait for its end."""
        with self.started(name) as processes:
            wait(RUN_ENDS_WITHIN, lambda: all(process.poll() is not None for process in processes))
            statuses = [process.poll() for process in processes]
        if any(statuses):
            tail = "\n".join(self.log(name).read_text().splitlines()[-20:])
            raise Trouble(f"exit statuses {statuses} where 0 was due\n{tail}")


def wait(seconds: float, condition: Callable[[], object]) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def updates_done(folder: Path) -> int:
    """Updates that a run has recorded."""
    path = folder / "metrics.jsonl"
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def half_written(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((folder / "checkpoints").glob("partial-step-*"))


def killed(cluster: Cluster, name: str, moment: random.Random) -> str | None:
    """Start a run and kill it at a random moment; in words what was done, None where the run came to its end before."""
    folder = cluster.out / name
    with cluster.started(name) as processes:

        def over() -> bool:
            return any(process.poll() is not None for process in processes)

        update = moment.choice([0, *range(STEPS)])
        if update == 0 and cluster.kind != "writing":
            time.sleep(moment.uniform(0, START_UP))
        wait(RUN_ENDS_WITHIN, lambda: over() or updates_done(folder) >= update)
        if cluster.kind == "writing":
            while not over() and not stopped_while_writing(processes, folder, moment):
                pass
        else:
            time.sleep(moment.uniform(0, 0.05))
        if over():
            return None
        victims = [moment.randrange(len(processes))] if cluster.kind == "one" else range(len(processes))
        for rank in victims:
            processes[rank].kill()
        began = time.monotonic()
        met = folder.exists()  # it is made once the ranks have met
        if met and not wait(OTHERS_END_WITHIN, lambda: all(process.poll() is not None for process in processes)):
            raise Trouble(f"rank {victims[0]} was killed, and {OTHERS_END_WITHIN:.0f} s later others are still there")
        after = f", the others ended {time.monotonic() - began:.1f} s later" if met else ", before the ranks met"
    if cluster.kind == "writing" and not half_written(folder):
        raise Trouble("the checkpoint that was being written is not there as partial-step-…")
    which = f"rank {victims[0]}" if cluster.kind == "one" else "all ranks"
    how = {"one": after, "all": "", "writing": " while writing"}[cluster.kind]
    return f"{which} killed after update {updates_done(folder)}{how}"


def stopped_while_writing(processes: list[subprocess.Popen], folder: Path, moment: random.Random) -> bool:
    """Stop all ranks at a random moment of the next checkpoint; False, and they go on, if that came too late."""
    wait(5, lambda: half_written(folder))
    time.sleep(moment.uniform(0, WRITING))
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    time.sleep(0.001)  # for the signals to arrive
    if half_written(folder):
        return True
    for process in processes:
        process.send_signal(signal.SIGCONT)
    return False


def compare(folder: Path, whole: Path) -> None:
    """A run that was killed with the undisturbed one.

    Raises:
        Trouble: they differ.
    """
    steps = [line["step"] for line in metrics(folder)]
    if steps != list(range(STEPS + 1)):
        raise Trouble(f"updates in metrics.jsonl: {steps}")
    for key in ("train/loss", "train/grad_norm", "valid/loss", "data/hash"):
        found, due = ([line.get(key) for line in metrics(run)] for run in (folder, whole))
        differing = [step for step in steps if found[step] != due[step]]
        if differing:
            step = differing[0]
            raise Trouble(f"{key} of update {step} is {found[step]}, of the undisturbed run {due[step]}")
    left = [path.name for path in (folder / "checkpoints").iterdir() if not path.name.startswith("step-")]
    if left:
        raise Trouble(f"left among the checkpoints: {left}")


def trial(cluster: Cluster, number: int, seed: int) -> str:
    """Kill one run and go on with it; in words what was done.

    Raises:
        Trouble: it did not go on, or ended elsewhere.
    """
    moment = random.Random(f"{cluster.kind} {seed} {number}")
    for attempt in range(5):
        name = f"killed-{number}-{attempt}"
        done = killed(cluster, name, moment)
        if done:
            cluster.to_the_end(name)
            compare(cluster.out / name, cluster.out / "whole")
            return done
    raise Trouble("five runs came to their end before they could be killed")


def trials(kind: str, times: int, seed: int, ranks: int, corpus: Path, out: Path) -> list[str]:
    """Undisturbed run, then so many kills; the troubles."""
    out.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(kind, ranks, corpus, out)
    cluster.to_the_end("whole")
    assert len(losses(out / "whole")) == STEPS
    troubles = []
    for number in range(times):
        try:
            said = f"{trial(cluster, number, seed)}; went on, bit-equal"
        except Trouble as trouble:
            said = f"FAILED: {trouble}"
            troubles.append(str(trouble))
        print(f"{number + 1:2}/{times} {said}", flush=True)
    print(f"{kind}: {times - len(troubles)} of {times} resumed, bit-equal ({ranks} ranks, seed {seed})", flush=True)
    return troubles


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
        return bool(trials(arguments.kind, arguments.times, arguments.seed, arguments.ranks, corpus, out / "runs"))


if __name__ == "__main__":
    sys.exit(main())
