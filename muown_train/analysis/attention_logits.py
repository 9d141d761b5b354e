"""The largest attention logit of each layer, whose growth warns of instability (Kimi K2, arXiv 2507.20534)."""

import torch
from torch import Tensor

from muown_train.analysis.context import ProbeContext
from muown_train.models.attention import observe_attention

QUERIES = 128  # queries of a block: memory holds B h 128 T logits at a time and never B h T^2


@torch.no_grad()
def find_largest_logit(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return the largest scale q_i . k_j over keys j <= i, batch and heads: q, k (B, h, T, d) -> (), float32."""
    largest = []
    for start in range(0, q.shape[2], QUERIES):
        block = q[:, :, start : start + QUERIES].float()  # (B, h, t, d)
        end = start + block.shape[2]
        logits = block @ k[:, :, :end].float().mT  # (B, h, t, end)
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
        largest.append(logits.mul_(scale).masked_fill_(hidden, -torch.inf).amax())
    return torch.stack(largest).amax()


@torch.no_grad()
def find_largest_logits(context: ProbeContext, rows: Tensor) -> list[Tensor]:
    """Return the largest logit of each layer over this rank's rows (B, T+1), each () float32.

    Raises:
        ValueError: the model does not compute attention by `causal_attention`, the only function that can be observed.
    """
    largest: list[Tensor] = []
    for part in torch.split(rows, context.micro_batch):
        layers: list[Tensor] = []
        with observe_attention(lambda q, k, scale, layers=layers: layers.append(find_largest_logit(q, k, scale))):  # type: ignore[misc]
            context.compute_loss(part)
        largest = [torch.maximum(*pair) for pair in zip(largest, layers, strict=True)] if largest else layers
    if not largest:
        raise ValueError(
            f"attention logits of {type(context.model).__name__} cannot be observed: its attention does not call "
            "muown_train.models.attention.causal_attention"
        )
    return largest
