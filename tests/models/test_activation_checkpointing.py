"""Blocks that compute their activations again: the same numbers from less memory."""

import pytest
import torch
from torch import Tensor, nn

from muown_train.models import gpt, language_model
from muown_train.models.gpt import GPT
from muown_train.runtime.benchmark import measure_peak_memory
from tests.helpers.runs import built, losses, trained


def model(activation_checkpointing: int) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=97, layers=3, dim=48, heads=4, seq_len=64, activation_checkpointing=activation_checkpointing)


def loss_and_gradients(model: nn.Module, autocast: bool = False) -> list[Tensor]:
    """Return the loss and the gradients of three rows; one position does not count."""
    model.zero_grad(set_to_none=True)
    ids = torch.randint(0, 97, (3, 65), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    targets[0, 3] = -100
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(ids[:, :-1], targets)
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("blocks", [1, 3])
def test_loss_and_gradients_are_the_same_bit_for_bit(blocks, autocast):
    found, expected = (loss_and_gradients(model(n), autocast) for n in (blocks, 0))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
def test_peak_memory_falls_with_every_block():
    peaks = []
    for blocks in range(4):
        with_blocks = model(blocks)
        peaks.append(measure_peak_memory(lambda m=with_blocks: loss_and_gradients(m), "cpu"))
    kept = 3 * 64 * 48 * 4  # a block's input, all that is left of its activations
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] - peaks[1] > 10 * kept and peaks[1] - peaks[2] > 10 * kept
    assert peaks[3] < 0.6 * peaks[0]


def test_blocks_are_called_again_only_where_gradients_are_wanted(monkeypatch):
    calls = []
    monkeypatch.setattr(
        gpt.SwiGLU, "forward", lambda self, x, forward=gpt.SwiGLU.forward: calls.append(0) or forward(self, x)
    )
    loss_and_gradients(model(2))
    assert len(calls) == 3 + 2
    used = []
    monkeypatch.setattr(language_model, "checkpoint", lambda *args, **options: used.append(args))
    with torch.no_grad():
        model(2)(torch.zeros(1, 4, dtype=torch.int64))
    assert not used and len(calls) == 5 + 3


def test_the_models_own_work_is_counted_once():
    assert model(3).flops_per_token() == model(0).flops_per_token()


@pytest.mark.parametrize("value", [-1, 4, 1.5, True, "all", None])
def test_a_number_of_blocks_that_cannot_be(value):
    message = rf"model.activation_checkpointing={value!r} must be a whole number of blocks, 0 to 3"
    with pytest.raises(ValueError, match=message):
        model(value)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_the_numbers_are_the_same_and_the_memory_is_less(autocast):
    """The backend stops at the graphs that the default one would get, since compiling them takes minutes."""
    found, peaks = [], []
    for blocks in (0, 3):
        torch._dynamo.reset()
        compiled = torch.compile(model(blocks), fullgraph=True, backend="aot_eager_decomp_partition")
        found.append([x.clone() for x in loss_and_gradients(compiled, autocast)])
        peaks.append(measure_peak_memory(lambda m=compiled: loss_and_gradients(m, autocast), "cpu"))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[1], loss_and_gradients(model(0), autocast), rtol=1e-3, atol=1e-3)
    assert peaks[1] < 0.75 * peaks[0]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_blocks_as_if_nothing_had_changed(corpus, tmp_path):
    constant = ("schedule=constant", "schedule.warmup=0", "eval_every=100")
    trained(corpus, tmp_path / "whole", *constant)
    trained(corpus, tmp_path / "changed", *constant, "tokens=1024", "model.activation_checkpointing=2")
    run = trained(corpus, tmp_path / "changed", *constant, "model.activation_checkpointing=1")
    assert run.model.activation_checkpointing == 1
    assert losses(tmp_path / "changed" / "run") == losses(tmp_path / "whole" / "run")


def test_a_run_refuses_more_blocks_than_it_has(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"model.activation_checkpointing=3 must be a whole number of blocks, 0 to 2"):
        built(corpus, tmp_path, "model.activation_checkpointing=3")
