"""Validation loss, exact: the same tokens whatever the ranks and micro-batch, and a token-weighted mean."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from muown_train.models.loss import IGNORE
from muown_train.runtime.distributed import World


def cut_valid_rows(ids: np.ndarray, targets: int, seq_len: int) -> Tensor:
    """Cut (N,) token ids into rows (R, T+1) int64 that predict the ids 1 … targets once each.

    Rows overlap by one id, as in training; the last row is filled up with `IGNORE`.
    """
    targets = min(targets, len(ids) - 1)
    count = math.ceil(targets / seq_len)
    flat = torch.full((count * seq_len + 1,), IGNORE, dtype=torch.int64)
    flat[: targets + 1] = torch.from_numpy(np.asarray(ids[: targets + 1], dtype=np.int64))
    return flat.unfold(0, seq_len + 1, seq_len)


def _iterate_chunks(rows: Tensor, micro_batch: int, world: World) -> Iterator[Tensor]:
    """Yield every size-th row in chunks (micro_batch, T+1) of equal shape, as many on every rank.

    Chunks are filled up with rows that do not count.
    """
    own = rows[world.rank :: world.size]
    for start in range(0, math.ceil(len(rows) / world.size), micro_batch):
        chunk = own[start : start + micro_batch]
        missing = micro_batch - len(chunk)
        yield torch.cat((chunk, chunk.new_full((missing, rows.shape[1]), IGNORE))) if missing else chunk


@torch.no_grad()
def sum_losses(
    compute_loss: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    spans: Sequence[slice],
    micro_batch: int,
    world: World,
    check_stop: Callable[[], None],
) -> list[tuple[float, int]]:
    """Return the summed loss of the targets in each span of a row, and their number; a collective call.

    Target i of a row is its token i + 1. The ranks share the rows.

    Args:
        compute_loss: of inputs (B, T) and targets (B, T), the loss summed over targets that are not `IGNORE`.
        rows: (R, T+1) int64, on every rank all of them; `IGNORE` is no target.
        spans: each with a start and a stop, from 0 to T.
        check_stop: is called before each micro-batch, equally often on every rank; what it raises ends the call.
    """
    totals = torch.zeros(len(spans), 2, dtype=torch.float64, device=world.device)
    for chunk in _iterate_chunks(rows, micro_batch, world):
        check_stop()
        chunk = chunk.to(world.device)
        for total, span in zip(totals, spans, strict=True):
            inputs, targets = chunk[:, : span.stop].clamp(min=0), chunk[:, 1 : span.stop + 1].clone()
            targets[:, : span.start] = IGNORE
            total += torch.stack((compute_loss(inputs, targets).double(), (targets != IGNORE).sum().double()))
    return [(loss, int(count)) for loss, count in world.sum(totals).tolist()]


def evaluate(
    model: nn.Module,
    ids: np.ndarray,
    targets: int,
    seq_len: int,
    micro_batch: int,
    world: World,
    check_stop: Callable[[], None] = lambda: None,
) -> tuple[float, int]:
    """Return the mean loss in nats per token and the number of targets, the same on every rank; a collective call.

    Args:
        model: `model(inputs (B, T), targets (B, T))` returns the loss summed over targets that are not `IGNORE`.
        ids: (N,) token ids.
        targets: how many tokens to predict, at most N - 1.
        check_stop: is called before each micro-batch, equally often on every rank; what it raises ends the evaluation.
    """
    rows = cut_valid_rows(ids, targets, seq_len)
    model.eval()
    try:
        ((loss, count),) = sum_losses(model, rows, [slice(0, seq_len)], micro_batch, world, check_stop)
    finally:
        model.train()
    return loss / count, count


def compute_perplexity(loss: float) -> float:
    """Return exp(loss) of a loss in nats per token; losses above 700, which would overflow, count as 700."""
    return math.exp(min(loss, 700))


@torch.no_grad()
def compute_block_losses(model: nn.Module, rows: Tensor, block: int, device: torch.device) -> Iterator[float]:
    """Yield the summed loss in nats of every `block` rows; the model must be in evaluation mode."""
    for chunk in torch.split(rows, block):
        chunk = chunk.to(device)
        yield model(chunk[:, :-1].clamp(min=0), chunk[:, 1:]).item()
