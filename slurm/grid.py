"""Print one combination of a grid, for an element of an array of jobs.

`grid.py count optim.lr=1e-3,2e-3 seed=0,1` prints the number of combinations, and `grid.py 2 …` the overrides of number
2, each followed by a NUL. The order is Hydra's: the last axis changes fastest. A word `@FILE` stands for the lines of a
file, each with the overrides of one run as in a shell.
"""

import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException


def list_combinations(overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of each run.

    Raises:
        HydraException: a word is no override.
        ValueError: several runs would have one name.
        OSError: a file of runs cannot be read.
    """
    files = [word[1:] for word in overrides if word.startswith("@")]
    listed = [[tuple(shlex.split(line)) for line in Path(file).read_text().splitlines() if line] for file in files]
    axes: list[list[str]] = []
    plain = [word for word in overrides if not word.startswith("@")]
    for override in OverridesParser.create().parse_overrides(plain):
        if override.is_sweep_override():
            key = override.get_key_element()
            axes.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            axes.append([str(override.input_line)])
    one_name = any(len(axis) == 1 and axis[0].startswith("name=") and "${" not in axis[0] for axis in axes)
    if one_name and any(len(axis) > 1 for axis in axes):
        raise ValueError("name= would give all runs of the grid one folder: leave it out, or say name='run-${seed}'")
    runs = itertools.product(*listed, itertools.product(*axes))
    return [tuple(itertools.chain(*parts)) for parts in runs]


def main(number: str, *overrides: str) -> None:
    """Print what was asked for, or exit with status 2 and one sentence."""
    try:
        grid = list_combinations(overrides)
    except (HydraException, ValueError, OSError) as error:
        print(f"error: {str(error).splitlines()[0]} (settings are key=value)", file=sys.stderr)
        sys.exit(2)
    if number == "count":
        print(len(grid))
    elif int(number) < len(grid):
        print(*grid[int(number)], sep="\0", end="\0")
    else:
        print(f"error: element {number} of an array, but the grid has {len(grid)} runs: --array=0-{len(grid) - 1}",
              file=sys.stderr)  # fmt: skip
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])
