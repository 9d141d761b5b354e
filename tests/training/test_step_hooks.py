"""Between steps: garbage is collected at the same steps on all ranks, and chosen steps are profiled."""

import gc
import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from muown_train.data.loader import Loader
from muown_train.data.random_tokens import RandomRows
from muown_train.training.step_hooks import collect_garbage_together, profile_steps
from muown_train.training.step_metrics import StepMetrics
from tests.helpers.runs import make_config, metrics, trained

CPU = torch.device("cpu")


def list_collections(ranks: int) -> tuple[list[int], list[bool]]:
    """The steps of 250 after which garbage was collected, and whether Python collects before, during and after."""
    step, collections = 0, []

    def note(phase: str, info: dict) -> None:
        if phase == "start":
            collections.append(step)

    enabled = [gc.isenabled()]
    with collect_garbage_together(ranks) as hooks:
        enabled.append(gc.isenabled())
        gc.callbacks.append(note)
        try:
            for step in range(1, 251):
                for call in hooks:
                    call(step)
        finally:
            gc.callbacks.remove(note)
    return collections, [*enabled, gc.isenabled()]


def test_several_ranks_collect_garbage_at_the_same_steps_and_one_rank_as_python_does():
    assert list_collections(ranks=2) == ([100, 200], [True, False, True])
    assert list_collections(ranks=1)[1] == [True, True, True]


@pytest.mark.parametrize(
    ("span", "begun", "end", "seen"),
    [((1, 2), 0, 7, (1, 2)), ((3, 5), 0, 7, (3, 5)), ((3, 5), 3, 7, (4, 5)), ((3, 9), 0, 7, (3, 7))],
    ids=["at the start", "later", "begun after the first", "ended before the last"],
)
def test_the_trace_has_the_steps_that_were_asked_for_and_taken(span, begun, end, seen, tmp_path, capsys):
    with profile_steps(span, tmp_path, 0, CPU, begun) as hooks:
        for step in range(begun + 1, end + 1):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(3).sum()
            for call in hooks:
                call(step)
    [path] = (tmp_path / "profile").iterdir()
    first, last = seen
    assert path.name == f"rank-00000-steps-{first}-{last}.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if str(event.get("name", "")).startswith("step ")}
    assert names == {f"step {step}" for step in range(first, last + 1)}
    assert capsys.readouterr().out == f"  profiled steps {first} to {last}: {path}\n"


def test_a_profile_is_written_where_training_fails(tmp_path):
    with pytest.raises(RuntimeError, match="out of memory"), profile_steps((1, 9), tmp_path, 1, CPU, 0) as [call]:
        call(1)
        raise RuntimeError("out of memory")
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-00001-steps-1-1.json.gz"]


@pytest.mark.parametrize(("span", "begun"), [(None, 0), ((1, 2), 2), ((5, 6), 0)])
def test_nothing_is_written_where_none_of_the_steps_is_taken(span, begun, tmp_path):
    with profile_steps(span, tmp_path, 0, CPU, begun) as hooks:
        for call in hooks:
            call(begun + 1)
    assert not list(tmp_path.iterdir())


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / "profile").write_text("")
    with profile_steps((1, 1), tmp_path, 0, CPU, 0) as [call]:
        call(1)
    assert capsys.readouterr().err.startswith("the profile of steps 1 to 1 is lost: ")


def test_a_run_is_profiled_and_trains_the_same(corpus, tmp_path):
    trained(corpus, tmp_path / "profiled", "profile_steps=2:3")
    trained(corpus, tmp_path / "plain")
    assert list((tmp_path / "profiled/run/profile").iterdir())
    same = [
        [(line["step"], line.get("train/loss")) for line in metrics(tmp_path / kind / "run")]
        for kind in ("profiled", "plain")
    ]
    assert same[0] == same[1]
    profiled = (tmp_path / "profiled/run/profile/rank-00000-steps-2-3.json.gz").read_bytes()
    assert b"Optimizer.step#Combined.step" in gzip.decompress(profiled)


@pytest.mark.parametrize("wrong", ["3", "3:2", "0:4", "a:b", "1:2:3", "[1]", "-1:4", "1:99999999999999999999"])
def test_steps_to_profile_must_be_a_span(wrong, corpus, tmp_path):
    with pytest.raises(ValueError, match=r"profile_steps=.* must be(gin| the first and the last)"):
        make_config(corpus, tmp_path, f"profile_steps={wrong}")


def test_memory_is_that_of_the_rank_that_takes_most(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    world = SimpleNamespace(rank=0, size=2, device=SimpleNamespace(type="cuda"))
    seen = []

    def add_other_rank(values):
        seen.append(values.clone())
        if values.ndim == 2:
            values[1] = torch.tensor([0.5, 11.0])
        return values

    world.sum = add_other_rank
    collector = StepMetrics(SimpleNamespace(batch_tokens=8, steps=3, flops_per_token=None, peak_flops=None), world)
    record = SimpleNamespace(line={"step": 1}, loss=torch.tensor(2.0), grad_norm=torch.tensor(1.0), hash=3, waited=0.0)
    collector.add(record)
    [line], _ = collector.collect()
    assert line["system/peak_memory"] == 11 and seen[0][0].tolist() == [2.0, 7.0]
    assert line["train/loss"] == 2.5


def test_the_thread_that_reads_for_a_gpu_uses_that_gpu(monkeypatch):
    used, pinned = [], []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    loader = Loader(RandomRows(16, 4, 0), 2, device=torch.device("cuda", 3))
    next(loader)
    loader.close()
    assert used == [torch.device("cuda", 3)] and pinned
