"""Attention by blocks of queries equals scaled_dot_product_attention, forward and backward, at every length."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from muown_train.models import attention
from muown_train.models.attention import blockwise_attention, causal_attention, name_implementation


def inputs(length, dtype=torch.float64, heads=2, size=8):
    generator = torch.Generator().manual_seed(length)
    shape = (3, heads, length, size)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(4)]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("block", [4, 128])
def test_blocks_equal_the_whole(length, block, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", block)
    q, k, v, g = inputs(length)
    ours, whole = blockwise_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ours, whole)
    torch.testing.assert_close(torch.autograd.grad(ours, (q, k, v), g), torch.autograd.grad(whole, (q, k, v), g))


@pytest.mark.parametrize("way", [blockwise_attention, causal_attention])
def test_another_scale(way):
    q, k, v, _ = inputs(33)
    torch.testing.assert_close(way(q, k, v, 0.12), way(q * 0.12 * 8**0.5, k, v))


@pytest.mark.parametrize("length", [64, 300, 513, 2049])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_either_way_is_as_accurate_as_its_numbers(length, dtype):
    q, k, v, _ = inputs(length, dtype)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    with torch.no_grad():
        error = (causal_attention(q, k, v).double() - exact).abs().max()
    assert error < (0.05 if dtype == torch.bfloat16 else 1e-5)


def test_under_autocast_probabilities_stay_in_bfloat16():
    q, k, v, _ = inputs(8, torch.float32)
    kept = []

    def pack(tensor):
        kept.append(tensor.dtype)
        return tensor

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        blockwise_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert kept and torch.float32 not in kept  # casts to float32 and back would cost more than the products


@pytest.mark.parametrize(
    ("dtype", "length", "name"),
    [
        (torch.bfloat16, attention.LONGEST, "blocks of queries"),
        (torch.bfloat16, attention.LONGEST + 1, "FlashAttention"),
        (torch.float32, 64, "FlashAttention"),
        (torch.float64, 64, "FlashAttention"),
    ],
    ids=str,
)
def test_the_name_of_the_implementation(dtype, length, name):
    assert name_implementation(torch.empty(1, 2, length, 16, dtype=dtype, requires_grad=True)) == name


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (SDPBackend.CUDNN_ATTENTION, "cuDNN"),
        (SDPBackend.EFFICIENT_ATTENTION, "memory-efficient attention"),
        (SDPBackend.MATH, "plain products"),
        (SDPBackend.OVERRIDEABLE, "OVERRIDEABLE"),
    ],
    ids=str,
)
def test_what_torch_chooses_on_other_devices(monkeypatch, backend, name):
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q, k, v, is_causal: backend.value)
    assert name_implementation(torch.empty(1, 2, 64, 16)) == name
