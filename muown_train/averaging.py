"""The average of checkpoints of one run: its mean, or an exponential moving average in their order.

Averages of weights along a run are those of stochastic weight averaging (Izmailov et al. 2018, arXiv:1803.05407) and
of Polyak; here they are taken afterwards, over the checkpoints that were kept.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from muown_train import checkpoint_files as files
from muown_train.saved_weights import find_checkpoint, weight_readers


def chosen(run: Path, steps: Sequence[int] | None = None, last: int | None = None) -> list[Path]:
    """Whole checkpoints of a run to average, in the order of their steps.

    Args:
        steps: theirs; by default of all there are.
        last: so many of the newest.

    Raises:
        ValueError: a checkpoint is not there or damaged, there are fewer than two, or fewer than `last`.
    """
    there = [files.step_of(path) for path in files.newest_first(run / "checkpoints")][::-1]
    if steps is None:
        find_checkpoint(run)  # says what is wrong with a folder without any
        steps = there[-last:] if last else there
    if len(set(steps)) < max(2, last or 0):
        raise ValueError(
            f"{run} has the checkpoints of {', '.join(map(str, there)) or 'no'} updates, and an average takes "
            f"{max(2, last or 0)} or more: a run keeps those of every N updates with keep_every=N, and the newest "
            "N with keep_checkpoints=N"
            if len(there) < max(2, last or 0)
            else f"--steps {','.join(map(str, steps))} must name two or more"
        )
    return [find_checkpoint(run, step) for step in sorted(set(steps))]


def coefficients(count: int, decay: float | None = None) -> list[float]:
    """What each of so many weights counts in the average; they sum to 1.

    Args:
        decay: None for the mean; else that of a moving average which begins with the first weights W_1 and takes each
            further ones as `decay` A + (1 - `decay`) W_t.
    """
    if decay is None:
        return [1 / count] * count
    return [(1.0 if t == 0 else 1 - decay) * decay ** (count - 1 - t) for t in range(count)]


@torch.no_grad()
def averaged(checkpoints: Sequence[Path], shares: Sequence[float]) -> dict[str, Tensor]:
    """The sum of weights, each times its share, taken in float64, one parameter at a time; in the dtype of the last.

    Args:
        checkpoints: whole ones; shares: of each, as `coefficients` gives them.

    Raises:
        ValueError: their parameters differ in names or shapes.
    """
    result = {}
    with ExitStack() as files_open:
        readers = [weight_readers(checkpoint, files_open) for checkpoint in checkpoints]
        for checkpoint, reader in zip(checkpoints, readers, strict=True):
            if other := reader.keys() ^ readers[0].keys():
                raise ValueError(f"{min(other)} is not in both {checkpoints[0]} and {checkpoint}: these are two models")
        for name in readers[0]:
            weights = [reader[name]() for reader in readers]
            for checkpoint, weight in zip(checkpoints, weights, strict=True):
                if weight.shape != weights[0].shape:
                    raise ValueError(
                        f"{name} has shape {tuple(weights[0].shape)} in {checkpoints[0]} and {tuple(weight.shape)} in "
                        f"{checkpoint}: these are two models"
                    )
            total = torch.zeros(weights[0].shape, dtype=torch.float64)
            for share, weight in zip(shares, weights, strict=True):
                total.add_(weight.double(), alpha=share)
            result[name] = total.to(weights[-1].dtype)
    return result
