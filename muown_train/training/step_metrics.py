"""Turn finished steps into lines of metrics. Their numbers stay on the device until a boundary needs them."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from muown_train.config.schema import TrainerSettings
from muown_train.runs.metrics import Line
from muown_train.runs.state import State
from muown_train.runtime.distributed import World
from muown_train.training.divergence import RowSpan


@dataclass
class StepRecord:
    """One step whose numbers may still be on the device."""

    line: Line
    loss: Tensor  # () float64, summed over this rank's targets / global count of targets
    grad_norm: Tensor  # () float32, the same on every rank
    hash: int  # hash of this rank's rows; int64, the hashes of all ranks are added up
    rows: RowSpan  # rows of all ranks
    data_state: State  # state of the loader before the step
    fault: str | None  # the reason why this rank had no data, if it had none
    waited: float  # seconds that the step waited for data


class StepMetrics:
    """The steps since the last boundary, and the clock of training, which stands still in evaluation and saving."""

    def __init__(self, settings: TrainerSettings, world: World) -> None:
        self.settings, self.world = settings, world
        self.pending: list[StepRecord] = []
        self.seconds = 0.0  # seconds of training up to the last boundary, over all restarts
        self.rolled_back = False  # whether the run was rolled back since the last boundary
        self.start_clock()

    def start_clock(self) -> None:
        """Begin to count the seconds of the next steps."""
        self.started = time.perf_counter()

    def add(self, record: StepRecord) -> None:
        """Take a step that was just done."""
        self.pending.append(record)

    def find_fault(self) -> tuple[int, str] | None:
        """Return which pending step is the first without data on some rank, and why; a collective call.

        The gradients of that step and of those after it are NaN on every rank. Only then do the ranks communicate.
        """
        if all(map(math.isfinite, self._read_grad_norms())):
            return None
        own = next(((i, record.fault) for i, record in enumerate(self.pending) if record.fault), None)
        return min((fault for fault in self.world.gather(own) if fault), default=None)

    def collect(self) -> tuple[list[Line], list[Line]]:
        """Bring the numbers of the pending steps to the host; a collective call.

        Returns:
            The lines of the steps, and an event for each step that was skipped.
        """
        on_ranks = torch.zeros(self.world.size, len(self.pending) + 1, dtype=torch.float64)
        on_ranks[self.world.rank, :-1] = torch.stack([record.loss for record in self.pending])
        on_ranks[self.world.rank, -1] = self._measure_peak_memory()
        on_ranks = self.world.sum(on_ranks)
        losses, peak_memory = on_ranks[:, :-1], on_ranks[:, -1].max().item()
        norms = self._read_grad_norms()
        hashes = self.world.sum(torch.tensor([record.hash for record in self.pending])).tolist()
        seconds = time.perf_counter() - self.started
        lines: list[Line] = []
        events: list[Line] = []
        for i, record in enumerate(self.pending):
            line = record.line
            line["time"] = self.seconds + seconds * (i + 1) / len(self.pending)
            line["train/loss"], line["train/grad_norm"] = losses[:, i].sum().item(), norms[i]
            line["data/hash"] = f"{hashes[i] % 2**64:016x}"
            if not math.isfinite(norms[i]):
                line["train/skipped"] = True
                events.append(_describe_skipped(line, losses[:, i], record.rows))
            lines.append(line)
        if events:
            lines[-1]["train/skipped_updates"] = len(events)
        if self.rolled_back:
            lines[-1]["train/rolled_back"], self.rolled_back = True, False
        lines[-1] |= self._measure_speed(seconds)
        if peak_memory:
            lines[-1]["system/peak_memory"] = int(peak_memory)
        self.seconds += seconds
        self.pending = []
        return lines, events

    def _read_grad_norms(self) -> list[float]:
        """Return the gradient norm of each pending step, not finite if it is skipped; the host waits for the last."""
        return [float(norm) for norm in torch.stack([record.grad_norm for record in self.pending]).tolist()]

    def _measure_speed(self, seconds: float) -> Line:
        """Return what is measured once per boundary, over the pending steps."""
        tokens = len(self.pending) * self.settings.batch_tokens
        line: Line = {
            "system/tokens_per_second": tokens / seconds,
            "system/seconds_left": (self.settings.steps - self.pending[-1].line["step"]) * seconds / len(self.pending),
            "data/wait_fraction": sum(record.waited for record in self.pending) / seconds,
        }
        if self.settings.flops_per_token and self.settings.peak_flops:
            peak = self.settings.peak_flops * self.world.size
            line["system/mfu"] = self.settings.flops_per_token * tokens / seconds / peak
        return line

    def _measure_peak_memory(self) -> int:
        """Return the most bytes of this rank's GPU that tensors have taken; 0 without a GPU."""
        return torch.cuda.max_memory_allocated(self.world.device) if self.world.device.type == "cuda" else 0


def _describe_skipped(line: Line, losses: Tensor, rows: RowSpan) -> Line:
    """Return the event of a skipped step.

    Its "ranks" are those whose loss was not finite. Where the losses of all ranks were, a gradient was not.

    Args:
        losses: (ranks,) float64.
    """
    numbers = {key: line[key] for key in ("step", "train/loss", "train/grad_norm", "data/hash")}
    ranks = (~losses.isfinite()).nonzero().flatten().tolist()
    return {"kind": "skipped update", **numbers, "ranks": ranks, "rows": list(rows)}
