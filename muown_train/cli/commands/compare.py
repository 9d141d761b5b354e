"""Runs side by side: `python scripts/compare.py runs/*`.

Runs that differ in the seed alone, or in what changes no result (such as name, tracking, workers, shard_optimizer),
are one line, with mean and standard deviation. Prints final numbers (as many columns as fit) and what differs in the
configurations, and writes

    compare.md    the same, and every run
    compare.csv   a line for each run, unrounded
    compare.png   validation and training loss against tokens and time; compare.pdf

Runs may still be training; nothing in their folders is changed. What is no run's folder is passed over.
"""

import glob
import sys
from collections.abc import Sequence
from pathlib import Path

from muown_train.cli.errors import CommandParser, report_errors


def folders(words: list[str]) -> list[Path]:
    """The paths that words name; one with * ? [ that is no path itself is a pattern.

    Raises:
        ValueError: nothing is there.
    """
    found = []
    for word in words:
        paths = [word] if Path(word).exists() else sorted(glob.glob(word))
        if not paths:
            raise ValueError(f"there is no folder {word}: give those of runs, such as runs/NAME or 'runs/*'")
        found += map(Path, paths)
    return found


def main(words: Sequence[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, or patterns of them")
    parser.add_argument("--out", type=Path, default=Path("compare"), metavar="DIR", help="(default compare)")
    arguments = parser.parse_args(words)
    with report_errors([]):
        from rich.console import Console

        from muown_train.experiments.compare import compare, told
        from muown_train.runs.record import NoRun, read_run

        runs, faults = [], []
        for folder in folders(arguments.runs):
            try:
                run = read_run(folder)
            except NoRun as error:
                faults.append(str(error))
                continue
            if run.columns:
                runs.append(run)
            else:
                faults.append(f"{folder} has no lines in metrics.jsonl: it has not begun, or holds weights alone")
        if not runs:
            raise ValueError(faults[0])
        for fault in faults:
            print(f"passed over: {fault}", file=sys.stderr)
        arguments.out.mkdir(parents=True, exist_ok=True)
        comparison = compare(runs)
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(comparison.overview().rich(console.width))
        if comparison.differing and len(comparison.groups) <= 6:
            console.print(comparison.differences().rich(console.width))
        elif comparison.differing:
            print(f"what differs: {arguments.out}/compare.md")
        for run in runs:
            if run.state != "finished":
                print(f"{run.name}: {told(run)}")
        print("\n".join(comparison.notes()))
        written = comparison.write(arguments.out)
    print(f"{arguments.out}: {', '.join(path.name for path in written)}")
