"""A page by hand with parts that reports fill in, between `<!-- report NAME FIGURE … -->` and `<!-- end -->`.

Figures and the CSV go to a folder beside the page, docs/results/NAME for docs/results.md. Without names of figures all
of them are shown.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from muown_train.runtime.atomic_files import write_atomic

_PART = re.compile(r"(<!-- report (\S+)((?: \S+)*) -->\n)(?:(?!<!-- report ).)*?(<!-- end -->)(?=\n|\Z)", re.DOTALL)


def fill(page: Path, name: str, body: str, report: Sequence[Path]) -> Path:
    """Bring the part of a report up to date.

    Args:
        body: what follows the figures.
        report: the files of `Report.write`.

    Returns:
        The folder of its figures.

    Raises:
        ValueError: the page is not there or has no such part, or the report no such figure.
        OSError: it cannot be written.
    """
    found = _part(page, name)
    figures = {path.stem: path for path in report if path.suffix == ".png"}
    shown = found[3].split() or list(figures)
    if missing := [figure for figure in shown if figure not in figures]:
        raise ValueError(f"{page}: {name} has no figure {missing[0]} yet; it has {', '.join(figures) or 'none'}")
    folder = page.with_suffix("") / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*(figures[figure] for figure in shown), *(path for path in report if path.suffix == ".csv")):
        shutil.copy(path, folder / path.name)
    images = [f"![{figure}]({folder.relative_to(page.parent)}/{figure}.png)\n" for figure in shown]
    part = f"{found[1]}\n" + "\n".join([*images, body]) + f"\n{found[4]}"
    write_atomic(page, (found.string[: found.start()] + part + found.string[found.end() :]).encode())
    return folder


def check_page(page: Path, name: str) -> None:
    """Error now rather than when the report has been made.

    Raises:
        ValueError: the page is not there or has no such part.
    """
    _part(page, name)


def _part(page: Path, name: str) -> re.Match[str]:
    if not page.is_file():
        raise ValueError(f"page={page} is no file: give a page of Markdown that shows the report")
    found = {match[2]: match for match in _PART.finditer(page.read_text())}
    if name not in found:
        raise ValueError(f"{page} has no part for this report: <!-- report {name} --> and <!-- end -->, a line each")
    return found[name]
