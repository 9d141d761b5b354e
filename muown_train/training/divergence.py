"""Find when a run cannot continue as it is: steps whose gradients are not finite, and losses that have run away.

The monitor judges lines of metrics, which are the same on every rank, so all ranks come to the same decision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from muown_train.optim.param_groups import canonical_name
from muown_train.optim.row_shards.placement import get_local
from muown_train.runs.metrics import Line
from muown_train.runtime.distributed import World

RowSpan = tuple[int, int]  # rows of the data: the first, and the one after the last


@dataclass
class DivergenceMonitor:
    """Counts skipped steps and watches the training loss.

    Args:
        max_bad_updates: this many skipped steps in a row are too many.
        on_bad_updates: "rollback" goes back to the last checkpoint and leaves out the rows of those steps, "stop" ends
            the run as diverged.
        max_rollbacks: one rollback more ends the run as diverged.
        diverged_above: a training loss, in nats per token, above which the run has diverged; None allows any.
        diverged_from: the loss is judged only after this many steps.
        window: the number of steps whose mean loss is judged.
    """

    max_bad_updates: int = 10
    on_bad_updates: str = "rollback"
    max_rollbacks: int = 3
    diverged_above: float | None = None
    diverged_from: int = 0
    window: int = 10
    rollbacks: int = field(default=0, init=False)
    bad_rows: list[RowSpan] = field(default_factory=list, init=False)  # rows of the latest skipped steps in a row
    losses: list[float] = field(default_factory=list, init=False)  # losses of the window that has begun

    def find_bad_steps(self, lines: Sequence[Line], rows: Sequence[RowSpan]) -> str | None:
        """Return a sentence if too many steps in a row were skipped, else None.

        Args:
            lines: the lines of the steps since the last call.
            rows: the rows of each of these steps.
        """
        last = 0
        for line, span in zip(lines, rows, strict=True):
            if line.get("train/skipped"):
                self.bad_rows.append(span)
                last = line["step"]
            elif len(self.bad_rows) >= self.max_bad_updates:
                break
            else:
                self.bad_rows.clear()
        count = len(self.bad_rows)
        if count < self.max_bad_updates:
            return None
        return f"gradients were not finite in {count} steps in a row, up to step {last}"

    def find_divergence(self, lines: Sequence[Line]) -> str | None:
        """Return a sentence if the run has diverged, else None. Windows end at multiples of their length."""
        reason = None
        if self.diverged_above is None:
            return None
        for line in lines:
            self.losses.append(line["train/loss"])
            if line["step"] % self.window:
                continue
            finite = [loss for loss in self.losses if math.isfinite(loss)]
            complete = len(self.losses) == self.window  # the first window after a resume may be cut
            self.losses.clear()
            if complete and finite and line["step"] > self.diverged_from:
                mean = sum(finite) / len(finite)
                if mean > self.diverged_above:
                    reason = (
                        f"training loss {mean:.4f}, the mean of {self.window} steps up to step {line['step']}, "
                        f"is above diverged_above={self.diverged_above:g}"
                    )
        return reason

    def restart(self) -> None:
        """Forget the steps seen so far, before the run goes back to a checkpoint."""
        self.bad_rows.clear()
        self.losses.clear()


def explain_unlearned(loss: float, vocab_size: int, unigram_loss: float | None) -> str:
    """Return a sentence if a run has ended with a model that is no better than guessing, else an empty text.

    Args:
        loss: the last validation loss, in nats per token.
        vocab_size: the number of tokens among which a guess is made.
        unigram_loss: that of the frequencies of tokens; where they are equal, nothing can be learnt. None: not known.
    """
    guess = math.log(vocab_size)
    if loss < guess * (1 - 1e-5) or (unigram_loss is not None and unigram_loss > guess * (1 - 1e-3)):
        return ""
    return (
        f"the model has learnt nothing: its validation loss {loss:.4f} is no lower than {guess:.4f}, that of guessing "
        f"among {vocab_size:,} tokens; a lower optim.lr, or a longer run, may learn"
    )


def find_infinite_weight(model: nn.Module, step: int, world: World) -> str | None:
    """Return a sentence if a weight holds NaN or infinity, which no checkpoint may; a collective call.

    The answer is the same on every rank, also where each has other rows of the weights.
    """
    names, weights = zip(*model.named_parameters(), strict=True)
    odd = torch.stack([get_local(weight.detach()).isfinite().logical_not().any() for weight in weights])
    counts = world.sum(odd.long()).tolist()
    odd_names = [canonical_name(name) for name, count in zip(names, counts, strict=True) if count]
    return f"{odd_names[0]} holds NaN or infinity after step {step}" if odd_names else None
