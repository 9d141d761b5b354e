"""Average a run's checkpoints: their mean, or an exponential moving average in the order of their steps.

Averages of weights along a run are those of stochastic weight averaging (Izmailov et al. 2018, arXiv:1803.05407) and
of Polyak; here they are taken afterwards, over the checkpoints that were kept.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from muown_train.runs.checkpoint_reader import OpenCheckpoint, check_finite, list_steps, open_checkpoint, print_warning


def open_checkpoints(run: Path, steps: Sequence[int] | None = None, last: int | None = None) -> list[OpenCheckpoint]:
    """Open the whole checkpoints of a run that are to be averaged, in the order of their steps.

    A damaged checkpoint is left out with a warning; one that `steps` names is an error.

    Args:
        steps: the steps of the checkpoints; by default those of all checkpoints.
        last: only this many of the newest.

    Raises:
        ValueError: a checkpoint is missing or damaged, there are fewer than two, or fewer than `last`.
    """
    opened: list[OpenCheckpoint] = []
    for step in sorted(set(list_steps(run) if steps is None else steps), reverse=True):
        if len(opened) == last:
            break
        try:
            opened.append(open_checkpoint(run, step))
        except ValueError as error:
            if steps is not None:
                raise
            print_warning(f"{error}: it is left out")
    needed = max(2, last or 0)
    if len(opened) < needed:
        if steps is not None:
            raise ValueError(f"--steps {','.join(map(str, steps))} must name two or more")
        whole = ", ".join(str(checkpoint.step) for checkpoint in opened[::-1])
        count = {0: "no checkpoint that is whole", 1: f"one checkpoint, of step {whole}"}
        raise ValueError(
            f"{run} has {count.get(len(opened), f'{len(opened)} checkpoints, of steps {whole}')}, and an average takes "
            f"{needed} or more: a run keeps those of every N steps with keep_every=N, and the newest N with "
            "keep_checkpoints=N"
        )
    return opened[::-1]


def compute_shares(count: int, decay: float | None = None) -> list[float]:
    """Return the share that each of `count` checkpoints has in the average; they sum to 1.

    Args:
        decay: None for the mean; otherwise that of a moving average A, which begins with the first weights W_1 and
            takes in each further W_t as `decay` A + (1 - `decay`) W_t.
    """
    if decay is None:
        return [1 / count] * count
    return [(1.0 if t == 0 else 1 - decay) * decay ** (count - 1 - t) for t in range(count)]


@torch.no_grad()
def average_weights(checkpoints: Sequence[OpenCheckpoint], shares: Sequence[float]) -> dict[str, Tensor]:
    """Return the sum of the checkpoints' weights, each times its share, in the dtype of the last checkpoint.

    The sum is taken in float64, one parameter at a time.

    Args:
        shares: one for each checkpoint, as `compute_shares` returns them.

    Raises:
        ValueError: the checkpoints' parameters differ in names or shapes, or are not finite.
    """
    average = {}
    first = checkpoints[0]
    for checkpoint in checkpoints:
        if other := checkpoint.weights.keys() ^ first.weights.keys():
            raise ValueError(
                f"{min(other)} is not in both {first.folder} and {checkpoint.folder}: these are two models"
            )
    for name in first.weights:
        weights = [checkpoint.weights[name][...] for checkpoint in checkpoints]
        total = torch.zeros(weights[0].shape, dtype=torch.float64)
        for checkpoint, share, weight in zip(checkpoints, shares, weights, strict=True):
            if weight.shape != total.shape:
                raise ValueError(
                    f"{name} has shape {tuple(total.shape)} in {first.folder} and {tuple(weight.shape)} in "
                    f"{checkpoint.folder}: these are two models"
                )
            total.add_(check_finite(f"{checkpoint.folder}: {name}", weight).double(), alpha=share)
        average[name] = total.to(weights[-1].dtype)
    return average
