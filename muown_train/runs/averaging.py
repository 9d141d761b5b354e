"""The average of checkpoints of one run: its mean, or an exponential moving average in their order.

Averages of weights along a run are those of stochastic weight averaging (Izmailov et al. 2018, arXiv:1803.05407) and
of Polyak; here they are taken afterwards, over the checkpoints that were kept.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from muown_train.runs import checkpoint_files as files
from muown_train.runs.weights import OpenCheckpoint, check_finite, open_checkpoint, to_stderr


def chosen(
    run: Path,
    steps: Sequence[int] | None = None,
    last: int | None = None,
    warn: Callable[[str], None] = to_stderr,
) -> list[OpenCheckpoint]:
    """Whole checkpoints of a run to average, in the order of their steps.

    Args:
        steps: theirs; by default of all there are.
        last: so many of the newest.
        warn: called with a sentence for each damaged one that is left out; one that `steps` names is an error.

    Raises:
        ValueError: a checkpoint is not there or damaged, there are fewer than two, or fewer than `last`.
    """
    there = [files.step_of(path) for path in files.newest_first(run / "checkpoints")]
    if not there:
        open_checkpoint(run)  # says what is wrong with a folder without any
    needed = max(2, last or 0)
    found: list[OpenCheckpoint] = []
    for step in sorted(set(there if steps is None else steps), reverse=True):
        if len(found) == last:
            break
        try:
            found.append(open_checkpoint(run, step))
        except ValueError as error:
            if steps is not None:
                raise
            warn(f"{error}: it is left out")
    if len(found) < needed:
        if steps is not None:
            raise ValueError(f"--steps {','.join(map(str, steps))} must name two or more")
        whole = ", ".join(str(one.step) for one in found[::-1])
        which = {0: "no checkpoint that is whole", 1: f"one checkpoint, of step {whole}"}
        raise ValueError(
            f"{run} has {which.get(len(found), f'{len(found)} checkpoints, of steps {whole}')}, and an average takes "
            f"{needed} or more: a run keeps those of every N updates with keep_every=N, and the newest N with "
            "keep_checkpoints=N"
        )
    return found[::-1]


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
def averaged(checkpoints: Sequence[OpenCheckpoint], shares: Sequence[float]) -> dict[str, Tensor]:
    """The sum of weights, each times its share, taken in float64, one parameter at a time; in the dtype of the last.

    Args:
        shares: of each, as `coefficients` gives them.

    Raises:
        ValueError: their parameters differ in names or shapes, or are not finite.
    """
    result = {}
    first = checkpoints[0]
    for one in checkpoints:
        if other := one.readers.keys() ^ first.readers.keys():
            raise ValueError(f"{min(other)} is not in both {first.folder} and {one.folder}: these are two models")
    for name in first.readers:
        weights = [one.readers[name]() for one in checkpoints]
        total = torch.zeros(weights[0].shape, dtype=torch.float64)
        for one, share, weight in zip(checkpoints, shares, weights, strict=True):
            if weight.shape != total.shape:
                raise ValueError(
                    f"{name} has shape {tuple(total.shape)} in {first.folder} and {tuple(weight.shape)} in "
                    f"{one.folder}: these are two models"
                )
            total.add_(check_finite(f"{one.folder}: {name}", weight).double(), alpha=share)
        result[name] = total.to(weights[-1].dtype)
    return result
