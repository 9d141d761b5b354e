"""Show a run's metrics on the terminal: a live line with news above it, or in a log a line now and then."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muown_train.runs.metrics import Line
from muown_train.runtime.formatting import escape_controls, format_duration, format_perplexity, format_speed
from muown_train.runtime.progress import State, StatusLine

# Lines of metrics that have one of these keys are always printed.
_NEWS = ("valid/loss", "tasks/seconds", "train/skipped_updates", "train/rolled_back", "train/diverged")


class ConsoleSink:
    """Shows metrics on standard output.

    Args:
        watch: returns the number of steps done and what else the run is doing, if anything. The live line shows both,
            also between two lines of metrics.
        every: the least seconds between two lines in a log, but for news such as a validation loss.
    """

    def __init__(self, watch: Callable[[], tuple[int, str]], every: float = 10.0) -> None:
        self.status = StatusLine(sys.stdout, every, transient=False, poll=self._describe_now)
        self.watch = watch
        self.first = self.steps = 0  # the step that this process began at, and the last of the run
        self.last: Line = {}  # the last line with a training loss

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        self.first, self.steps = self.watch()[0], steps
        self.compiled = bool(config.get("compile"))
        if self.status.is_live:
            self.status.show(*self._describe_now())
        elif self.compiled and self.first < steps:
            self.status.print("compiling; the first step comes in a minute or more")

    def write(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if _has_news(line):
                self.status.print(describe_line(line, self.steps, with_time_left=not self.status.is_live))
            if "sample" in line and line["step"] < self.steps:  # the summary at the end shows the last one
                self.status.print(format_sample(line["sample"], f" after step {line['step']:,}"))
        last = lines[-1]
        if self.status.is_live:
            self.last = last if "train/loss" in last else self.last
        elif not _has_news(last):
            self.status.show(describe_line(last, self.steps))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.status.close()

    def _describe_now(self) -> State:
        """Return what the live line shows: as many numbers as fit, the most important first."""
        step, activity = self.watch()
        if step == self.first and not (activity or self.last):
            activity = "compiling" if self.compiled else "first step"
        numbers = [f"loss {self.last['train/loss']:.3f}"] if self.last else []
        keys = ("system/tokens_per_second", "train/lr", "train/grad_norm", "system/mfu")
        numbers += [_FORMATS[key](self.last[key]) for key in keys if key in self.last]
        text = f"{step}/{self.steps}" + (f"  {activity}" if activity else "")
        for number in numbers:
            if len(text) + 2 + len(number) > self.status.count_columns():
                break
            text += f"  {number}"
        left = None
        if "system/seconds_left" in self.last and self.last["step"] < self.steps:
            left = self.last["system/seconds_left"] * (self.steps - step) / (self.steps - self.last["step"])
        return text, step / self.steps, left


def format_sample(text: str, when: str = "") -> str:
    """Return a sample between two lines that say what it is.

    Args:
        when: what follows the word "sample" in the first of them.
    """
    return escape_controls(f"--- sample{when} ---\n{text}\n--- end of sample ---")


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
    numbers = {key.removeprefix("tasks/"): line[key] for key in line if key.startswith("tasks/")}
    parts += [f"{name} {value:.4f}" for name, value in numbers.items() if name != "seconds"]
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
