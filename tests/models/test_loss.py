"""The head's loss in chunks equals that of all logits at once, in value, gradients and what does not count."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.models import loss as loss_module
from muown_train.models.loss import IGNORE, choose_chunk_rows, linear_cross_entropy, softcap_logits
from muown_train.runtime.benchmark import measure_peak_memory


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_LOGITS, "cpu", 1)  # a chunk has `dim` rows


def inputs(rows, vocab_size, dim=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab_size, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, weight, torch.randint(vocab_size, (rows,), generator=generator)


def at_once(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum", ignore_index=IGNORE)


def gradients(loss, x, weight):
    return torch.autograd.grad(loss, (x, weight))


@settings(max_examples=30)
@given(rows=st.integers(1, 40), vocab_size=st.integers(1, 30), ignored=st.floats(0, 1), dim=st.integers(1, 50))
def test_it_equals_the_loss_of_all_logits(rows, vocab_size, ignored, dim):
    x, weight, targets = inputs(rows, vocab_size, dim, torch.float32)
    targets[torch.rand(rows, generator=torch.Generator().manual_seed(1)) < ignored] = IGNORE
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss_module.CHUNK_LOGITS, "cpu", 1)  # a chunk has `dim` rows
        loss = linear_cross_entropy(x, weight, targets)
        assert loss.dtype == torch.float32 and loss.shape == ()
        torch.testing.assert_close(loss, at_once(x, weight, targets))
        # a factor as the trainer's: 1 / number of targets
        torch.testing.assert_close(
            gradients(loss / 7, x, weight), gradients(at_once(x, weight, targets) / 7, x, weight), rtol=1e-4, atol=1e-6
        )
        with torch.no_grad():
            torch.testing.assert_close(linear_cross_entropy(x, weight, targets), loss)


def test_under_autocast_it_is_as_accurate_as_all_logits_in_bfloat16(small_chunks):
    x, weight, targets = inputs(32, 50, dim=64, dtype=torch.float32)
    exact, wanted = at_once(x, weight, targets), gradients(at_once(x, weight, targets), x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss, usual = linear_cross_entropy(x, weight, targets), at_once(x, weight, targets)
    assert loss.dtype == torch.float32
    assert abs(loss - exact) < 0.01 * exact
    for ours, theirs, true in zip(gradients(loss, x, weight), gradients(usual, x, weight), wanted, strict=True):
        assert ours.dtype == true.dtype
        assert (ours - true).norm() < 1.5 * (theirs - true).norm()


def test_values_too_large_for_an_exponential(small_chunks):
    x, weight, targets = inputs(10, 5, dtype=torch.float32)
    loss = linear_cross_entropy(x * 1e4, weight, targets)
    assert torch.isfinite(loss)
    torch.testing.assert_close(loss, at_once(x * 1e4, weight, targets))


def test_a_target_beyond_the_vocabulary_is_an_error(small_chunks):
    x, weight, targets = inputs(10, 5)
    for wrong in (5, -1):
        targets[7] = wrong
        with pytest.raises((RuntimeError, IndexError)):
            linear_cross_entropy(x, weight, targets)


def test_rows_that_do_not_count_may_hold_anything(small_chunks):
    x, weight, targets = inputs(10, 5, dtype=torch.float32)
    targets[:] = IGNORE
    assert linear_cross_entropy(x * math.inf, weight, targets) == 0
    assert linear_cross_entropy(x[:0], weight, targets[:0]) == 0


def test_it_never_holds_all_logits():
    rows, vocab_size = 4096, 4096
    x, weight, targets = inputs(rows, vocab_size, dtype=torch.float32)
    most = measure_peak_memory(lambda: linear_cross_entropy(x, weight, targets).backward(), "cpu")
    assert most < 0.6 * rows * vocab_size * 4


@pytest.mark.parametrize("rows, vocab_size", [(1, 7), (1000, 4096), (4096, 4096), (8192, 50280), (8193, 50280)])
def test_chunks_are_even_and_within_their_bound(rows, vocab_size):
    size = choose_chunk_rows(rows, vocab_size, 64, torch.device("cpu"))
    assert 1 <= size <= max(64, 2**20 // vocab_size)
    count = -(-rows // size)
    assert rows > (count - 1) * size and size * count - rows < count  # no chunk is small


@pytest.mark.parametrize("scale", [0.1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 15.0, 2.0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_bias_and_a_cap_have_the_gradients_of_all_logits(scale, softcap, with_bias, small_chunks):
    x, weight, targets = inputs(40, 30, dim=6, dtype=torch.float32)
    targets[::7] = IGNORE
    bias = torch.randn(30, generator=torch.Generator().manual_seed(2)).requires_grad_() if with_bias else None
    leaves = (x, weight, bias) if with_bias else (x, weight)

    def plain():
        z = F.linear(x * scale, weight, bias)
        capped = z if softcap is None else softcap * z / (z**2 + softcap**2).sqrt()
        return F.cross_entropy(capped, targets, reduction="sum", ignore_index=IGNORE)

    loss = linear_cross_entropy(x * scale, weight, targets, bias, softcap)
    torch.testing.assert_close(loss, plain())
    ours, theirs = torch.autograd.grad(loss / 7, leaves), torch.autograd.grad(plain() / 7, leaves)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * scale)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x * scale, weight, targets, bias, softcap), loss)


def test_a_cap_is_the_identity_near_zero_and_never_exceeded():
    z = torch.tensor([-1e6, -0.1, 0.0, 0.1, 1e6])
    torch.testing.assert_close(softcap_logits(z, 15.0), torch.tensor([-15.0, -0.1, 0.0, 0.1, 15.0]), rtol=1e-4, atol=0)


def test_a_bias_and_a_cap_under_autocast(small_chunks):
    x, weight, targets = inputs(32, 50, dim=64, dtype=torch.float32)
    bias = torch.randn(50, generator=torch.Generator().manual_seed(2)).requires_grad_()
    exact = linear_cross_entropy(x, weight, targets, bias, 15.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, bias, 15.0)
    assert abs(loss - exact) < 0.01 * exact
    ours, wanted = (torch.autograd.grad(each, (x, weight, bias)) for each in (loss, exact))
    for grad, true in zip(ours, wanted, strict=True):
        assert grad.dtype == true.dtype and (grad - true).norm() < 0.02 * true.norm()
