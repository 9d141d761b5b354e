"""Put runs side by side: `muown-train compare runs/*`.

Runs that differ only in the seed, or in settings that change no result (such as name, tracking, workers or
shard_optimizer), share a line with mean and standard deviation. The command prints final numbers (as many columns as
fit) and the settings that differ, and writes

    compare.md    the same, and every run
    compare.csv   a line for each run, unrounded
    compare.png   validation and training loss against tokens and time; also as compare.pdf

Runs may still be training; nothing in their folders is changed. Paths that are not the folder of a run are passed over.
"""

import glob
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.experiments.compare import MAX_SIDE_BY_SIDE, Comparison, compare_runs, describe_state
from muown_train.runs.archive_files import find_archived_runs
from muown_train.runs.record import NoRun, RunRecord, read_run
from muown_train.runtime.formatting import escape_controls


def main(words: Sequence[str]) -> None:
    """Run the command with the words that follow its name."""
    parser = CommandParser(__doc__)
    runs_help = "folders of runs, archived runs (ARCHIVE/NAME), or patterns of either"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=runs_help)
    out_help = "folder of what is written (default compare)"
    parser.add_argument("--out", type=Path, default=Path("compare"), metavar="DIR", help=out_help)
    arguments = parser.parse_intermixed_args(words)
    with report_errors([]):
        runs = read_runs(find_paths(arguments.runs))
        arguments.out.mkdir(parents=True, exist_ok=True)
        comparison = compare_runs(runs)
        print_comparison(comparison, runs, arguments.out)
        written = comparison.write(arguments.out)
    print(f"{arguments.out}: {', '.join(path.name for path in written)}")


def find_paths(words: Iterable[str]) -> list[Path]:
    """Return the paths that words name; a word with * ? [ that is not a path itself is a pattern.

    Raises:
        ValueError: there is no such path.
    """
    paths: list[Path] = []
    for word in words:
        matches = [Path(path) for path in ([word] if Path(word).exists() else sorted(glob.glob(word)))]
        matches = matches or find_archived_runs(word)
        if not matches:
            raise ValueError(f"there is no folder {word}: give those of runs, such as runs/NAME or 'runs/*'")
        paths += [path for path in matches if path.name != "multirun.yaml"]  # a sweep's, beside its runs
    return paths


def read_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """Return the runs in folders, and print which paths are passed over.

    Raises:
        ValueError: none of them is a run that has begun.
    """
    runs, faults = [], []
    for path in paths:
        try:
            run = read_run(path)
            if not run.columns:
                raise NoRun(f"{path} has no lines in metrics.jsonl: it has not begun, or holds weights alone")
            runs.append(run)
        except ValueError as error:  # one folder that cannot be read does not hide the others
            faults.append(str(error))
    if not runs:
        raise ValueError(faults[0])
    for fault in faults:
        print(escape_controls(f"passed over: {fault}"), file=sys.stderr)
    return runs


def print_comparison(comparison: Comparison, runs: Iterable[RunRecord], out: Path) -> None:
    """Print the tables that fit on a terminal, the runs that have not finished, and notes."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(comparison.make_overview().format_rich(console.width))
    if comparison.differing and len(comparison.groups) <= MAX_SIDE_BY_SIDE:
        console.print(comparison.make_differences().format_rich(console.width))
    elif comparison.differing:
        print(f"what differs: {out}/compare.md")
    for run in runs:
        if run.state != "finished":
            print(escape_controls(f"{run.name}: {describe_state(run)}"))
    print(escape_controls("\n".join(comparison.list_notes())))
