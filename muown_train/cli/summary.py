"""The summary that ends a run: final numbers, a plot of the losses, a sample of text, and where everything is."""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

from muown_train.experiments.report.curves import plot_losses
from muown_train.runs.checkpoint_reader import print_warning
from muown_train.runs.metrics import Line
from muown_train.runs.status import Outcome
from muown_train.runtime.formatting import escape_controls, format_duration, format_perplexity
from muown_train.runtime.stop_signal import StopRequested, raise_on_stop_signals
from muown_train.training.run import Run, generate_sample
from muown_train.training.tracking.console import format_sample

_PAUSE = 60.0  # the least seconds between two drawings of loss.png, and before the first
_SHARE = 0.01  # the largest share of the time that drawings take


def summarize(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the final numbers of a run from its metrics.

    Raises:
        ValueError: the metrics hold no evaluation.
    """
    evaluated = [line for line in lines if "valid/loss" in line]
    if not evaluated:
        raise ValueError("the run's metrics.jsonl holds no evaluation: it was changed or removed since it was written")
    final, last = evaluated[-1], lines[-1]
    speeds = [line["system/tokens_per_second"] for line in lines if "system/tokens_per_second" in line]
    return {
        "step": last["step"],
        "tokens": last["tokens"],
        "valid/step": final["step"],  # earlier where the run has diverged
        "valid/loss": final["valid/loss"],
        "valid/perplexity": final["valid/perplexity"],
        "seconds": last["time"],
        "tokens_per_second": sorted(speeds)[len(speeds) // 2] if speeds else None,
    }


def draw_losses(run: Run) -> None:
    """Write loss.png in a run's folder, at once or not at all; on the main rank.

    Raises:
        OSError: the file cannot be written; it is as before.
    """
    assert run.trainer.metrics is not None
    plot_losses(run.trainer.metrics.read(), run.folder / "loss.png", run.folder.name, run.data.unigram_loss)


class LossFigure:
    """The sink that renews loss.png at evaluations, so that the file shows a run that is under way.

    It draws at most once a minute, and less often where drawing would take more than 1 % of the time. A short run never
    loads matplotlib before its end. If drawing fails once, the file is left as it is until the end of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.due = run, math.inf  # seconds of the clock from which on a drawing may be made

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        self.due = monotonic() + _PAUSE

    def write(self, lines: Sequence[Line]) -> None:
        started = monotonic()
        if started < self.due or not any("valid/loss" in line for line in lines):
            return
        try:
            if self.run.guard:
                self.run.guard.check()  # the folder may be that of somebody else now
            draw_losses(self.run)
            ended = monotonic()
            self.due = ended + max(_PAUSE, (ended - started) / _SHARE)
        except Exception as error:  # matplotlib raises errors of any kind, and training does not depend on it
            self.due = math.inf
            print_warning(f"loss.png is not renewed before the end of the run: {error}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass


def help_report_end(run: Run, outcome: Outcome) -> None:
    """Take part in the sample of `report_end`, if it needs all ranks; on the ranks besides the main one."""
    if outcome.state != "stopped" and run.trainer.parallel.is_sharded and run.trainer.world.gather(False)[0]:
        generate_sample(run)


def report_end(run: Run, outcome: Outcome, already: bool) -> None:
    """Print how a run ended, and unless it was only stopped, plot its losses and print a sample; on the main rank.

    Args:
        already: whether an earlier command had already ended the run.
    """
    assert run.trainer.metrics is not None
    if outcome.state == "stopped":
        for sink in run.trainer.sinks:
            sink.finish({"outcome": "stopped", "reason": outcome.reason})
        step = run.trainer.step
        when, saved = (f"after step {step:,}", ", saved") if step else ("before the first step", "")
        print(f"stopped {when} ({outcome.reason}){saved}: the same command goes on")
        return
    lines = run.trainer.metrics.read()
    summary = summarize(lines)
    for sink in run.trainer.sinks:
        sink.finish(summary | {"outcome": outcome.state, "reason": outcome.reason})
    unigram = run.data.unigram_loss
    try:
        draw_losses(run)
    except OSError as error:  # the run is saved, and its numbers are in metrics.jsonl
        print_warning(f"the figure of the losses cannot be written: {error}")
    loss = f"validation loss {summary['valid/loss']:.4f}, perplexity {format_perplexity(summary['valid/perplexity'])}"
    if summary["valid/step"] < summary["step"]:
        loss += f" after step {summary['valid/step']:,}"
    print(f"\n{loss}" + (f" (a unigram model of the same text: {unigram:.4f})" if unigram else ""))
    if summary["tokens_per_second"]:
        print(
            f"{summary['step']:,} steps, {summary['tokens']:,} tokens in {format_duration(summary['seconds'])}, "
            f"{summary['tokens_per_second']:,.0f} tokens/s"
        )
    if outcome.state == "finished" and outcome.reason:
        print(outcome.reason)
    if outcome.state == "diverged":
        print(escape_controls(f"DIVERGED: {outcome.reason}"))
    is_worth_a_sample = outcome.state != "diverged" and math.isfinite(summary["valid/loss"])
    needs_all = run.trainer.parallel.is_sharded
    if needs_all:
        run.trainer.world.gather(is_worth_a_sample)
    if is_worth_a_sample and run.config.sample_tokens:
        try:
            with nullcontext() if needs_all else raise_on_stop_signals():  # no rank may leave the others alone
                print(f"\n{format_sample(generate_sample(run))}\n")
        except StopRequested as stop:
            print(f"no sample: {stop}", file=sys.stderr)
    print(f"{run.folder}: {', '.join(sorted(path.name for path in run.folder.iterdir() if path.name[0] != '.'))}")
    if already and outcome.state == "diverged":
        print("This run had diverged before: give it another name, or remove its status.json to let it go on.")
    elif already:
        print("This run had finished before: change a setting, the seed or the name to start another.")
