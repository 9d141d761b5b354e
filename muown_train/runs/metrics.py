"""The metrics of a run: metrics.jsonl is the record; the terminal, W&B and TensorBoard are sinks of the same lines.

Only the main rank writes metrics. A line is a flat JSON object with `step`, the number of steps done (0 before the
first), and `tokens`, the number of tokens trained on so far.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from muown_train.config.checks import is_number
from muown_train.runtime.atomic_files import open_regular, parse_json, read_regular, sync_to_disk, write_atomic

MAX_FILE = 1 << 32  # bytes of a file of metrics: ten million steps
MAX_LINE = 1 << 20  # bytes of a line

Line = dict[str, Any]


class Sink(Protocol):
    """An object that shows or stores lines of metrics. All sinks share the lines, so none changes them."""

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None: ...

    def write(self, lines: Sequence[Line]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class FolderChangedError(OSError):
    """Somebody else has moved, removed or changed the folder of a run, or its record, while the run was training."""


class Metrics:
    """The files of metrics in a run's folder.

    metrics.jsonl               one line for each step
    metrics.rolled_back.jsonl   lines of steps that were lost or taken back, and broken lines; some may be there twice
    events.jsonl                other events, such as skipped steps; they are never taken back

    Appended lines are with the operating system and survive the process, however it ends. A power cut may take the
    lines after the last `sync`, usually those of the last half minute, because the system chooses when to write them.

    `check_folder` raises FolderChangedError where the run's folder is no longer the one that it began in.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.check_folder: Callable[[], None] = lambda: None
        self._lines, self._events = LineFile(self.path), LineFile(folder / "events.jsonl")

    def append(self, lines: Iterable[Line]) -> None:
        """Write lines at once.

        Raises:
            OSError: they cannot be written now. The file is as before; the next call that can writes them and the
                waiting events, in order.
            FolderChangedError: somebody else has changed the folder or the file; nothing is written any more.
        """
        self._lines.waiting += map(encode_line, lines)
        self.check_folder()
        self._lines.write()
        self._events.write()

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Write a line to events.jsonl; if that is impossible now, it waits for the next event or `append`."""
        self._events.waiting.append(encode_line(event))
        with suppress(OSError):  # the next `append` raises it
            self.check_folder()
            self._events.write()

    def sync(self) -> None:
        """Wait until the lines written so far are on the disk: a checkpoint of their step must not outlast them.

        Raises:
            FolderChangedError: somebody else has changed the folder or a file.
        """
        self.check_folder()
        self._lines.check_size()
        self._events.check_size()
        for path in (self.path, self._events.path):
            if path.exists():
                sync_to_disk(path)

    def rewind(self, step: int) -> None:
        """Move the lines after `step`, and broken or repeated lines, to metrics.rolled_back.jsonl.

        Nothing is deleted: the lines are on the disk there before they leave metrics.jsonl.

        Raises:
            OSError: a file cannot be written; metrics.jsonl is as before.
        """
        content = self._read()
        kept: list[bytes] = []
        moved: list[bytes] = []
        last = -math.inf
        for text in (*content.split(b"\n"), *(text.rstrip(b"\n") for text in self._lines.waiting)):
            line = _parse_line(text)
            if line is not None and last < line["step"] <= step:
                kept.append(text + b"\n")
                last = line["step"]
            elif text:
                moved.append(text + b"\n")
        if moved:
            rolled_back = LineFile(self.path.with_name("metrics.rolled_back.jsonl"))
            rolled_back.waiting = moved
            rolled_back.write()
            sync_to_disk(rolled_back.path)
        if (whole := b"".join(kept)) != content:
            write_atomic(self.path, whole)
        self._lines.size = len(whole) if content else None
        self._lines.waiting.clear()

    def amend(self, line: Line) -> None:
        """Write a line at the end, in place of the last line if that has the same step; at once or not at all.

        Raises:
            OSError: the file cannot be written; it is as before.
        """
        lines = self._read().splitlines(keepends=True)
        last = _parse_line(lines[-1]) if lines else None
        if last is not None and last["step"] == line["step"]:
            lines.pop()
        content = b"".join([*lines, encode_line(line)])
        write_atomic(self.path, content)
        self._lines.size = len(content)

    def _read(self) -> bytes:
        """Return the content of metrics.jsonl; nothing if it is missing."""
        try:
            return read_regular(self.path, MAX_FILE)
        except FileNotFoundError:
            return b""

    def read(self) -> list[Line]:
        """Return all lines, also those that wait to be written."""
        written = read_metrics(self.path) if self.path.exists() else []
        return written + [line for text in self._lines.waiting if (line := _parse_line(text)) is not None]


class LineFile:
    """A file of JSON lines that holds whole lines alone. `waiting` holds encoded lines that are still to be written.

    `size` is the number of bytes that the file had when this process last wrote to it; None before that.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, list[bytes]()
        self.size: int | None = None

    def check_size(self) -> None:
        """Raise FolderChangedError if somebody else has changed the size of the file or removed it."""
        if self.size is None:
            return
        found = self.path.stat().st_size if self.path.exists() else None
        if found != self.size:
            now = "was removed" if found is None else f"has {found:,} bytes now, and had {self.size:,}"
            raise FolderChangedError(
                f"{self.path} was changed by somebody else while this run was training (it {now}): nothing more is "
                "saved; the same command goes on from the last checkpoint"
            )

    def write(self) -> None:
        """Write all waiting lines, or none.

        Raises:
            OSError: it is impossible now; the lines stay in `waiting`.
        """
        if not self.waiting:
            return
        self.check_size()
        end = None
        try:
            with self.path.open("a+b", buffering=0) as file:
                end = _repair_end(file)
                rest = memoryview(b"".join(self.waiting))
                while rest:
                    rest = rest[file.write(rest) :]
                self.size = file.tell()
        except OSError as error:
            if end is not None:
                with suppress(OSError):  # the next call repairs the file if this fails
                    os.truncate(self.path, end)
            count = f"{len(self.waiting)} line{'s' * (len(self.waiting) > 1)}"
            raise OSError(f"{self.path}: {error.strerror or error}; {count} to be written") from error
        self.waiting.clear()


def _repair_end(file: BinaryIO) -> int:
    """Cut off the part of a line that a kill may have left at the end; leave the file there and return the place."""
    end = file.seek(0, os.SEEK_END)
    if end:
        file.seek(end - 1)
        if file.read() != b"\n":
            file.seek(0)
            content = file.read()
            end = content.rfind(b"\n") + 1
            file.truncate(end)
            if _is_json(content[end:]):  # only the end of the line was missing
                file.write(content[end:] + b"\n")
                end = len(content) + 1
    return end


def read_metrics(path: Path) -> list[Line]:
    """Return the lines of a metrics.jsonl; a line that was cut off is left out."""
    with open_regular(path) as file:
        return parse_metrics(file)


def parse_metrics(file: BinaryIO, last: int | None = None) -> list[Line]:
    """Return the lines of an open metrics.jsonl, or those in its last `last` bytes, as `read_metrics` does."""
    size = file.seek(0, os.SEEK_END)
    if size > MAX_FILE:
        raise ValueError(f"a file of metrics has {size:,} bytes, and may have {MAX_FILE:,} at most")
    file.seek(0 if last is None else max(0, size - last))
    return [line for text in file.read().split(b"\n") if (line := _parse_line(text)) is not None]


def _parse_line(text: bytes) -> Line | None:
    """Return a line of metrics, with the strings that `encode_line` wrote as numbers again; None for another text."""
    try:
        line = parse_json(text) if len(text) <= MAX_LINE else None
    except ValueError:
        return None
    if not isinstance(line, dict) or not is_number(line.get("step")):
        return None
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in line.items()}


def _is_json(text: bytes) -> bool:
    try:
        return isinstance(parse_json(text), dict)
    except ValueError:
        return False


def encode_line(line: Mapping[str, Any]) -> bytes:
    """Return a line as bytes. NaN and infinities become strings, since JSON does not have them."""
    finite = {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }
    return (json.dumps(finite) + "\n").encode()
