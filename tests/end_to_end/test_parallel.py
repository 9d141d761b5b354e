"""Whole runs under parallel=fsdp and hsdp: what they compute is what they compute under ddp."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from muown_train.runtime.distributed import World
from muown_train.runtime.replica_check import find_divergent_ranks
from muown_train.training.divergence import find_infinite_weight
from muown_train.training.run import Run, generate_sample
from tests.helpers.ranks import free_port, on_ranks, start_command
from tests.helpers.runs import SMALL, built, losses, metrics, trained, wait_until

pytestmark = pytest.mark.slow
# 4 micro-batches a step on two ranks; 187 tokens to evaluate on are 6 rows, the last of them not full
COMMON = ("tokens=5120", "micro_batch=1", "valid_tokens=187", "optim.lr=0.005", "save_every=100")
PROBES = ("probes=[spectral,effective_rank,attention_logits]", "probe_every=10", "probes.effective_rank.gradients=2")
FIXED_GAINS = ("precision=bfloat16", "optim.rest.vector.lr=0", "model.activation_checkpointing=1")
RUNS: dict[str, tuple[str, ...]] = {
    "muown": ("optim=muown", *PROBES),
    "adamw": ("optim=adamw",),
    "lion": ("optim=lion", "optim.lr=0.001"),
    # without the norm of all gradients, whose sum is rounded otherwise, even the bits of the weights are the same
    "unclipped": ("optim=adamw", "grad_clip=null"),
    "bfloat16": ("optim=adamw", "grad_clip=null", *FIXED_GAINS),
}
KINDS = ("ddp", "fsdp", "hsdp")


def list_weights(run: Run) -> list[Tensor]:
    """All weights, whole, on every rank."""
    weights = [p.detach() for p in run.model.parameters()]
    return [w.full_tensor() if hasattr(w, "full_tensor") else w.clone() for w in weights]  # type: ignore[attr-defined]


def train(world: World, corpus: Path, out: Path, kinds: tuple[str, ...], names: tuple[str, ...]) -> dict[Any, Any]:
    """The weights at the end and a sample of each run; two ranks are a node. Rank 3 gets other rows under hsdp."""
    os.environ["GROUP_RANK"] = str(world.rank // 2)
    found = {}
    for name in names:
        for kind in kinds:
            words = (*COMMON, *RUNS[name], f"parallel={kind}", "sample_tokens=40", "sample_every=10")
            run = trained(corpus, out / name / kind, *words, world=world)
            found[name, kind] = list_weights(run), generate_sample(run)
            with torch.no_grad():
                if kind == "hsdp" and world.rank == 3:
                    run.model.norm.weight.to_local()[0] += 1
            found["parted"] = find_divergent_ranks(run.model.named_parameters(), world, run.trainer.parallel.copies)
    return found


@pytest.fixture(scope="module")
def on_two(corpus, tmp_path_factory):
    """The folder of runs on two ranks, and what the ranks found."""
    out = tmp_path_factory.mktemp("two")
    return out, on_ranks(2, train, corpus, out, KINDS[:2], tuple(RUNS))


def assert_same_run(out: Path, name: str, kind: str, tolerance: float) -> None:
    of_ddp, other = metrics(out / name / "ddp" / "run"), metrics(out / name / kind / "run")
    assert len(other) == 21
    for key in ("step", "data/hash", "train/lr", "valid/tokens"):
        assert [line.get(key) for line in other] == [line.get(key) for line in of_ddp]
    for key in ("train/loss", "valid/loss"):
        expected = [line[key] for line in of_ddp if key in line]
        assert [line[key] for line in other if key in line] == pytest.approx(expected, abs=tolerance)
    manifests = [json.loads((out / name / each / "run" / "manifest.json").read_text()) for each in ("ddp", kind)]
    assert [manifest.pop("parallel")["kind"] for manifest in manifests] == ["ddp", kind]
    for manifest in manifests:
        manifest.pop("git_commit")  # which may change meanwhile
    assert manifests[0] == manifests[1]  # sizes are those of whole parameters


@pytest.mark.parametrize("name", RUNS)
def test_losses_under_fsdp_are_those_under_ddp(on_two, name):
    out, found = on_two
    assert_same_run(out, name, "fsdp", 1e-5 if name in ("muown", "adamw", "lion") else 0)
    for of_rank in found[1:]:  # what each rank says of the whole
        for one, other in zip(of_rank[name, "fsdp"][0], found[0][name, "fsdp"][0], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["unclipped", "bfloat16"])
def test_only_gains_and_the_norm_of_gradients_are_rounded_otherwise(on_two, name):
    found = on_two[1][0]
    for one, other in zip(found[name, "fsdp"][0], found[name, "ddp"][0], strict=True):
        assert torch.equal(one, other)


def test_every_rank_takes_part_in_a_sample(on_two):
    first, second = on_two[1]
    assert first["unclipped", "fsdp"][1] == second["unclipped", "fsdp"][1] == first["unclipped", "ddp"][1]
    lines = {kind: metrics(on_two[0] / "unclipped" / kind / "run") for kind in ("ddp", "fsdp")}
    during = {kind: [(line["step"], line["sample"]) for line in lines[kind] if "sample" in line] for kind in lines}
    assert [step for step, _ in during["ddp"]] == [10, 20] and during["ddp"] == during["fsdp"]
    assert during["ddp"][-1][1] == first["unclipped", "ddp"][1]


def assert_same_probes(out: Path, kind: str) -> None:
    """Probes see whole matrices, gradients and magnitudes."""
    found, expected = (
        [line for line in metrics(out / "muown" / each / "run") if "probe/seconds" in line] for each in (kind, "ddp")
    )
    assert [line["step"] for line in found] == [0, 10, 20]
    for one, other in zip(found, expected, strict=True):
        names = {key for key in other if key.startswith(("spectral/", "effective_rank/", "attention_logits/"))}
        assert len(names) > 40 and any(key.endswith("/negative") for key in names)
        assert {key: one[key] for key in names} == pytest.approx({key: other[key] for key in names}, rel=1e-3)


def test_probes_see_whole_matrices_and_gradients(on_two):
    assert_same_probes(on_two[0], "fsdp")


def test_losses_under_hsdp_are_those_under_ddp(corpus, tmp_path):
    names = ("muown", "adamw")
    found = on_ranks(4, train, corpus, tmp_path, KINDS[::2], names)
    for name in names:
        assert_same_run(tmp_path, name, "hsdp", 1e-5)
        for of_rank in found[1:]:
            assert all(map(torch.equal, of_rank[name, "hsdp"][0], found[0][name, "hsdp"][0]))
    assert_same_probes(tmp_path, "hsdp")
    assert found[0]["parted"] == "the weights of norm.weight on rank 3 are not those of rank 1"


def meet_trouble(world: World, corpus: Path, out: Path) -> dict[str, Any]:
    """What a rank sees of a gradient that is not finite on rank 1, and of an infinity in the last rank's rows."""
    run = built(corpus, out, *COMMON, "optim=adamw", "parallel=fsdp", world=world)
    model, before, reduced = run.model, {}, []
    for module in (model, *model.list_blocks()):
        module.set_all_reduce_hook(lambda _: reduced.append(run.trainer.step))

    def compute_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return model(inputs, targets) * (math.nan if world.rank == 1 and run.trainer.step == 5 else 1.0)

    run.trainer.replica = compute_loss
    for _ in range(8):
        before[run.trainer.step] = [weight.clone() for weight in list_weights(run)]
        run.trainer.step_metrics.add(run.trainer.train_step())
    lines = run.trainer.collect()
    moved = [not all(map(torch.equal, before[step], before[step + 1])) for step in range(7)]
    said = [find_infinite_weight(model, 8, world)]
    with torch.no_grad():
        if world.rank == world.size - 1:
            model.norm.weight.to_local()[-1] = math.inf
    said.append(find_infinite_weight(model, 8, world))
    run.close()
    skipped = [line["step"] for line in lines if line.get("train/skipped")]
    return {"skipped": skipped, "moved": moved, "said": said, "reduced": reduced}


def test_all_ranks_skip_a_step_and_see_an_infinity_alike(corpus, tmp_path):
    first, second = on_ranks(2, meet_trouble, corpus, tmp_path)
    assert first == second
    assert first["skipped"] == [6] and first["moved"] == [True] * 5 + [False, True]
    assert first["said"] == [None, "norm.weight holds NaN or infinity after step 8"]
    # once a step for each of two blocks and for what lies outside, though a step has four micro-batches
    assert first["reduced"] == [step for step in range(8) for _ in range(3)]


def reduce_in_bfloat16(world: World, corpus: Path, out: Path) -> None:
    for kind in KINDS[:2]:
        words = (*COMMON, "optim=adamw", "reduce_dtype=bfloat16", f"parallel={kind}")
        trained(corpus, out / kind, *words, world=world)


def test_gradients_travel_in_bfloat16(corpus, tmp_path):
    on_ranks(2, reduce_in_bfloat16, corpus, tmp_path)
    found, expected = (losses(tmp_path / kind / "run") for kind in ("fsdp", "ddp"))
    assert found == pytest.approx(expected, abs=0.02) and found != pytest.approx(expected, abs=1e-5)


@pytest.mark.timeout(900)
def test_compiled(corpus, tmp_path):
    on_ranks(2, compile_and_train, corpus, tmp_path)
    assert losses(tmp_path / "fsdp" / "run") == pytest.approx(losses(tmp_path / "ddp" / "run"), abs=1e-4)
    assert len([line for line in metrics(tmp_path / "fsdp" / "run") if "attention_logits/0" in line]) == 3


def compile_and_train(world: World, corpus: Path, out: Path) -> None:
    words = (*COMMON, "tokens=1024", "model.layers=1", "optim=adamw", "probes=[attention_logits]", "probe_every=2")
    for kind, compiled in (("ddp", "false"), ("fsdp", "true")):
        run = trained(corpus, out / kind, *words, f"parallel={kind}", f"compile={compiled}", world=world)
        generate_sample(run)


STEPS = 40
TO_KILL = ("tokens=15360", "batch_tokens=384", "micro_batch=1", "save_every=2", "log_every=1", "eval_every=20")


def start_ranks(corpus: Path, out: Path, parallel: str, ranks: int) -> list[Any]:
    """Start the ranks of the run by the command that a user would type; two ranks are a node."""
    places = (f"data.train={corpus}/*.txt", f"cache={corpus}/cache", f"out={out}", "name=run")
    words = [*SMALL, *TO_KILL, *places, f"parallel={parallel}", "sample_tokens=8"]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        start_command(
            words,
            out / f"{parallel}.log",
            environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": str(rank // 2)},
        )
        for rank in range(ranks)
    ]


@pytest.mark.timeout(900)
def test_killed_it_goes_on_under_another_kind_on_another_number_of_ranks(corpus, tmp_path):
    whole = trained(corpus, tmp_path / "whole", *TO_KILL)
    out, lines = tmp_path / "killed", tmp_path / "killed" / "run" / "metrics.jsonl"
    out.mkdir()
    for parallel, ranks, until in (("ddp", 2, 8), ("fsdp", 3, 16), ("ddp", 2, 24), ("hsdp", 4, None)):
        processes = start_ranks(corpus, out, parallel, ranks)
        if until:
            wait_until(lambda until=until: lines.exists() and lines.read_bytes().count(b"\n") > until)
            for process in processes:
                process.kill()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [-9 if until else 0] * ranks
    found, expected = metrics(out / "run"), metrics(whole.folder)
    assert [line["step"] for line in found] == list(range(STEPS + 1))
    assert [line.get("data/hash") for line in found] == [line.get("data/hash") for line in expected]
    assert losses(out / "run") == pytest.approx(losses(whole.folder), abs=1e-3)
    for parallel, ranks in (("fsdp", 3), ("hsdp", 4)):
        assert "going on after step" in (said := (out / f"{parallel}.log").read_text())
        assert f"{parallel}: " in said and f"float32 on {ranks} x" in said
    assert "--- end of sample ---" in said
