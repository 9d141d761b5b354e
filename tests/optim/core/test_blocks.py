"""Rows move the same way whether matrices move alone, joined with others, or in parts."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muown_train.optim import Muon, Muown, MuownSign, NorMuon, NorMuown
from muown_train.optim.core import blocks
from tests.helpers.runs import slow_but

CASES = {
    "muown": (Muown, {}),
    "decay and schedule": (Muown, {"weight_decay": 0.1, "row_norm_schedule": (2.0, 3, 1.2)}),
    "signum": (Muown, {"magnitude": "signum", "nesterov": False}),
    "muon": (Muon, {"weight_decay": 0.1}),
    "sign": (MuownSign, {"magnitude_lr": 0.01}),
    "normuon": (NorMuon, {}),
    "normuown": (NorMuown, {}),
}
SHAPES = [(5, 3), (5, 3), (7, 4), (9, 3), (5, 3), (1, 4), (3, 5), (4, 6), (10, 3)]


def make(case, late, may_skip):
    """Return an optimizer of four groups; the parameters of the numbers in `late` have no gradient at first."""
    kind, options = CASES[case]
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    groups = [
        {"params": params[:5]},
        {"params": params[5:7], "lr": 0.01},
        {"params": params[7:8], "transposed": True},
        {"params": params[8:], "blocks": (5, 5)},
    ]
    optimizer = kind(groups, lr=0.1, **options)
    for group in optimizer.param_groups:  # Muon has no such argument
        group["orthogonalizer"] = "newton_schulz" if may_skip else "svd"
    optimizer.late = [params[i] for i in late]
    return optimizer, params


def set_limits(patch, elements):
    patch.setitem(blocks.LIMITS, "cpu", blocks.LIMITS["cpu"]._replace(joined=elements, part=elements))


def run(optimizer, params, skipped):
    for step in range(4):
        torch.manual_seed(step + 1)
        for p in params:
            grad = torch.randn(p.shape, dtype=p.dtype)
            p.grad = None if step < 2 and any(p is q for q in optimizer.late) else grad
        if skipped:
            optimizer.found_inf = torch.tensor(float(step in skipped))
        optimizer.step()


@pytest.mark.parametrize("skipped", [(), (1,)], ids=["", "skipped"])
@pytest.mark.parametrize("late", [(), (1, 6)], ids=["", "late"])
@pytest.mark.parametrize("elements", [1, 10, 16, 2**30])
@pytest.mark.parametrize("case", slow_but(["decay and schedule", "normuon"], CASES))
def test_rows_joined_or_apart_move_the_same(case, elements, late, skipped, monkeypatch):
    """In chunks of one row, of a part of a matrix, of one matrix, and of all; some matrices may start later."""
    (whole, params), (chunked, others) = make(case, late, bool(skipped)), make(case, late, bool(skipped))
    with monkeypatch.context() as patch:
        set_limits(patch, 1)
        patch.setattr(type(whole), "moves_rows_alone", False)
        run(whole, params, skipped)  # each matrix in one piece, and alone
    set_limits(monkeypatch, elements)
    run(chunked, others, skipped)
    # joined matrices with different numbers of steps have these as a tensor, whose powers are rounded otherwise
    exact = dict(rtol=0, atol=1e-14 if late or "nor" in case else 0)
    torch.testing.assert_close(others, params, **exact)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(chunked.state[q], whole.state[p], **exact)


@given(st.integers(1, 60), st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5), st.booleans())
@example(6, [3], 4, True)  # two rows are more than six elements
@example(1, [0, 9], 1, True)
@settings(max_examples=60)
def test_chunks_hold_all_rows_in_order(most, rows, n, may_cut):
    group = {"params": []}
    batch, start = [], 0
    for m in rows:
        W = torch.arange(start, start + m * n, dtype=torch.float64).view(m, n)
        start += m * n
        batch.append(blocks.Block(W, W, {"step": torch.ones(()), "vector": W[:, 0]}, group, blocks.Matrix((m, n))))
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, most)
        chunks = list(blocks.chunk_rows(batch, may_cut))
    joined = [blocks.join_rows(chunk) for chunk in chunks]
    everything = torch.cat([block.W for block in joined])
    assert everything.flatten().tolist() == list(range(start))
    assert torch.cat([block.state["vector"] for block in joined]).tolist() == everything[:, 0].tolist()
    for chunk in chunks:
        elements = sum(block.W.numel() for block in chunk)
        assert elements <= most or (len(chunk) == 1 and (not may_cut or len(chunk[0].W) == 1))
