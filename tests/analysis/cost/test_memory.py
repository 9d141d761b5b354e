"""Traced memory equals what is measured on a CPU and what autograd keeps; so nearly does the optimizer's."""

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from muown_train.analysis.cost.memory import (
    PassMemory,
    PassSetup,
    _LiveStorages,
    combine_memory,
    estimate_optimizer_memory,
    extrapolate_pass,
    find_largest_micro_batch,
    trace_pass,
)
from muown_train.models import attention
from muown_train.models.gpt import GPT
from muown_train.models.language_model import LanguageModel
from muown_train.models.loss import CHUNK_LOGITS
from muown_train.models.speedrun import Speedrun
from muown_train.models.track3 import Track3
from muown_train.optim import SOAP, Combined, Lion, Muon, Muown, NorMuon, param_groups
from muown_train.optim.sharding import assign_owners
from muown_train.runtime.benchmark import measure_peak_memory
from tests.helpers.runs import slow_but

SMALL = {"V": 1024, "L": 2, "D": 128, "h": 4, "T": 128, "B": 4, "n": 0}


def make_pass(changed: dict, autocast: bool, architecture: str = "GPT"):
    """A model of these sizes, a call of a forward and backward pass, and its description."""
    size = SMALL | changed
    model = make_model(architecture, size)
    tokens = torch.randint(0, size["V"], (size["B"], size["T"]))

    def go() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(tokens, tokens).backward()

    return model, go, PassSetup(size["B"], size["T"], autocast, "cpu")


def make_model(architecture: str, size: dict) -> LanguageModel:
    V, L, D, h, T = (size[name] for name in "VLDhT")
    if architecture == "GPT":
        return GPT(V, L, D, h, T, activation_checkpointing=size["n"])
    if architecture == "Speedrun":
        return Speedrun(V, L, D, T, head_dim=D // h)
    if architecture == "Track3":
        return Track3(V, L, D, h, T)
    pytest.importorskip("transformers")
    from muown_train.models.qwen2 import Qwen2

    return Qwen2(V, L, D, h, h // 2, 3 * D, T)


VARIED = ({}, {"D": 256, "h": 2}, {"L": 5}, {"T": 512, "B": 1}, {"T": 640, "B": 1}, {"B": 8}, {"V": 128}, {"V": 4000})
CHECKPOINTED = ({"L": 3, "n": 1}, {"L": 3, "n": 3}, {"L": 4, "n": 4, "V": 128, "B": 8})
OTHERS = ({"D": 256, "h": 2}, {"V": 4000}, {"V": 128})
CASES = [
    *(("GPT", changed) for changed in VARIED + CHECKPOINTED),
    *((architecture, changed) for architecture in ("Speedrun", "Track3", "Qwen2") for changed in OTHERS),
]


# The quick cases trace both branches of attention, of the head and of checkpointing, and every architecture.
QUICK = [("GPT", {"V": 128}, False), ("GPT", {"L": 3, "n": 1}, True), ("Qwen2", {"V": 128}, True)]


@pytest.mark.parametrize(
    "case",
    slow_but(
        QUICK,
        [(*case, autocast) for case in CASES for autocast in (False, True)],
    ),
    ids=str,
)
def test_a_micro_batch(case):
    architecture, changed, autocast = case
    model, go, how = make_pass(changed, autocast, architecture)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    gc.collect()  # cycles of other tests would be counted as freed here
    assert trace_pass(model, how).peak == pytest.approx(measure_peak_memory(go, "cpu"), rel=0.01)


def measure_kept(model: nn.Module, go) -> int:
    """Bytes that autograd keeps besides weights and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages = {}

    def note(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        go()
    return sum(size for place, size in storages.items() if place not in own)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("flash", [False, True])
def test_what_autograd_keeps(autocast, flash, monkeypatch):
    if flash:  # as on a GPU
        monkeypatch.setattr(attention, "LONGEST", 0)
    model, _, how = make_pass({}, autocast)
    tokens = torch.randint(0, SMALL["V"], (how.rows, how.seq_len))
    losses = []

    def go() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(model(tokens, tokens))  # and with it what its backward pass needs

    slack = 8 * how.rows * how.seq_len  # the ids count there and not here
    assert measure_kept(model, go) == pytest.approx(trace_pass(model, how).activations, abs=slack)


def test_a_gpu_keeps_less_than_a_cpu():
    cuda, rows, T, D, h, H, V = PassSetup(2, 256, True), 2, 256, 1280, 20, 3584, 1000
    with torch.device("meta"):
        two, three = (GPT(V, layers, D, h, T) for layers in (2, 3))
    chunks = dict(CHUNK_LOGITS)
    kept = [trace_pass(model, cuda).activations for model in (two, three)]
    assert kept[1] < trace_pass(three, replace(cuda, device="cpu")).activations
    assert dict(CHUNK_LOGITS) == chunks  # tracing leaves nothing behind
    # by hand, of a block and token: two norms 6 D and 4 each, attention 12 D and 4 h, MLP 8 H; and weights in 2 bytes
    block = rows * T * (2 * (6 * D + 4) + 12 * D + 4 * h + 8 * H) + 2 * (4 * D * D + 3 * D * H)
    assert kept[1] - kept[0] == pytest.approx(block, rel=1e-3)


@pytest.mark.parametrize(
    "make",
    slow_but(
        [Muown, Lion],
        [Muown, Muon, NorMuon, Lion, partial(Muown, ns_dtype="float32"), partial(SOAP, precondition_frequency=1)],
    ),
    ids=["Muown", "Muon", "NorMuon", "Lion", "float32", "SOAP"],
)
def test_an_optimizer(make):
    model = GPT(512, 2, 128, 2, 16)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    matrices, rest = param_groups(model)
    optimizer = Combined(make(matrices), torch.optim.AdamW(rest, fused=True))
    width = 4 if "dtype" in str(getattr(make, "keywords", "")) else 2
    if isinstance(optimizer.optimizers[0], Muon | Muown | NorMuon) and width == 2:
        for group in optimizer.optimizers[0].param_groups:
            group["ns_dtype"] = "bfloat16"
    ((state, step),) = estimate_optimizer_memory(optimizer, 1, "cpu", width)
    optimizer.step()
    optimizer.step()
    if width == 2:  # a CPU without bfloat16 products converts their factors, in memory of the kernel's own
        tensors = [t for s in optimizer.state.values() for t in s.values()]
        with _LiveStorages([*tensors, *model.parameters(), *(p.grad for p in model.parameters())]) as storages:
            optimizer.step()
        assert storages.peak == pytest.approx(step, rel=0.05)
    else:
        assert measure_peak_memory(optimizer.step, "cpu") == pytest.approx(step, rel=0.05)
    made = sum(t.nbytes for part in optimizer.optimizers for s in part.state.values() for t in s.values())
    assert state == pytest.approx(made, rel=1e-3)


def test_a_sharded_optimizer_is_spread_as_shard_does():
    with torch.device("meta"):
        model = GPT(512, 3, 128, 2, 16)
    matrices, rest = param_groups(model)
    optimizer = Combined(Muown(matrices), torch.optim.AdamW(rest))
    ((whole, _),) = estimate_optimizer_memory(optimizer, 1, "cuda", 2)
    spread = estimate_optimizer_memory(optimizer, 3, "cuda", 2)
    assert sum(state for state, _ in spread) == pytest.approx(whole, abs=64)
    owners = assign_owners(optimizer, 3).owners
    (rank,) = {owners[p] for p in model.parameters() if p.shape == (512, 128)}
    assert spread[rank][0] >= 2 * 4 * 512 * 128
    assert not any(optimizer.optimizers[1].state.values())  # asking left nothing behind
    assert len(optimizer.optimizers[1].param_groups) == len(rest)


@pytest.mark.slow
def test_memory_of_a_rank_and_the_largest_micro_batch():
    how = PassSetup(32, 1024, True)
    with torch.device("meta"):
        models = [GPT(50280, 3, 768, 12, 1024, activation_checkpointing=n) for n in (0, 3)]
    parameters = sum(p.numel() for p in models[0].parameters())
    plain, checkpointed = (trace_pass(model, how) for model in models)
    alone = combine_memory(parameters, plain, [(10, 20), (0, 2000)])
    assert alone.weights == alone.gradients == 4 * parameters and alone.state == 10
    assert alone.peak == 10 + 2 * alone.weights + plain.peak

    doubled = trace_pass(models[0], replace(how, rows=64))

    def estimate(traced: PassMemory, rows: int):
        return combine_memory(parameters, extrapolate_pass(traced, 32, doubled, 64, rows), [(10, 20)])

    def find(room: int):
        return find_largest_micro_batch(partial(estimate, plain), 512, room)

    assert find(alone.peak) == (32, alone)
    assert find(alone.peak - 1)[0] == 16
    assert find(2**29) is None
    # the line through 32 and 64 rows is close at 16 and 128 rows
    for rows in (16, 128):
        exact = trace_pass(models[0], replace(how, rows=rows))
        found = extrapolate_pass(plain, 32, doubled, 64, rows)
        assert found.activations == pytest.approx(exact.activations, rel=1e-3)
        assert found.peak == pytest.approx(exact.peak, rel=0.03)
    assert checkpointed.peak < plain.peak and checkpointed.activations < plain.activations / 3
