"""Documents -> token shards on disk (scripts/prepare_data.py), in a folder that shards.py reads.

The first documents of the source, whole ones, are held out; training begins with the next. Each shard is written
beside its place, synced and renamed, and then `progress.json` says where in the source the next one begins. So
what is interrupted at any moment begins again with the shard that was not complete, and ends with the same bytes.
Before there is a shard to train on, the folder is begun anew, and so takes other settings.
Beside each shard `NAME.documents.npy` (uint64) says where in it documents begin; one that is cut begins in the
first of its shards alone.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from muown_train.config.checks import check_int
from muown_train.data.cache import fingerprint
from muown_train.data.hub.files import LEAST
from muown_train.data.shards.dataset import COUNTS, FORMAT, INDEX, PROGRESS
from muown_train.data.shards.progress import Report
from muown_train.data.shards.reader import OPENERS, Cursor, Reader, Source
from muown_train.data.text.tokenizer import TOKENIZER, HubTokenizer, load_tokenizer, token_dtype
from muown_train.data.token_file import TokenWriter
from muown_train.runtime.atomic_files import PARTIAL, sync_to_disk, write_atomic

FLUSH = 1 << 20  # ids written and counted together


def prepare(
    folder: Path,
    data: str,
    settings: Mapping[str, Any],
    tokens: int | None = None,
    valid_tokens: int = 4_000_000,
    shard_tokens: int = 100_000_000,
    report: Report | None = None,
) -> None:
    """Write `tokens` tokens to train on (None: all there are) and the held-out ones to `folder`, or go on with it.

    `data` and `settings` are the name of a function that data configurations have as target, `files` or
    `hub_stream`, and its arguments. Held out are whole documents of at least valid_tokens + 1 tokens. Raises
    ValueError for settings that cannot be, are not those that the folder was begun with, or whose data changed;
    OSError where the disk is full.
    """
    from filelock import FileLock, Timeout

    report = report or Report()
    _check(data, settings, tokens, valid_tokens, shard_tokens)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out={folder} is a file: give a folder")
    chosen = {f"data.{key}": value for key, value in settings.items() if key not in LEAST}
    limits = {"tokens": tokens, "valid_tokens": valid_tokens, "shard_tokens": shard_tokens}
    arguments = json.loads(json.dumps({"kind of data": data, **chosen, **limits}))
    with _full_disk_explained(folder), report:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / ".lock", timeout=0):
                _prepare(folder, arguments, data, settings, report)
        except Timeout as error:
            raise ValueError(f"another process is preparing {folder}: wait for it or give another out=") from error


def _check(data: str, settings: Mapping[str, Any], tokens: int | None, valid_tokens: int, shard_tokens: int) -> None:
    if data not in OPENERS:
        raise ValueError(f"data with the target {data} cannot be prepared; {', '.join(OPENERS)} can")
    for key, value in (("tokens", tokens), ("valid_tokens", valid_tokens), ("shard_tokens", shard_tokens)):
        if value is not None:
            check_int(key, value, 1)
    for key in LEAST.keys() & settings.keys():
        check_int(f"data.{key}", settings[key], LEAST[key])
    if not settings.get("tokenizer"):
        raise ValueError("data.tokenizer is not set: give the path of a tokenizer.json or a hub name")


def _prepare(folder: Path, arguments: dict[str, Any], data: str, settings: Mapping[str, Any], report: Report) -> None:
    index, state = _read(folder / INDEX), _read(folder / PROGRESS)
    known = index or state
    if known is None and (found := sorted(path.name for path in folder.glob("*.bin"))):
        raise ValueError(f"{folder} holds {found[0]} of other data: give an empty folder as out=")
    if known is not None and len(known["shards"]) > 1:
        _refuse_other(folder, known["arguments"], arguments)
    else:
        state = None
    if index is not None:
        _clean(folder)
        report.say(f"{folder} is finished: {_summary(index)}")
        return

    name = str(settings["tokenizer"])
    tokenizer = load_tokenizer(name)
    source = OPENERS[data](settings, state["source"] if state else None, report.say)
    with closing(source):
        if state is None:
            state = _begin(folder, arguments, tokenizer, source)
        _refuse_changed(folder, state, tokenizer, source)
        _write(folder, state, tokenizer, source, report)
    report.say(f"{folder} is finished: {_summary(_read(folder / INDEX) or {})}")


def _begin(folder: Path, arguments: dict[str, Any], tokenizer: HubTokenizer, source: Source) -> dict[str, Any]:
    write_atomic(folder / TOKENIZER, tokenizer.raw)
    state = {
        "format": FORMAT,
        "arguments": arguments,
        "source": source.facts,
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "size": tokenizer.size,
            "end_of_text": tokenizer.end_of_text,
        },
        "dtype": token_dtype(tokenizer.size).name,
        "shards": [],
        "cursor": asdict(Cursor()),
    }
    _save_json(folder / PROGRESS, state)
    return state


def _write(folder: Path, state: dict[str, Any], tokenizer: HubTokenizer, source: Source, report: Report) -> None:
    """Shard after shard from where the state says, and the index at the end."""
    arguments, shards = state["arguments"], state["shards"]
    counts = np.load(folder / _counts_name(len(shards))) if len(shards) > 1 else np.zeros(tokenizer.size, np.int64)
    wanted = arguments["tokens"]
    report.start(sum(shard["tokens"] for shard in shards), wanted and wanted + arguments["valid_tokens"])
    with closing(Reader(source, Cursor(**state["cursor"]), tokenizer)) as reader:
        while True:
            number = len(shards)
            if number == 0:
                shard = _Shard(folder, "valid", number, tokenizer)
                shard.fill(reader, arguments["valid_tokens"] + 1, True, report)
            else:
                written = sum(shard["tokens"] for shard in shards[1:])
                room = arguments["shard_tokens"]
                if wanted is not None:
                    room = min(room, wanted - written)
                shard = _Shard(folder, "train", number, tokenizer)
                if room == 0 or not shard.fill(reader, room, False, report):
                    break
                counts = counts + shard.counts
                _save_array(folder / _counts_name(number + 1), counts)
            shards.append(shard.finish())
            state["cursor"] = asdict(reader.cursor)
            _save_json(folder / PROGRESS, state)
            (folder / _counts_name(number)).unlink(missing_ok=True)
    if len(shards) < 2:
        raise ValueError(_all_held_out(shards[0], arguments["valid_tokens"]))
    _save_array(folder / COUNTS, counts)
    parts = {split: [shard for shard in shards if shard["split"] == split] for split in ("train", "valid")}
    totals = {split: _total(part) for split, part in parts.items()}
    _save_json(folder / INDEX, {key: value for key, value in state.items() if key != "cursor"} | totals)
    _clean(folder)


def _all_held_out(shard: dict[str, Any], valid_tokens: int) -> str:
    if shard["documents"] == 0:
        return "the data hold no text: at least two documents are needed, one to train on and one held out"
    if shard["documents"] == 1:
        return "the data are one document: at least two are needed, for whole documents are held out"
    return f"the data have only {shard['tokens']} tokens, and all are held out: lower valid_tokens={valid_tokens}"


class _Shard:
    """One shard being written."""

    def __init__(self, folder: Path, split: str, number: int, tokenizer: HubTokenizer) -> None:
        self.counts = np.zeros(tokenizer.size, dtype=np.int64)
        self._split = split
        self._path = folder / f"{split}_{number:06d}.bin"
        self._partial = folder / f"{self._path.name}{PARTIAL}"
        self._dtype = token_dtype(tokenizer.size)
        self._text = hashlib.blake2b(digest_size=16)
        self._starts: list[int] = []
        self._tokens = 0

    def fill(self, reader: Reader, room: int, whole: bool, report: Report) -> int:
        """Write `room` tokens, or as many as there are; with `check_int`, the document that reaches it is not cut."""
        waiting: list[np.ndarray] = []
        with TokenWriter(self._partial, self._dtype) as writer:
            while self._tokens < room and (piece := reader.take(None if whole else room - self._tokens)) is not None:
                if piece.begins is not None:
                    raw = piece.begins.encode()
                    self._text.update(len(raw).to_bytes(8, "little") + raw)
                    self._starts.append(self._tokens)
                waiting.append(piece.ids)
                self._tokens += len(piece.ids)
                if self._tokens - writer.count >= FLUSH:
                    self._flush(writer, waiting)
                report.add(len(piece.ids), reader.done)
            self._flush(writer, waiting)
        return self._tokens

    def _flush(self, writer: TokenWriter, waiting: list[np.ndarray]) -> None:
        if waiting:
            ids = np.concatenate(waiting)
            writer.write(ids)
            self.counts += np.bincount(ids, minlength=len(self.counts))
            waiting.clear()

    def finish(self) -> dict[str, Any]:
        """Put it in its place; its entry in the index."""
        sync_to_disk(self._partial)
        _save_array(self._path.with_suffix(".documents.npy"), np.array(self._starts, dtype="<u8"))
        os.replace(self._partial, self._path)
        sync_to_disk(self._path.parent)
        return {
            "file": self._path.name,
            "split": self._split,
            "tokens": self._tokens,
            "documents": len(self._starts),
            "text": self._text.hexdigest(),
        }


def _refuse_other(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key), now.get(key)
        if old != new:
            raise ValueError(
                f"{folder} was begun with {key}={_shown(old)}, not with {key}={_shown(new)}: "
                "give the same arguments or another out="
            )


def _refuse_changed(folder: Path, state: dict[str, Any], tokenizer: HubTokenizer, source: Source) -> None:
    if tokenizer.fingerprint != state["tokenizer"]["fingerprint"]:
        raise ValueError(
            f"tokenizer {tokenizer.name} is not what it was when {folder} was begun (hash "
            f"{state['tokenizer']['fingerprint'][:8]}, now {tokenizer.fingerprint[:8]}): give another out="
        )
    for key, old in state["source"].items():
        if source.facts.get(key) != old:
            raise ValueError(
                f"the data are not what they were when {folder} was begun ({key} was {old}, is "
                f"{source.facts.get(key)}): give another out="
            )


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _total(shards: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": sum(shard["tokens"] for shard in shards),
        "documents": sum(shard["documents"] for shard in shards),
        "text": fingerprint([shard["text"] for shard in shards]),
    }


def _summary(index: dict[str, Any]) -> str:
    train, valid = index["train"]["tokens"], index["valid"]["tokens"]
    asked, count = index["arguments"]["tokens"], len(index["shards"])
    fewer = f" (all there are, fewer than the {asked:,} asked for)" if asked is not None and train < asked else ""
    return f"{train:,} tokens to train on{fewer} and {valid:,} held out, in {count} shards"


def _counts_name(shards: int) -> str:
    """Of ids in the train shards among the first so many shards: kept until the next is complete."""
    return f"{COUNTS}.{shards:06d}.npy"


def _clean(folder: Path) -> None:
    """What only an unfinished folder needs."""
    for path in [folder / PROGRESS, *folder.glob(f"*{PARTIAL}"), *folder.glob(f"{COUNTS}.*.npy")]:
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: give another out=") from error
    return value


def _save_json(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(value, indent=1) + "\n").encode())


def _save_array(path: Path, value: np.ndarray) -> None:
    raw = io.BytesIO()
    np.save(raw, value)
    write_atomic(path, raw.getvalue())


@contextmanager
def _full_disk_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(f"the disk of {folder} is full: make room, and the same command goes on") from error
