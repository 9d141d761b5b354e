"""Test whether runs are below a validation loss: `muown-train significance runs/a-seed=0 runs/a-seed=1`.

The rule is that of Track 3 of modded-nanogpt, (3.28 - mean) sqrt(n) >= 0.004, over finished runs that differ only in
their seed. Give all runs that were made: leaving some out would make the test worthless. The exit status is 0 whether
the runs pass or not.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.experiments.significance import (
    MARGIN,
    TARGET,
    Verdict,
    find_common_step,
    get_valid_losses,
    judge_losses,
    read_finished_run,
)
from muown_train.runs.record import RunRecord


def main(words: Sequence[str]) -> None:
    """Run the command with the words that follow its name."""
    parser = CommandParser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--target", type=float, default=TARGET, help=f"validation loss to be below (default {TARGET})")
    parser.add_argument("--step", type=int, help="step at which all runs are compared (default: the last)")
    arguments = parser.parse_intermixed_args(words)
    with report_errors([]):
        if not 0 < arguments.target < float("inf"):
            raise ValueError(f"--target {arguments.target:g} must be a loss above 0")
        runs = [read_finished_run(folder) for folder in arguments.runs]
        step = find_common_step(runs, arguments.step)
    losses = [get_valid_losses(run)[step] for run in runs]
    verdict = judge_losses(losses, arguments.target)
    print("\n".join([*format_losses(runs, losses, step), *format_verdict(verdict, arguments.target)]))


def format_losses(runs: Sequence[RunRecord], losses: Sequence[float], step: int) -> Iterator[str]:
    """Yield the lines of a table of runs."""
    width = max(len(str(run.folder)) for run in runs)
    yield f"{'run':<{width}}  {'step':>7}  {'seed':>6}  validation loss"
    for run, loss in zip(runs, losses, strict=True):
        yield f"{run.folder!s:<{width}}  {step:>7,}  {run.seed!s:>6}  {loss:>15.5f}"


def format_verdict(verdict: Verdict, target: float) -> Iterator[str]:
    """Yield the lines that say whether the runs pass, and if not, how many would."""
    yield f"mean {verdict.mean:.5f} of n = {verdict.n}"
    outcome = f">= {MARGIN}: passes" if verdict.passes else f"< {MARGIN}: fails"
    yield f"({target:g} - mean) sqrt(n) = {verdict.statistic:.5f} {outcome}"
    if verdict.passes:
        return
    if verdict.needed is None:
        yield f"the mean is not below {target:g}: no number of runs would pass with it"
    else:
        yield f"with this mean {verdict.needed:,} runs would pass, {verdict.needed - verdict.n:,} more"
