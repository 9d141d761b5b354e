"""Whether runs are below a validation loss for certain: `python scripts/significance.py runs/a-seed=0 runs/a-seed=1`.

The rule of Track 3 of modded-nanogpt, (3.28 - mean) sqrt(n) >= 0.004, over finished runs that differ in their seed
alone. Give all that were made: those left out would make it worthless. Exit status 0 whether it passes or not.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.experiments.significance import MARGIN, TARGET, Verdict, common_step, evaluations, finished, judge
from muown_train.runs.record import RunRecord


def table(runs: Sequence[RunRecord], losses: Sequence[float], step: int) -> Iterator[str]:
    width = max(len(str(run.folder)) for run in runs)
    yield f"{'run':<{width}}  {'step':>7}  {'seed':>6}  validation loss"
    for run, loss in zip(runs, losses, strict=True):
        yield f"{run.folder!s:<{width}}  {step:>7,}  {run.seed!s:>6}  {loss:>15.5f}"


def conclusion(verdict: Verdict, target: float) -> Iterator[str]:
    yield f"mean {verdict.mean:.5f} of n = {verdict.n}"
    how = f">= {MARGIN}: passes" if verdict.passes else f"< {MARGIN}: fails"
    yield f"({target:g} - mean) sqrt(n) = {verdict.statistic:.5f} {how}"
    if verdict.passes:
        return
    if verdict.needed is None:
        yield f"the mean is not below {target:g}: no number of runs would pass with it"
    else:
        yield f"with this mean {verdict.needed:,} runs would pass, {verdict.needed - verdict.n:,} more"


def main(words: Sequence[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--target", type=float, default=TARGET, help=f"validation loss to be below (default {TARGET})")
    parser.add_argument("--step", type=int, help="updates after which all are compared (default: the last)")
    arguments = parser.parse_args(words)
    with report_errors([]):
        if not 0 < arguments.target < float("inf"):
            raise ValueError(f"--target {arguments.target:g} must be a loss above 0")
        runs = [finished(folder) for folder in arguments.runs]
        step = common_step(runs, arguments.step)
    losses = [evaluations(run)[step] for run in runs]
    verdict = judge(losses, arguments.target)
    print("\n".join([*table(runs, losses, step), *conclusion(verdict, arguments.target)]))
