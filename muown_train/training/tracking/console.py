"""Show a run's metrics on the terminal: a live line with news above it, or in a log a line now and then."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muown_train.runs.metrics import Line
from muown_train.runtime.formatting import format_duration, format_perplexity, format_speed
from muown_train.runtime.progress import StatusLine

# Lines of metrics that have one of these keys are always printed.
_NEWS = ("valid/loss", "train/skipped_updates", "train/rolled_back", "train/diverged")


class ConsoleSink:
    """Shows metrics on standard output.

    Args:
        every: the least seconds between two lines in a log, but for news such as a validation loss.
    """

    def __init__(self, every: float = 10.0) -> None:
        self.status = StatusLine(sys.stdout, every, transient=False)
        self.steps = 0

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        self.steps = steps
        if self.status.is_live:
            self.status.show("starting", 0.0)

    def write(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if _has_news(line):
                self.status.print(describe_line(line, self.steps, with_time_left=not self.status.is_live))
        last = lines[-1]
        if self.status.is_live:
            if "train/loss" in last:
                self._update_live_line(last)
        elif not _has_news(last):
            self.status.show(describe_line(last, self.steps))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.status.close()

    def _update_live_line(self, line: Line) -> None:
        speed = line.get("system/tokens_per_second")
        text = f"{line['step']}/{self.steps}  loss {line['train/loss']:.3f}" + (
            f"  {format_speed(speed)}" if speed else ""
        )
        self.status.show(text, line["step"] / self.steps, line.get("system/seconds_left"))


def _has_news(line: Line) -> bool:
    return any(key in line for key in _NEWS)


def describe_line(line: Line, steps: int, with_time_left: bool = True) -> str:
    """Return a line of metrics as text, of at most 100 columns for usual values.

    A line with news leaves out the learning rate, the gradient norm and the speed.
    """
    parts = [f"step {line['step']:>{len(str(steps))}}/{steps}"]
    if "train/loss" in line:
        parts.append(f"loss {line['train/loss']:.4f}")
    if "train/diverged" in line:
        parts.append("DIVERGED")
    if "train/rolled_back" in line:
        parts.append("ROLLED BACK")
    if count := line.get("train/skipped_updates"):
        parts.append(f"{count} STEP{'S' * (count > 1)} SKIPPED: gradients not finite")
    if "valid/loss" in line:
        perplexity = format_perplexity(line["valid/perplexity"])
        parts.append(f"validation loss {line['valid/loss']:.4f} (perplexity {perplexity})")
    if not _has_news(line):
        parts += [text(line[key]) for key, text in _FORMATS.items() if key in line]
    if with_time_left and "system/seconds_left" in line:
        parts.append(f"{format_duration(line['system/seconds_left'])} left")
    return "  ".join(parts)


_FORMATS: dict[str, Callable[[float], str]] = {
    "train/lr": "lr {:.2e}".format,
    "train/grad_norm": "grad norm {:.3f}".format,
    "system/tokens_per_second": format_speed,
    "system/mfu": "MFU {:.0%}".format,
}
