"""Largest attention logits against all T^2 of them, in each architecture."""

import math

import pytest
import torch

from muown_train.analysis import attention_logits
from muown_train.analysis.attention_logits import largest_logit, largest_logits
from muown_train.analysis.subject import Subject
from muown_train.distributed import World
from muown_train.models import attention
from muown_train.models.gpt import GPT, rotate
from muown_train.models.speedrun import Speedrun
from muown_train.models.track3 import ATTENTION_SCALE, NORM_EPS, Track3

SIZES = {"vocab_size": 31, "layers": 2, "dim": 32, "seq_len": 20}


def subject(model, micro_batch=2):
    here = World(0, 1, torch.device("cpu"))
    return Subject(model, here, dict, list, dict, 20, 40, micro_batch, False)


def rows(count=3, length=20, seed=0):
    return torch.randint(31, (count, length + 1), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 5, 12, 13])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_blocks_are_the_whole(monkeypatch, length, sign):
    monkeypatch.setattr(attention_logits, "QUERIES", 4)
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(2, 3, length, 8, generator=generator) for _ in range(2))
    logits = sign * 0.3 * q @ k.mT
    expected = logits[..., torch.ones(length, length).tril().bool()].max()
    assert torch.isclose(largest_logit(q, k, sign * 0.3), expected)


def all_logits(model, x):
    """Largest logit of each layer from its attention module's input, by its definition, all T^2 at once."""
    found = []

    def hook(module, inputs):
        x, cos, sin = inputs[:3]
        B, T, D = x.shape
        d = D // module.heads
        if isinstance(model, Track3):
            q, k = (part(x).view(B, T, -1, d).transpose(1, 2) for part in (module.q, module.k))
            q, k = (rotate(torch.nn.functional.rms_norm(y, (d,), eps=NORM_EPS), cos, sin) for y in (q, k))
            scale = ATTENTION_SCALE
        else:
            q, k = (y.view(B, T, -1, d).transpose(1, 2) for y in module.qkv(x).split(D, dim=-1)[:2])
            q, k, scale = rotate(q, cos, sin), rotate(k, cos, sin), 1 / math.sqrt(d)
        logits = scale * q @ k.mT
        found.append(float(logits[..., torch.ones(T, T).tril().bool()].max()))

    hooks = [block.attention.register_forward_pre_hook(hook) for block in model.blocks]
    with torch.no_grad():
        model(x)
    for handle in hooks:
        handle.remove()
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT(**SIZES, heads=2),
        lambda: GPT(**SIZES, heads=2, checkpointed=2),
        lambda: Speedrun(**SIZES, head_dim=16),
        lambda: Track3(**SIZES, heads=2),
    ],
    ids=["gpt", "gpt-checkpointed", "speedrun", "track3"],
)
def test_each_layer_of_a_model(make):
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(torch.randn_like(p) / 4)
    found = [float(value) for value in largest_logits(subject(model), rows())]
    assert len(found) == 2
    assert found == pytest.approx(all_logits(model, rows()[:, :-1]), rel=1e-4)
    assert attention._observer is None


def test_a_model_whose_attention_is_not_ours_is_refused():
    pytest.importorskip("transformers")
    from muown_train.models.qwen2 import Qwen2

    model = Qwen2(**SIZES, heads=2, kv_heads=1, mlp_hidden=32)
    with pytest.raises(ValueError, match="attention logits of Qwen2 cannot be seen"):
        largest_logits(subject(model), rows())


def test_an_error_inside_leaves_no_observer():
    with pytest.raises(IndexError):
        largest_logits(subject(GPT(**SIZES, heads=2)), 1000 + rows())
    assert attention._observer is None
