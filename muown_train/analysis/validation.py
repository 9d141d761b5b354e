"""Validation loss, exact: the same tokens whatever the ranks and micro-batch, and a token-weighted mean."""

import math
from collections.abc import Callable, Iterator

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


def iterate_chunks(rows: Tensor, micro_batch: int, world: World) -> Iterator[Tensor]:
    """Yield every size-th row in chunks (micro_batch, T+1) of equal shape, as many on every rank.

    Chunks are filled up with rows that do not count.
    """
    own = rows[world.rank :: world.size]
    for start in range(0, math.ceil(len(rows) / world.size), micro_batch):
        chunk = own[start : start + micro_batch]
        missing = micro_batch - len(chunk)
        yield torch.cat((chunk, chunk.new_full((missing, rows.shape[1]), IGNORE))) if missing else chunk


@torch.no_grad()
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
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    model.eval()
    try:
        for chunk in iterate_chunks(rows, micro_batch, world):
            check_stop()
            chunk = chunk.to(world.device)
            inputs, wanted = chunk[:, :-1].clamp(min=0), chunk[:, 1:]
            total += torch.stack((model(inputs, wanted).double(), (wanted != IGNORE).sum().double()))
    finally:
        model.train()
    loss, count = world.sum(total).tolist()
    return loss / count, int(count)


def compute_perplexity(loss: float) -> float:
    """Return exp(loss) of a loss in nats per token; losses above 700, which would overflow, count as 700."""
    return math.exp(min(loss, 700))


@torch.no_grad()
def compute_block_losses(model: nn.Module, rows: Tensor, block: int, device: torch.device) -> Iterator[float]:
    """Yield the summed loss in nats of every `block` rows; the model must be in evaluation mode."""
    for chunk in torch.split(rows, block):
        chunk = chunk.to(device)
        yield model(chunk[:, :-1].clamp(min=0), chunk[:, 1:]).item()
