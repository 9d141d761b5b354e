"""What a run writes down: metrics.jsonl is the record; the terminal, W&B and TensorBoard are sinks of the same lines.

Only the main rank has records. A line is a flat JSON object with `step`, the number of updates done (0 before the
first), and `tokens`, those trained on so far.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from muown_train.runtime.atomic_files import sync_to_disk, write_atomic

Line = dict[str, Any]


class Sink(Protocol):
    """Something that is shown every line of metrics. Lines belong to all sinks: none changes them."""

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None: ...

    def write(self, lines: Sequence[Line]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class Metrics:
    """The record of a run in its folder.

    metrics.jsonl               a line for every update, each step once
    metrics.rolled_back.jsonl   lines of updates that were lost or taken back, and broken ones; some may be there twice
    events.jsonl                what happened besides, such as skipped updates; never taken back

    What has been appended is with the system and survives the process, however it ends. A power cut may take what came
    after the last `sync`, usually the lines of the last half minute: the system writes them when it likes.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self._lines, self._events = WholeLines(self.path), WholeLines(folder / "events.jsonl")

    def append(self, lines: Iterable[Line]) -> None:
        """Write lines at once.

        Raises:
            OSError: they cannot be written now. The file is as before; they, and events that wait, will be written,
                in order, by the next call that can.
        """
        self._lines.waiting += map(encoded, lines)
        self._lines.write()
        self._events.write()

    def event(self, facts: Mapping[str, Any]) -> None:
        """Write a line to events.jsonl; one that cannot be written now waits for the next event or `append`."""
        self._events.waiting.append(encoded(facts))
        with suppress(OSError):  # the next `append` says it
            self._events.write()

    def sync(self) -> None:
        """Wait until the lines written so far are on the disk, as before a checkpoint that must not outlast them."""
        for path in (self.path, self._events.path):
            if path.exists():
                sync_to_disk(path)

    def rewind(self, step: int) -> None:
        """Move the lines after `step`, and any broken or repeated one, to metrics.rolled_back.jsonl.

        Nothing is deleted: the lines are on the disk there before they leave metrics.jsonl.

        Raises:
            OSError: a file cannot be written; metrics.jsonl is as before.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        kept: list[bytes] = []
        moved: list[bytes] = []
        last = -math.inf
        for text in (*content.split(b"\n"), *(text.rstrip(b"\n") for text in self._lines.waiting)):
            line = _parsed(text)
            if line is not None and last < line["step"] <= step:
                kept.append(text + b"\n")
                last = line["step"]
            elif text:
                moved.append(text + b"\n")
        if moved:
            rolled_back = WholeLines(self.path.with_name("metrics.rolled_back.jsonl"))
            rolled_back.waiting = moved
            rolled_back.write()
            sync_to_disk(rolled_back.path)
        if (whole := b"".join(kept)) != content:
            write_atomic(self.path, whole)
        self._lines.waiting.clear()

    def amend(self, line: Line) -> None:
        """Put a line in place of the last one, if that is of the same step, and else after it; at once or not at all.

        Raises:
            OSError: the file cannot be written; it is as before.
        """
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        last = _parsed(lines[-1]) if lines else None
        if last is not None and last["step"] == line["step"]:
            lines.pop()
        write_atomic(self.path, b"".join([*lines, encoded(line)]))

    def read(self) -> list[Line]:
        """All lines, those that wait too."""
        written = read_metrics(self.path) if self.path.exists() else []
        return written + [line for text in self._lines.waiting if (line := _parsed(text)) is not None]


class WholeLines:
    """A file of JSON lines, all of them whole. `waiting` are encoded lines, with their ends, that are to be written."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, list[bytes]()

    def write(self) -> None:
        """Write all that waits, or nothing.

        Raises:
            OSError: it is impossible now; all go on to wait.
        """
        if not self.waiting:
            return
        end = None
        try:
            with self.path.open("a+b", buffering=0) as file:
                end = _mended(file)
                rest = memoryview(b"".join(self.waiting))
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError as error:
            if end is not None:
                with suppress(OSError):  # then the next call mends it
                    os.truncate(self.path, end)
            count = f"{len(self.waiting)} line{'s' * (len(self.waiting) > 1)}"
            raise OSError(f"{self.path}: {error.strerror or error}; {count} to be written") from error
        self.waiting.clear()


def _mended(file: BinaryIO) -> int:
    """The end of a file of which a kill may have left a part of a line, that part cut off; the file stands there."""
    end = file.seek(0, os.SEEK_END)
    if end:
        file.seek(end - 1)
        if file.read() != b"\n":
            file.seek(0)
            content = file.read()
            end = content.rfind(b"\n") + 1
            file.truncate(end)
            if _is_json(content[end:]):  # only its end was missing
                file.write(content[end:] + b"\n")
                end = len(content) + 1
    return end


def read_metrics(path: Path, last: int | None = None) -> list[Line]:
    """Return the lines of a metrics.jsonl, or those in its last `last` bytes; a line that was cut off is left out."""
    with path.open("rb") as file:
        return parse_metrics(file, last)


def parse_metrics(file: BinaryIO, last: int | None = None) -> list[Line]:
    """Return the lines of an open metrics.jsonl, as `read_metrics` does of a path."""
    if last is not None:
        file.seek(max(0, file.seek(0, os.SEEK_END) - last))
    return [line for text in file.read().split(b"\n") if (line := _parsed(text)) is not None]


def _parsed(text: bytes) -> Line | None:
    """A line of metrics, if it is one, with what `encoded` wrote as strings as numbers again."""
    try:
        line = json.loads(text)
        if not isinstance(line, dict) or not math.isfinite(line["step"]):
            return None
        return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in line.items()}
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _is_json(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def encoded(line: Mapping[str, Any]) -> bytes:
    """A line as bytes; NaN and infinities as strings: JSON has none."""
    finite = {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }
    return (json.dumps(finite) + "\n").encode()
