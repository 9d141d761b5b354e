"""Largest attention logits against all T^2 of them, in each architecture."""

import math

import pytest
import torch

from muown_train.analysis import attention_logits
from muown_train.analysis.attention_logits import find_largest_logit, find_largest_logits
from muown_train.analysis.context import ProbeContext
from muown_train.models import attention
from muown_train.models.gpt import GPT, rotate
from muown_train.models.language_model import LanguageModel
from muown_train.models.speedrun import Speedrun
from muown_train.models.track3 import ATTENTION_SCALE, NORM_EPS, Track3
from muown_train.runtime.distributed import World

SIZES = {"vocab_size": 31, "layers": 2, "dim": 32, "seq_len": 20}


def context(model, micro_batch=2):
    here = World(0, 1, torch.device("cpu"))
    return ProbeContext(model, here, dict, list, dict, list, 20, 40, micro_batch, False)


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
    assert torch.isclose(find_largest_logit(q, k, sign * 0.3), expected)


def all_logits(model, x):
    """Largest logit of each layer from its attention module's input, by its definition, all T^2 at once."""
    found = []

    def hook(module, inputs, named):
        x, cos, sin = inputs[:3] if inputs else (named["hidden_states"], *named["position_embeddings"])
        B, T, D = x.shape
        scale = 1 / math.sqrt(cos.shape[-1])
        if isinstance(model, GPT | Speedrun):
            q, k = module.qkv(x).split(D, dim=-1)[:2]
        else:
            q, k = (module.q(x), module.k(x)) if isinstance(model, Track3) else (module.q_proj(x), module.k_proj(x))
        q, k = (y.view(B, T, -1, cos.shape[-1]).transpose(1, 2) for y in (q, k))
        if isinstance(model, Track3):
            q, k = (torch.nn.functional.rms_norm(y, y.shape[-1:], eps=NORM_EPS) for y in (q, k))
            scale = ATTENTION_SCALE
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        logits = scale * rotate(q, cos, sin) @ rotate(k, cos, sin).mT
        found.append(float(logits[..., torch.ones(T, T).tril().bool()].max()))

    modules = [m for m in model.modules() if type(m).__name__ in ("Attention", "Qwen2Attention")]
    hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    with torch.no_grad():
        model(x)
    for handle in hooks:
        handle.remove()
    return found


def qwen2():
    pytest.importorskip("transformers")
    from muown_train.models.qwen2 import Qwen2

    return Qwen2(**SIZES, heads=2, kv_heads=1, mlp_hidden=32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT(**SIZES, heads=2),
        lambda: GPT(**SIZES, heads=2, activation_checkpointing=2),
        lambda: Speedrun(**SIZES, head_dim=16),
        lambda: Track3(**SIZES, heads=2),
        qwen2,
    ],
    ids=["gpt", "gpt-checkpointed", "speedrun", "track3", "qwen2"],
)
def test_each_layer_of_a_model(make):
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(torch.randn_like(p) / 4)
    found = [float(value) for value in find_largest_logits(context(model), rows())]
    assert len(found) == 2
    assert found == pytest.approx(all_logits(model, rows()[:, :-1]), rel=1e-4)
    assert attention._observer is None


class WithoutAttention(LanguageModel):
    def forward(self, inputs, targets=None, cache=None):
        return torch.zeros(())


def test_a_model_whose_attention_is_not_ours_is_refused():
    with pytest.raises(ValueError, match="attention logits of WithoutAttention cannot be observed"):
        find_largest_logits(context(WithoutAttention()), rows())


def test_an_error_inside_leaves_no_observer():
    with pytest.raises(IndexError):
        find_largest_logits(context(GPT(**SIZES, heads=2)), 1000 + rows())
    assert attention._observer is None
