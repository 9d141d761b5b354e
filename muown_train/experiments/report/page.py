"""A page with parts that reports fill in, between `<!-- report NAME FIGURE … -->` and `<!-- end -->`.

Figures and the CSV go to a folder beside the page, docs/results/NAME for docs/results.md. A part that names no figures
shows all of them.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from muown_train.runtime.atomic_files import write_atomic

_PART = re.compile(r"(<!-- report (\S+)((?: \S+)*) -->\n)(?:(?!<!-- report ).)*?(<!-- end -->)(?=\n|\Z)", re.DOTALL)


def fill_page(page: Path, name: str, body: str, files: Sequence[Path]) -> Path:
    """Bring the part of a report up to date.

    Args:
        body: the text that follows the figures.
        files: the files that `ReportWriter.write` returned.

    Returns:
        The folder of its figures.

    Raises:
        ValueError: the page does not exist or has no such part, or the report has no such figure.
        OSError: it cannot be written.
    """
    part = find_part(page, name)
    figures = {path.stem: path for path in files if path.suffix == ".png"}
    shown = part[3].split() or list(figures)
    if missing := [figure for figure in shown if figure not in figures]:
        raise ValueError(f"{page}: {name} has no figure {missing[0]} yet; it has {', '.join(figures) or 'none'}")
    folder = page.with_suffix("") / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*(figures[figure] for figure in shown), *(path for path in files if path.suffix == ".csv")):
        shutil.copy(path, folder / path.name)
    images = [f"![{figure}]({folder.relative_to(page.parent)}/{figure}.png)\n" for figure in shown]
    text = f"{part[1]}\n" + "\n".join([*images, body]) + f"\n{part[4]}"
    write_atomic(page, (part.string[: part.start()] + text + part.string[part.end() :]).encode())
    return folder


def find_part(page: Path, name: str) -> re.Match[str]:
    """Find the part of a page that shows a report.

    Raises:
        ValueError: the page does not exist or has no such part.
    """
    if not page.is_file():
        raise ValueError(f"page={page} is no file: give a page of Markdown that shows the report")
    parts = {match[2]: match for match in _PART.finditer(page.read_text())}
    if name not in parts:
        raise ValueError(f"{page} has no part for this report: <!-- report {name} --> and <!-- end -->, a line each")
    return parts[name]
