"""Archives of runs: the records of many finished runs in two files, small enough to be kept with the code.

    ARCHIVE.json     the configuration, manifest and status of every run: {NAME: {"config", "manifest", "status"}}
    ARCHIVE.tar.xz   NAME/metrics.jsonl and NAME/analysis/*.jsonl, byte for byte as the runs wrote them

Lines of metrics are neither thinned nor rounded: means of training losses and smoothed curves would change. The JSON
file decides which runs there are and is replaced last, so an archive holds a run wholly or not at all. A run in an
archive is addressed as ARCHIVE/NAME, such as `docs/results/runs/corpus_seeds/muown-lr=0.0078125-seed=1`, although
there is no such folder; `muown_train.runs.record.read_run` takes that path.
"""

import fnmatch
import glob
import io
import json
import lzma
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from muown_train.runtime.atomic_files import read_json, read_regular, write_atomic

_MAX_BYTES = 1 << 30  # bytes of an archive's files, packed and unpacked


@dataclass(frozen=True)
class ArchivedRun:
    """The record of a run as an archive stores it."""

    config: dict[str, Any]
    manifest: dict[str, Any]
    status: dict[str, Any]
    files: dict[str, bytes]  # content by path in the run's folder: metrics.jsonl and analysis/*.jsonl

    def list_changes(self, newer: "ArchivedRun") -> list[str]:
        """Return the names of the files of a run's folder in which a newer record of the same run differs."""
        parts = {"config.yaml": "config", "manifest.json": "manifest", "status.json": "status"}
        changed = [name for name, part in parts.items() if getattr(self, part) != getattr(newer, part)]
        return changed + [name for name, content in newer.files.items() if self.files.get(name) != content]


class RunArchive:
    """The archive in ARCHIVE.json and ARCHIVE.tar.xz, read when it is first needed; without these files it is empty.

    Args:
        path: ARCHIVE, without an ending.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index_path = Path(f"{path}.json")
        self.files_path = Path(f"{path}.tar.xz")

    @cached_property
    def entries(self) -> dict[str, dict[str, Any]]:
        """The configuration, manifest and status of each run, by name.

        Raises:
            ValueError: the file is not what `write` writes.
        """
        try:
            entries: dict[str, dict[str, Any]] = read_json(self.index_path, follow_link=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except ValueError as error:
            raise ValueError(f"{error}; restore it, for instance from git") from None
        for name, entry in entries.items():
            parts = [entry.get(part) for part in ("config", "manifest", "status")] if isinstance(entry, dict) else []
            if len(parts) != 3 or not all(isinstance(part, dict) for part in parts):
                raise ValueError(f"{self.index_path} has no config, manifest and status of {name}: restore it from git")
        return entries

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The files of all runs by NAME/PATH.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            return _unpack(read_regular(self.files_path, _MAX_BYTES, follow_link=True))
        except FileNotFoundError:
            return {}
        except (tarfile.TarError, lzma.LZMAError, ValueError) as error:
            raise ValueError(f"{self.files_path} is damaged: {error}; restore it, for instance from git") from None

    def open_file(self, name: str, path: str) -> BinaryIO:
        """Open a file of a run for reading.

        Raises:
            FileNotFoundError: the run has no such file.
        """
        try:
            return io.BytesIO(self.files[f"{name}/{path}"])
        except KeyError:
            raise FileNotFoundError(f"{self.files_path} has no {name}/{path}") from None

    def get(self, name: str) -> ArchivedRun:
        """Return the record of a run."""
        prefix = f"{name}/"
        files = {path.removeprefix(prefix): content for path, content in self.files.items() if path.startswith(prefix)}
        return ArchivedRun(**self.entries[name], files=files)

    def write(self, runs: Mapping[str, ArchivedRun]) -> None:
        """Add runs, or replace those of the same names; every run that was in the archive before stays in it.

        Raises:
            OSError: a file cannot be written. The runs in the archive are then as before.
        """
        records = {name: self.get(name) for name in self.entries} | dict(runs)
        records = dict(sorted(records.items()))
        index = {name: {"config": r.config, "manifest": r.manifest, "status": r.status} for name, r in records.items()}
        files = {f"{name}/{path}": content for name, r in records.items() for path, content in sorted(r.files.items())}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if files != self.files:
            write_atomic(self.files_path, _pack(files))
        write_atomic(self.index_path, (json.dumps(index, indent=1) + "\n").encode())
        self.entries, self.files = index, files


def list_archives(folder: Path) -> Iterator[RunArchive]:
    """Yield the archives in a folder, sorted by name."""
    for path in sorted(folder.glob("*.json")):
        yield RunArchive(folder / path.name.removesuffix(".json"))


def find_archived_runs(pattern: str) -> list[Path]:
    """Return the paths of archived runs that a path or a pattern matches, such as `docs/results/runs/*/muown-*`."""
    archives, name = os.path.split(pattern)
    matches = [RunArchive(Path(path.removesuffix(".json"))) for path in sorted(glob.glob(f"{archives}.json"))]
    return [archive.path / run for archive in matches for run in archive.entries if fnmatch.fnmatchcase(run, name)]


def _pack(files: Mapping[str, bytes]) -> bytes:
    """Return a compressed tar of files; the same files give the same bytes, without times and names of owners."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return lzma.compress(packed.getvalue())


def _unpack(content: bytes) -> dict[str, bytes]:
    """Return the files in a compressed tar, whose checksums are tested.

    Raises:
        ValueError: it holds more than _MAX_BYTES; other errors are those of the libraries.
    """
    decompressor = lzma.LZMADecompressor()
    unpacked = decompressor.decompress(content, _MAX_BYTES)
    if not decompressor.eof:
        raise ValueError(f"it is cut off, or holds more than {_MAX_BYTES:,} bytes")
    with tarfile.open(fileobj=io.BytesIO(unpacked)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]
