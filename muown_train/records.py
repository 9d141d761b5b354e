"""What a run writes down: metrics.jsonl is the record; the terminal and W&B are sinks that see the same lines.

Only the main rank has records. A line is a flat JSON object with `step`, the number of updates done.
"""

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from muown_train.files import replace

Line = dict[str, Any]

_VALID = ("valid/loss", "valid/perplexity", "train/skipped_updates")


class Sink(Protocol):
    """Something that is shown every line of metrics."""

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None: ...

    def lines(self, lines: Sequence[Line]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class Metrics:
    """metrics.jsonl in a run's folder: whole lines, each step once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"

    def append(self, lines: Iterable[Line]) -> None:
        """Write lines at once and hand them to the system."""
        text = "".join(json.dumps(_finite(line)) + "\n" for line in lines)
        with self.path.open("a") as file:
            file.write(text)

    def rewind(self, step: int) -> None:
        """Move the lines after `step`, and any broken one, to metrics.rolled_back.jsonl; nothing is deleted."""
        if not self.path.exists():
            return
        kept: list[str] = []
        rolled_back: list[str] = []
        for text in self.path.read_text(errors="replace").splitlines(keepends=True):
            (kept if _step(text) <= step else rolled_back).append(text if text.endswith("\n") else text + "\n")
        if not rolled_back:
            return
        with self.path.with_name("metrics.rolled_back.jsonl").open("a") as file:
            file.writelines(rolled_back)
        replace(self.path, "".join(kept).encode())

    def read(self) -> list[Line]:
        """All lines."""
        return read_metrics(self.path) if self.path.exists() else []


def read_metrics(path: Path) -> list[Line]:
    """The lines of a metrics.jsonl; a last line that was cut off is left out."""
    return [json.loads(text) for text in path.read_text(errors="replace").splitlines() if _step(text) < math.inf]


def _step(text: str) -> float:
    try:
        return float(json.loads(text)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(line: Line) -> Line:
    """NaN and infinities as strings: JSON has none."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }


class PlainConsole:
    """A line of text now and then, for logs.

    Args:
        every: least seconds between two lines; lines with a validation loss are always printed.
    """

    def __init__(self, every: float = 10.0) -> None:
        self.every, self.printed = every, -math.inf

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        self.steps = steps

    def lines(self, lines: Sequence[Line]) -> None:
        for line in lines:
            due = line is lines[-1] and time.monotonic() - self.printed >= self.every
            if due or "valid/loss" in line:
                print(describe(line, self.steps), flush=True)
                self.printed = time.monotonic()

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass


class LiveConsole:
    """A progress line that stays at the bottom of a terminal; lines with a validation loss scroll up above it."""

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.steps = steps
        self.progress = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("[dim]left {task.fields[left]}"),
        )
        self.task = self.progress.add_task("starting", total=steps, left="?")
        self.progress.start()

    def lines(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if "valid/loss" in line or "train/skipped_updates" in line:
                short = {key: line[key] for key in ("step", "train/loss", *_VALID) if key in line}
                self.progress.console.print(describe(short, self.steps), highlight=False)
        last = lines[-1]
        if "train/loss" in last:
            speed = last.get("system/tokens_per_second")
            self.progress.update(
                self.task,
                completed=last["step"],
                description=f"loss {last['train/loss']:.3f}" + (f"  {speed:,.0f} tokens/s" if speed else ""),
                left=duration(last["system/seconds_left"]) if "system/seconds_left" in last else "?",
            )

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.progress.stop()


def console() -> Sink:
    """Live on a terminal, plain elsewhere."""
    return LiveConsole() if sys.stdout.isatty() else PlainConsole()


def describe(line: Line, steps: int) -> str:
    """One line of metrics as a sentence for people."""
    parts = [f"step {line['step']:>{len(str(steps))}}/{steps}"]
    if "train/loss" in line:
        parts.append(f"loss {line['train/loss']:.4f}")
    if "valid/loss" in line:
        parts.append(f"validation loss {line['valid/loss']:.4f} (perplexity {line['valid/perplexity']:.2f})")
    if "train/skipped_updates" in line:
        parts.append(f"{line['train/skipped_updates']} UPDATES SKIPPED: gradients not finite")
    if "train/lr" in line:
        parts.append(f"lr {line['train/lr']:.2e}")
    if "train/grad_norm" in line:
        parts.append(f"gradient norm {line['train/grad_norm']:.3f}")
    if "system/tokens_per_second" in line:
        parts.append(f"{line['system/tokens_per_second']:,.0f} tokens/s")
    if "system/mfu" in line:
        parts.append(f"MFU {line['system/mfu']:.1%}")
    if "system/seconds_left" in line:
        parts.append(f"{duration(line['system/seconds_left'])} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """90 -> "1m30s"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def plot_losses(lines: Sequence[Line], path: Path, title: str, unigram: float | None = None) -> None:
    """Training and validation loss against tokens, as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    styles: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("train/loss", "training", {"linewidth": 0.8, "color": "#0072B2", "alpha": 0.7}),
        ("valid/loss", "validation", {"linewidth": 1.6, "color": "#D55E00", "marker": "o", "markersize": 3}),
    )
    for key, label, style in styles:
        points = [(line["tokens"], line[key]) for line in lines if isinstance(line.get(key), float)]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    if unigram is not None:
        axes.axhline(unigram, color="0.5", linewidth=0.8, linestyle="--", label="unigram model")
    axes.set(xlabel="tokens", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
