"""Scores of continuations are those of one row at a time by the model's own logits, whatever the ranks and chunks."""

import pytest
import torch

from muown_train.analysis.downstream.scores import score_continuations
from muown_train.models.gpt import GPT
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import HERE

PAIRS = [
    ([1], [2, 3]),
    ([4, 5, 6, 7], [8]),
    ([9, 10], []),
    ([11], [12, 13, 14, 15, 16]),
    ([17] * 30, [18, 19, 20]),  # longer than the model reads
    ([1], list(range(9, 49))),  # so is the continuation alone
    ([3], [2]),
]
T, V = 16, 50


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=64, layers=2, dim=16, heads=2, seq_len=T).eval()


def score_alone(model, context, continuation):
    """The score by a forward pass of one row, whose last ids alone are read."""
    row = [*context, *continuation][-(T + 1) :]
    count = min(len(continuation), len(row) - 1)
    logits = model(torch.tensor([row[:-1]]))[0, :, :V].double()
    total, likeliest = 0.0, True
    for at in range(len(row) - count, len(row)):
        total += float(logits[at - 1].log_softmax(0)[row[at]])
        likeliest &= int(logits[at - 1].argmax()) == row[at]
    return total, likeliest


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_scores_are_those_of_single_rows(rows):
    model = make_model()
    found = score_continuations(model, PAIRS, T, rows, HERE, V)
    with torch.no_grad():
        expected = [score_alone(model, *pair) for pair in PAIRS]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-4)
    assert found[2] == (0.0, True) and score_continuations(model, [], T, rows, HERE, V) == []


def test_the_likeliest_continuation_is_told():
    model = make_model()
    with torch.no_grad():
        likeliest = int(model(torch.tensor([[5, 6]]))[0, -1, :V].argmax())
    found = score_continuations(model, [([5, 6], [likeliest]), ([5, 6], [(likeliest + 1) % V])], T, 2, HERE, V)
    assert [greedy for _, greedy in found] == [True, False]


def score_on(world, rows):
    calls = []
    found = score_continuations(make_model(), PAIRS, T, rows, world, V, lambda: calls.append(1))
    return found, len(calls)


@pytest.mark.slow
def test_ranks_share_the_work_and_agree():
    alone = score_continuations(make_model(), PAIRS, T, 1, HERE, V)
    for (found, calls), (other, other_calls) in [on_ranks(2, score_on, 1)]:
        assert found == other and calls == other_calls == 4
        assert [total for total, _ in found] == pytest.approx([total for total, _ in alone], abs=1e-4)
