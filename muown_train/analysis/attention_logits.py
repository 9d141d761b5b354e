"""The largest attention logit of each layer, whose growth foretells instability (Kimi K2, arXiv 2507.20534)."""

import torch
from torch import Tensor

from muown_train.analysis.context import Subject
from muown_train.models.attention import observe_attention

QUERIES = 128  # in a block: B h 128 T logits are there at once, and never B h T^2


@torch.no_grad()
def largest_logit(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """max of scale q_i . k_j over keys j <= i, batch and heads: q, k (B, h, T, d) -> (), float32."""
    largest = []
    for start in range(0, q.shape[2], QUERIES):
        block = q[:, :, start : start + QUERIES].float()  # (B, h, t, d)
        end = start + block.shape[2]
        logits = block @ k[:, :, :end].float().mT  # (B, h, t, end)
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
        largest.append(logits.mul_(scale).masked_fill_(hidden, -torch.inf).amax())
    return torch.stack(largest).amax()


@torch.no_grad()
def largest_logits(subject: Subject, rows: Tensor) -> list[Tensor]:
    """Of each layer, over rows (B, T+1) of this rank, () float32 each.

    Raises:
        ValueError: the model computes attention in a way of its own, not by `causal_attention`.
    """
    largest: list[Tensor] = []
    for part in torch.split(rows, subject.micro_batch):
        found: list[Tensor] = []
        with observe_attention(lambda q, k, scale, found=found: found.append(largest_logit(q, k, scale))):  # type: ignore[misc]
            subject.forward(part)
        largest = [torch.maximum(*pair) for pair in zip(largest, found, strict=True)] if largest else found
    if not largest:
        raise ValueError(
            f"attention logits of {type(subject.model).__name__} cannot be seen: its attention is not ours"
        )
    return largest
