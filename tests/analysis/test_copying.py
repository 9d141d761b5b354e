"""The probe of copying against a reference, and on models of which one copies, by construction."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from muown_train.analysis.context import ProbeContext
from muown_train.analysis.probes import Copying, make_repeated_rows
from tests.helpers.runs import HERE, built, find_probes

VOCABULARY = 50


class Stub(nn.Module):
    """A model whose logits (B, T, V) a function of its inputs (B, T) gives."""

    vocab_size = VOCABULARY

    def __init__(self, compute_logits):
        super().__init__()
        self.compute_logits = compute_logits

    def forward(self, inputs, targets):
        return F.cross_entropy(self.compute_logits(inputs).mT, targets, reduction="sum", ignore_index=-100)


def copy_by_induction(inputs):
    """Be sure of the token that followed the last one when it occurred before, and know nothing where it did not."""
    logits = torch.zeros(*inputs.shape, VOCABULARY)
    for row, tokens in enumerate(inputs.tolist()):
        for at, token in enumerate(tokens):
            if token in tokens[:at]:
                logits[row, at, tokens[tokens[:at].index(token) + 1]] = 40.0
    return logits


def know_frequencies(inputs):
    """Predict each token with the same probability everywhere, whatever came before."""
    return torch.linspace(-2, 2, VOCABULARY).expand(*inputs.shape, -1)


def measure(model, valid, seq_len, **settings):
    context = ProbeContext(model, HERE, dict, lambda: None, dict, lambda: valid.numpy(), seq_len, 256, 2, False)
    return Copying(context, **settings)()


def test_a_model_that_copies():
    cycle = torch.arange(10).repeat(20)  # in rows of 16 from the tenth token on each was there before
    found = measure(Stub(copy_by_induction), cycle, 16, rows=5, tokens=160)
    assert found["first_half"] == pytest.approx(math.log(VOCABULARY))
    assert found["second_half"] == pytest.approx(0, abs=1e-6)
    assert found["second_minus_first"] == pytest.approx(-math.log(VOCABULARY))
    assert found["early"] == pytest.approx(math.log(VOCABULARY)) and found["late"] == pytest.approx(0, abs=1e-6)
    assert found["late_minus_early"] == pytest.approx(-math.log(VOCABULARY))


def test_a_model_that_does_not():
    text = torch.arange(4).repeat(50)
    found = measure(Stub(know_frequencies), text, 16, rows=5, tokens=160)
    assert found["second_minus_first"] == pytest.approx(0, abs=1e-6)
    assert found["late_minus_early"] == pytest.approx(0, abs=1e-6)


def test_the_random_rows():
    rows = make_repeated_rows(4, 10, VOCABULARY)
    state = torch.get_rng_state()
    assert torch.equal(rows, make_repeated_rows(4, 10, VOCABULARY)) and torch.equal(state, torch.get_rng_state())
    assert rows.shape == (4, 20) and torch.equal(rows[:, :10], rows[:, 10:])
    assert all(len(set(row)) == 10 for row in rows.tolist()) and len(set(rows[:, 0].tolist())) > 1
    assert make_repeated_rows(2, 10, 7).shape == (2, 14)  # a row has every token of a small vocabulary twice


def test_against_losses_of_single_rows(corpus, tmp_path):
    """From logits, row by row, without micro-batches, masks and shortened rows."""
    run = built(corpus, tmp_path, "probes=copying", "probes.copying.rows=5", "probes.copying.tokens=150")
    run.resume()
    for _ in range(3):
        run.trainer.train_step()
    found = find_probes(run.trainer)()
    valid = torch.as_tensor(run.data.valid[:151].astype("int64"))
    run.close()

    @torch.no_grad()
    def lose(tokens):
        """Return the losses of the tokens after the first."""
        return F.cross_entropy(run.model(tokens[None, :-1])[0].double(), tokens[1:], reduction="none")

    random = [lose(row) for row in make_repeated_rows(5, 16, run.model.vocab_size)]
    text = [lose(valid[start : start + 33]) for start in range(0, 150, 32)]  # the last row has 22 targets
    assert [len(losses) for losses in text] == [32, 32, 32, 32, 22]
    expected = {
        "first_half": torch.cat([losses[:15] for losses in random]),
        "second_half": torch.cat([losses[16:] for losses in random]),
        "early": torch.cat([losses[:8] for losses in text]),
        "late": torch.cat([losses[24:] for losses in text]),
    }
    for key, losses in expected.items():
        assert found[f"copying/{key}"] == pytest.approx(losses.mean().item(), rel=1e-5), key
    assert found["copying/second_minus_first"] == found["copying/second_half"] - found["copying/first_half"]
    assert found["copying/late_minus_early"] == found["copying/late"] - found["copying/early"]


def test_a_text_too_short_for_late_positions(corpus, tmp_path):
    run = built(corpus, tmp_path, "probes=copying", "probes.copying.tokens=20")
    found = find_probes(run.trainer)()
    run.close()
    assert found["copying/early"] > 0 and math.isnan(found["copying/late"])
