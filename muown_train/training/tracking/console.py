"""The terminal as a sink of records: a line of text now and then, or a progress line that stays at the bottom."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muown_train.runtime.formatting import format_duration, format_perplexity, format_speed

if TYPE_CHECKING:
    from muown_train.runs.metrics import Line, Sink

_NEWS = ("valid/loss", "train/skipped_updates", "train/rolled_back", "train/diverged")  # never left unsaid


class PlainConsole:
    """A line of text now and then, for logs.

    Args:
        every: least seconds between two lines; news, such as a validation loss, are always printed.
    """

    def __init__(self, every: float = 10.0) -> None:
        self.every, self.printed = every, -math.inf

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        self.steps = steps

    def lines(self, lines: "Sequence[Line]") -> None:
        for line in lines:
            due = line is lines[-1] and time.monotonic() - self.printed >= self.every
            if due or any(key in line for key in _NEWS):
                print(describe(line, self.steps), flush=True)
                self.printed = time.monotonic()

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass


class LiveConsole:
    """A progress line that stays at the bottom of a terminal; news scroll up above it."""

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Column

        def one_line() -> Column:
            return Column(no_wrap=True, overflow="ellipsis")

        self.steps = steps
        self.progress = Progress(
            TextColumn("{task.completed}/{task.total}", table_column=one_line()),
            BarColumn(bar_width=16),
            TextColumn("{task.description}", table_column=one_line()),
            TimeElapsedColumn(table_column=one_line()),
            TextColumn("[dim]left {task.fields[left]}", table_column=one_line()),
        )
        self.task = self.progress.add_task("starting", total=steps, left="?")
        self.progress.start()

    def lines(self, lines: "Sequence[Line]") -> None:
        for line in lines:
            if any(key in line for key in _NEWS):
                news = {key: line[key] for key in line if key != "system/seconds_left"}
                self.progress.console.print(describe(news, self.steps), highlight=False, markup=False)
        last = lines[-1]
        if "train/loss" in last:
            speed = last.get("system/tokens_per_second")
            self.progress.update(
                self.task,
                completed=last["step"],
                description=f"loss {last['train/loss']:.3f}" + (f"  {format_speed(speed)}" if speed else ""),
                left=format_duration(last["system/seconds_left"]) if "system/seconds_left" in last else "?",
            )

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.progress.stop()


def console() -> "Sink":
    """Live on a terminal, plain elsewhere."""
    return LiveConsole() if sys.stdout.isatty() else PlainConsole()



def describe(line: "Line", steps: int) -> str:
    """One line of metrics as a sentence for people, of at most 100 columns for usual values.

    In a line with news what is measured all the time is left out.
    """
    parts = [f"step {line['step']:>{len(str(steps))}}/{steps}"]
    if "train/loss" in line:
        parts.append(f"loss {line['train/loss']:.4f}")
    if "train/diverged" in line:
        parts.append("DIVERGED")
    if "train/rolled_back" in line:
        parts.append("ROLLED BACK")
    if count := line.get("train/skipped_updates"):
        parts.append(f"{count} UPDATE{'S' * (count > 1)} SKIPPED: gradients not finite")
    if "valid/loss" in line:
        perplexity = format_perplexity(line["valid/perplexity"])
        parts.append(f"validation loss {line['valid/loss']:.4f} (perplexity {perplexity})")
    if not any(key in line for key in _NEWS):
        parts += _measured(line)
    if "system/seconds_left" in line:
        parts.append(f"{format_duration(line['system/seconds_left'])} left")
    return "  ".join(parts)


def _measured(line: "Line") -> list[str]:
    formats: dict[str, Callable[[float], str]] = {
        "train/lr": "lr {:.2e}".format,
        "train/grad_norm": "grad norm {:.3f}".format,
        "system/tokens_per_second": format_speed,
        "system/mfu": "MFU {:.0%}".format,
    }
    return [text(line[key]) for key, text in formats.items() if key in line]
