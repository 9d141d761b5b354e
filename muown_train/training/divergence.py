"""When a run cannot go on as it is: updates whose gradients are no numbers, and losses that have run away.

What is judged are the lines of metrics, which are the same on every rank, so that all ranks judge alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from muown_train.runs.metrics import Line

Rows = tuple[int, int]  # of the data: first, and the one after the last


@dataclass
class Guard:
    """The rules of a run.

    Args:
        max_bad_updates: so many skipped updates in a row are too many.
        on_bad_updates: "rollback" goes back to the last checkpoint and past the rows of those updates, "stop" ends
            the run as diverged.
        max_rollbacks: one more ends the run as diverged.
        diverged_above: a training loss, in nats per token, above which the run has diverged; None: any is fine.
        diverged_from: judged only after so many updates.
        window: so many updates give one mean loss to judge.
    """

    max_bad_updates: int = 10
    on_bad_updates: str = "rollback"
    max_rollbacks: int = 3
    diverged_above: float | None = None
    diverged_from: int = 0
    window: int = 10
    rollbacks: int = field(default=0, init=False)
    bad_rows: list[Rows] = field(default_factory=list, init=False)  # of the last skipped updates in a row
    losses: list[float] = field(default_factory=list, init=False)  # of the window that has begun

    def bad_updates(self, lines: Sequence[Line], rows: Sequence[Rows]) -> str | None:
        """Why there are too many bad updates; None if there are not.

        Args:
            rows: that each of the updates was to be trained on.
        """
        updates = 0
        for line, span in zip(lines, rows, strict=True):
            if line.get("train/skipped"):
                self.bad_rows.append(span)
                updates = line["step"]
            elif len(self.bad_rows) >= self.max_bad_updates:
                break
            else:
                self.bad_rows.clear()
        count = len(self.bad_rows)
        if count < self.max_bad_updates:
            return None
        return f"gradients were not finite in {count} updates in a row, the last one {updates}"

    def diverged(self, lines: Sequence[Line]) -> str | None:
        """Why the run has diverged; None if it has not. Windows end where the number of updates is a multiple."""
        reason = None
        if self.diverged_above is None:
            return None
        for line in lines:
            self.losses.append(line["train/loss"])
            if line["step"] % self.window:
                continue
            known = [loss for loss in self.losses if math.isfinite(loss)]
            whole = len(self.losses) == self.window  # after a resume the first may not be
            self.losses.clear()
            if whole and known and line["step"] > self.diverged_from:
                mean = sum(known) / len(known)
                if mean > self.diverged_above:
                    reason = (
                        f"training loss {mean:.4f}, the mean of {self.window} updates up to update {line['step']}, "
                        f"is above diverged_above={self.diverged_above:g}"
                    )
        return reason
