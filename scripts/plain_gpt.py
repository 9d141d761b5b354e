"""The plain loop of `benchmark_train.py`: a GPT of the same sizes and a training step as a tutorial would write them.

It computes all logits at once, uses scaled_dot_product_attention, torch.optim.Muon for matrices and AdamW for the rest,
and reads the loss on the host in every step. It uses nothing of muown_train, so that what is slow in the package is not
slow in the plain loop as well.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbours (the interleaved form of the RoPE paper). x (B, h, T, d); cos, sin (T, d/2)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = RMSNorm(dim), RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(D, dim=-1)
        q, k, v = (y.view(B, T, self.heads, D // self.heads).transpose(1, 2) for y in (q, k, v))
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(B, T, D))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class PlainGPT(nn.Module):
    """A GPT that maps (B, T) ids and (B, T) targets to the mean loss."""

    def __init__(self, vocab_size: int, layers: int, dim: int, heads: int, hidden: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        half = dim // heads // 2
        angles = torch.outer(torch.arange(seq_len).float(), 500_000.0 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                out = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if out else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs)
        T = inputs.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.flatten())


def make_plain_step(
    model: nn.Module, batches: Callable[[], Tensor], micro_batch: int, autocast: bool = False, lr: float = 2e-3
) -> tuple[Callable[[], float], list[torch.optim.Optimizer]]:
    """Return a function that takes one step and returns its loss, and the optimizers.

    Args:
        batches: returns the (B, T+1) ids of the next step.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embedding" in name]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    device = matrices[0].device

    def step() -> float:
        rows = batches().to(device)
        parts = rows.split(micro_batch)
        total = 0.0
        for part in parts:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = model(part[:, :-1], part[:, 1:]) / len(parts)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
        muon.zero_grad()
        adamw.zero_grad()
        return total

    return step, [muon, adamw]
