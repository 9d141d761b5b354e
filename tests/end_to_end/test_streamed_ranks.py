"""Streams from a hub on real ranks: the rows that one process sees, also after a run on two was killed."""

import signal
import time
from pathlib import Path

import pytest

from muown_train.config.compose import load_config
from muown_train.runtime.distributed import World
from muown_train.training.build import build_run
from tests.data.hub.test_hub import build as hub_of_files
from tests.helpers.hub_server import Hub
from tests.helpers.ranks import free_port, on_ranks, start_command
from tests.helpers.runs import HERE, SMALL, metrics

STREAMED = (*SMALL, "model.vocab_size=300", "seed=5", "save_every=3", "log_every=1")
DATA = {
    "stream": ("data=fineweb_edu", "data.shuffle=16"),
    "mix": (
        *("data=mix", "+data@data.sources.web=fineweb_edu", "data.sources.web.shuffle=16"),
        *("+data@data.sources.code=fineweb_edu", "data.sources.code.shuffle=4", "data.weights={web: 0.7, code: 0.3}"),
    ),
}
TOKENS_PER_STEP = 256


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables that lead processes to a hub with three files of five row groups."""
    home = tmp_path_factory.mktemp("home")
    with Hub(hub_of_files(tmp_path_factory.mktemp("hub"), range(3))) as hub:
        yield hub.environment(home)


def settings(out, steps, *others, data="stream"):
    places = ("name=run", f"out={out}", f"cache={out}/cache")
    return [*STREAMED, *DATA[data], *places, f"tokens={steps * TOKENS_PER_STEP}", *others]


def train(world: World, words: list[str]) -> None:
    run = build_run(load_config(["name=run", *words]), world)
    run.resume()
    run.trainer.fit()
    run.close()


def hashes(out, steps):
    """The hashes of the global batches of all steps, in order."""
    lines = [line for line in metrics(out / "run") if "data/hash" in line]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    return [line["data/hash"] for line in lines]


def trained(out, steps, size, data):
    """The hashes of a run on so many ranks, in processes of its own."""
    on_ranks(size, train, settings(out, steps, "workers=0", data=data))
    return hashes(out, steps)


@pytest.fixture
def at_the_hub(environment, monkeypatch):
    for key, value in environment.items():
        monkeypatch.setenv(key, value)  # of the processes to come


def alone_and_together(world: World, out: Path, steps: int, data: str) -> list[str]:
    """Train on all ranks; the hashes of the batches that this process by itself would train on."""
    words = settings(out, steps, "workers=0", data=data)
    train(world, words)
    loader = build_run(load_config(["name=run", *words, f"out=elsewhere-{world.rank}"]), HERE).trainer.loader
    found = [f"{next(loader).hash % 2**64:016x}" for _ in range(steps)]
    loader.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
def test_two_ranks_see_what_one_sees(at_the_hub, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    found = on_ranks(2, alone_and_together, tmp_path, 12, data)
    assert found == [hashes(tmp_path, 12)] * 2
    assert len(set(found[0])) == 12


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
def test_killed_on_two_ranks_it_goes_on_on_one(at_the_hub, tmp_path, data):
    out = tmp_path / "killed"
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = settings(out, 10_000, "workers=1", data=data)
    running = [
        start_command(words, tmp_path / "log.txt", environment=shared | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    try:
        deadline = time.monotonic() + 120
        while not list(out.glob("run/checkpoints/step-*"))[1:]:
            assert time.monotonic() < deadline and all(process.exitcode is None for process in running)
            time.sleep(0.01)
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.join()
    assert [process.exitcode for process in running] == [-signal.SIGKILL] * 2
    steps = metrics(out / "run")[-1]["step"] + 5
    assert trained(out, steps, 1, data) == trained(tmp_path / "whole", steps, 1, data)


def probed_and_not(world: World, out: Path, data: str) -> tuple[list, list]:
    """Losses and hashes of a streamed run without and with probes, the second resumed in its middle."""
    found = []
    for name, probes in (("plain", []), ("probed", ["probes=[effective_rank,attention_logits]", "probe_every=2"])):
        for steps in (3, 6):
            words = [*settings(out / name, steps, "workers=0", *probes, data=data), "schedule=constant"]
            train(world, words)
        lines = metrics(out / name / "run") if world.is_main else []
        found.append([(line.get("data/hash"), line.get("train/loss")) for line in lines])
        ranks = [line["effective_rank/blocks.0.mlp.out.weight"] for line in lines if "probe/seconds" in line]
        assert not world.is_main or len(ranks) == (5 if probes else 0), ranks
    return tuple(found)


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_probes_read_streams_of_their_own(at_the_hub, tmp_path, size, data):
    plain, probed = on_ranks(size, probed_and_not, tmp_path, data)[0]
    assert plain == probed and len(plain) == 7
