"""Updates whose numbers may still be on the device: what is known of them, and when the data failed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muown_train.runs.checkpoint import State
from muown_train.runs.metrics import Line
from muown_train.runtime.distributed import World
from muown_train.training.divergence import Rows


@dataclass
class Update:
    """One update whose numbers may still be on the device."""

    line: Line
    loss: Tensor  # () float64, summed over this rank's targets / global count of targets
    grad_norm: Tensor  # () float32, the same on every rank
    hash: int  # of this rank's rows; int64, adds up over ranks
    rows: Rows  # of all ranks
    place: State  # of the loader before it
    fault: str | None  # what kept this rank's data from coming
    waited: float  # seconds for data


def gradient_norms(updates: Sequence[Update]) -> list[float]:
    """Of each update, on the host, which waits for the last; no finite number where it was left out."""
    return [float(norm) for norm in torch.stack([update.grad_norm for update in updates]).tolist()]


def first_fault(updates: Sequence[Update], world: World) -> tuple[int, str] | None:
    """Which of the updates is the first without data on some rank, and why; a collective call.

    Its gradients, and those of the updates after it, are no numbers on any rank; only where there are such do the ranks
    talk to each other.
    """
    if all(map(math.isfinite, gradient_norms(updates))):
        return None
    own = next(((i, update.fault) for i, update in enumerate(updates) if update.fault), None)
    return min((fault for fault in world.gather(own) if fault), default=None)
