"""Print one combination of a grid, for an element of an array of jobs.

`grid.py list optim.lr=1e-3,2e-3 seed=0,1` checks the settings of all combinations and prints a line for each: its
number, the folder of its run and what varies. `grid.py 2 …` prints the overrides of number 2, each followed by a NUL,
and `grid.py folder …` the folder of a single run. The order is Hydra's: the last axis changes fastest. A word `@FILE`
stands for the lines of a file, each with the overrides of one run as in a shell.
"""

import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation for this

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException

from muown_train.cli.messages import explain_error
from muown_train.cli.sweep import judge_jobs
from muown_train.config.compose import CONFIG_DIR, load_config
from muown_train.config.overrides import expand_grid, find_varying_words
from muown_train.config.renamed_names import update_overrides
from muown_train.config.run_name import locate_run_folder


def list_combinations(overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of each run.

    Raises:
        HydraException: a word is no override.
        OSError: a file of runs cannot be read.
    """
    files = [word[1:] for word in overrides if word.startswith("@")]
    listed = [[tuple(shlex.split(line)) for line in Path(file).read_text().splitlines() if line] for file in files]
    words = update_overrides([word for word in overrides if not word.startswith("@")])
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        grid = expand_grid(words, GlobalHydra.instance().config_loader())
    return [tuple(itertools.chain(*parts)) for parts in itertools.product(*listed, grid)]


def list_runs(grid: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each run: its number, its folder and what varies.

    Raises:
        ValueError: a setting of a run is wrong, or two runs would train in one folder.
    """
    folders = [locate_run_folder(config.out, config.name) for config in judge_jobs(grid)]
    runs = zip(folders, find_varying_words(grid), strict=True)
    return [f"{i}  {folder}  {text}".rstrip() for i, (folder, text) in enumerate(runs)]


def main(number: str, *overrides: str) -> None:
    """Print what was asked for, or exit with status 2 and one sentence."""
    try:
        if number == "folder":
            config = load_config(overrides)
            print(locate_run_folder(config.out, config.name))
            return
        grid = list_combinations(overrides)
        runs = list_runs(grid) if number == "list" else []
    except (HydraException, ValueError, OSError) as error:
        words = [word for word in overrides if not word.startswith("@")]
        undone = "; nothing is submitted" if number == "list" else ""
        print(f"error: {explain_error(error, words)}{undone}", file=sys.stderr)
        sys.exit(2)
    if number == "list":
        print(*runs, sep="\n")
    elif int(number) < len(grid):
        print(*grid[int(number)], sep="\0", end="\0")
    else:
        print(f"error: element {number} of an array, but the grid has {len(grid)} runs: --array=0-{len(grid) - 1}",
              file=sys.stderr)  # fmt: skip
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
