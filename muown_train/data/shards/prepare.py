"""Documents -> token shards on disk (muown-train prepare), in a folder that dataset.py reads.

The first documents of the source, whole ones, are held out; training begins with the next. Each shard is written
beside its place, synced and renamed, and then `progress.json` says where in the source the next one begins. So a
preparation that is interrupted at any moment resumes with the shard that was not complete, and ends with the same
bytes. Before there is a shard to train on, the folder is begun anew, so it then takes other settings.
Beside each shard `NAME.documents.npy` (uint64) says where in it documents begin; a document that is cut begins only in
the first of its shards. `NAME.checksums.npy` holds checksums (checked.py).
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from muown_train.config.checks import check_choice, check_int
from muown_train.data.cache import fingerprint
from muown_train.data.corpus import SplitWriter, report_spelt_tokens
from muown_train.data.hub.files import MINIMUM
from muown_train.data.shards.checked import compute_checksums, get_checksums_path, hash_checksums
from muown_train.data.shards.dataset import COUNTS, FORMAT, INDEX, MAX_INDEX, PROGRESS
from muown_train.data.shards.reader import OPENERS, DocumentSource, Position, TokenReader
from muown_train.data.sources import ON_BAD_FILE
from muown_train.data.text.tokenizer import TOKENIZER, HubTokenizer, choose_dtype, load_tokenizer, select_options
from muown_train.data.token_file import read_tokens
from muown_train.runtime.atomic_files import PARTIAL, parse_json, read_regular, sync_to_disk, write_atomic
from muown_train.runtime.formatting import format_setting
from muown_train.runtime.progress import Progress, StatusLine

# settings that earlier versions did not have, with their defaults, which a folder's arguments do not mention
LATER_SETTINGS = {"end_of_text": None, "special_tokens": False, "bos": False, "on_bad_file": "error"}


def prepare_shards(
    folder: Path,
    data: str,
    settings: Mapping[str, Any],
    tokens: int | None = None,
    valid_tokens: int = 4_000_000,
    shard_tokens: int = 100_000_000,
) -> None:
    """Write shards to `folder`, or continue those that are there.

    Args:
        data: the name of the function that a data configuration has as its target, `files` or `hub_stream`.
        settings: the arguments of that function.
        tokens: tokens to train on; None means all.
        valid_tokens: whole documents of at least valid_tokens + 1 tokens are held out.
        shard_tokens: tokens in each shard to train on.

    Raises:
        ValueError: the settings are wrong, differ from those that the folder was begun with, or the data changed.
        OSError: the disk is full.
    """
    from filelock import FileLock, Timeout

    limits = {"tokens": tokens, "valid_tokens": valid_tokens, "shard_tokens": shard_tokens}
    for key, value in limits.items():
        if value is not None or key != "tokens":
            limits[key] = check_int(key, value, 1)
    _check(data, settings)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out={folder} is a file: give a folder")
    data_settings = {
        f"data.{key}": value
        for key, value in settings.items()
        if key not in MINIMUM and not (key in LATER_SETTINGS and value == LATER_SETTINGS[key])
    }
    arguments = json.loads(json.dumps({"kind of data": data, **data_settings, **limits}))
    with _explain_full_disk(folder), StatusLine(every=5.0, first=2.0) as line:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / ".lock", timeout=0):
                _prepare(folder, arguments, data, settings, line)
        except Timeout as error:
            raise ValueError(f"another process is preparing {folder}: wait for it or give another out=") from error


def _check(data: str, settings: Mapping[str, Any]) -> None:
    if data not in OPENERS:
        raise ValueError(f"data with the target {data} cannot be prepared; {', '.join(OPENERS)} can")
    for key in MINIMUM.keys() & settings.keys():
        check_int(f"data.{key}", settings[key], MINIMUM[key])
    if not settings.get("tokenizer"):
        raise ValueError(
            "data.tokenizer is not set: give the path of a tokenizer.json, which `muown-train tokenizer` makes of "
            "texts, or a hub name"
        )
    check_choice("data.on_bad_file", settings.get("on_bad_file", "error"), ON_BAD_FILE)


def _prepare(folder: Path, arguments: dict[str, Any], data: str, settings: Mapping[str, Any], line: StatusLine) -> None:
    index, state = _read(folder / INDEX), _read(folder / PROGRESS)
    known = index or state
    if known is None and (shards := sorted(path.name for path in folder.glob("*.bin"))):
        raise ValueError(f"{folder} holds {shards[0]} of other data: give an empty folder as out=")
    if known is not None and len(known["shards"]) > 1:
        _refuse_other_arguments(folder, known["arguments"], arguments)
    else:
        state = None
    if index is not None:
        _remove_leftovers(folder)
        line.print(f"{folder} is finished: {_summarize(index)}")
        return

    name = str(settings["tokenizer"])
    tokenizer = load_tokenizer(name, **select_options(settings))
    source = OPENERS[data](settings, state["source"] if state else None, line.print)
    with closing(source):
        if state is None:
            state = _begin(folder, arguments, tokenizer, source)
        _refuse_changed_data(folder, state, tokenizer, source)
        _write_all(folder, state, tokenizer, source, line)
    index = _read(folder / INDEX) or {}
    report_spelt_tokens(index["shards"], tokenizer, line.print)
    line.print(f"{folder} is finished: {_summarize(index)}")


def _begin(folder: Path, arguments: dict[str, Any], tokenizer: HubTokenizer, source: DocumentSource) -> dict[str, Any]:
    write_atomic(folder / TOKENIZER, tokenizer.raw)
    state = {
        "format": FORMAT,
        "arguments": arguments,
        "source": source.metadata,
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "size": tokenizer.size,
            "end_of_text": tokenizer.end_of_text,
            **({"options": tokenizer.options} if tokenizer.options else {}),
        },
        "dtype": choose_dtype(tokenizer.size).name,
        "shards": [],
        "cursor": asdict(Position()),
    }
    _save_json(folder / PROGRESS, state)
    return state


def _write_all(
    folder: Path, state: dict[str, Any], tokenizer: HubTokenizer, source: DocumentSource, line: StatusLine
) -> None:
    """Write shard after shard from where the state says, and the index at the end."""
    arguments, shards = state["arguments"], state["shards"]
    counts = np.load(folder / _get_counts_name(len(shards))) if len(shards) > 1 else np.zeros(tokenizer.size, np.int64)
    wanted = arguments["tokens"]
    tally = _Tally(line, sum(shard["tokens"] for shard in shards), wanted and wanted + arguments["valid_tokens"])
    with closing(TokenReader(source, Position(**state["cursor"]), tokenizer)) as reader:
        while True:
            number = len(shards)
            if number == 0:
                shard = _Shard(folder, "valid", number, tokenizer)
                shard.fill(reader, arguments["valid_tokens"] + 1, True, tally)
            else:
                written = sum(shard["tokens"] for shard in shards[1:])
                room = arguments["shard_tokens"]
                if wanted is not None:
                    room = min(room, wanted - written)
                shard = _Shard(folder, "train", number, tokenizer)
                if not shard.fill(reader, room, False, tally):
                    break
                counts = counts + shard.writer.counts
                _save_array(folder / _get_counts_name(number + 1), counts)
            shards.append(shard.finish())
            state["cursor"] = asdict(reader.position)
            _save_json(folder / PROGRESS, state)
            (folder / _get_counts_name(number)).unlink(missing_ok=True)
    if len(shards) < 2:
        raise ValueError(_explain_no_training_data(shards[0], arguments["valid_tokens"]))
    _save_array(folder / COUNTS, counts)
    parts = {split: [shard for shard in shards if shard["split"] == split] for split in ("train", "valid")}
    totals = {split: _sum_up(part) for split, part in parts.items()}
    _save_json(folder / INDEX, {key: value for key, value in state.items() if key != "cursor"} | totals)
    _remove_leftovers(folder)


def _explain_no_training_data(shard: dict[str, Any], valid_tokens: int) -> str:
    if shard["documents"] == 0:
        return "the data hold no text: at least two documents are needed, one to train on and one held out"
    if shard["documents"] == 1:
        return "the data are one document: at least two are needed, for whole documents are held out"
    return f"the data have only {shard['tokens']} tokens, and all are held out: lower valid_tokens={valid_tokens}"


class _Tally:
    """Counts the tokens of all shards, and estimates their total each time that a file of the source is read."""

    def __init__(self, line: StatusLine, tokens: int, total: int | None) -> None:
        if tokens:
            line.print(f"going on after {tokens:,} tokens")
        self._progress = Progress(line, total=total, done=tokens)
        self._tokens = tokens
        self._fraction_read: float | None = None  # the fraction at the last call
        self._expected_total: float | None = None

    def add(self, tokens: int, fraction_read: float) -> None:
        if fraction_read != self._fraction_read:
            if self._fraction_read is not None:
                self._expected_total = self._tokens / fraction_read
            self._fraction_read = fraction_read
        self._tokens += tokens
        self._progress.update(self._tokens, self._expected_total)


class _Shard:
    """A shard that is being written."""

    def __init__(self, folder: Path, split: str, number: int, tokenizer: HubTokenizer) -> None:
        self._split = split
        self._path = folder / f"{split}_{number:06d}.bin"
        self._partial = folder / f"{self._path.name}{PARTIAL}"
        self._starts: list[int] = []
        self.writer = SplitWriter(self._partial, tokenizer)

    def fill(self, reader: TokenReader, room: int, whole: bool, tally: _Tally) -> int:
        """Write `room` tokens, or as many as there are, and return their number.

        Args:
            whole: whether to write all of the document that reaches `room`.
        """
        writer = self.writer
        while writer.tokens < room and (piece := reader.take(None if whole else room - writer.tokens)) is not None:
            if piece.text is not None:
                self._starts.append(writer.tokens)
            writer.write(piece.text, piece.ids)
            tally.add(len(piece.ids), reader.fraction_read)
        return writer.tokens

    def finish(self) -> dict[str, Any]:
        """Put the shard in its place and return its entry in the index."""
        entry = {"file": self._path.name, "split": self._split, **self.writer.close()}
        sync_to_disk(self._partial)
        checksums = get_checksums_path(self._path)
        _save_array(checksums, compute_checksums(read_tokens(self._partial)))
        entry["checksums"] = hash_checksums(checksums.read_bytes())
        _save_array(self._path.with_suffix(".documents.npy"), np.array(self._starts, dtype="<u8"))
        os.replace(self._partial, self._path)
        sync_to_disk(self._path.parent)
        return entry


def _refuse_other_arguments(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    defaults = {f"data.{key}": value for key, value in LATER_SETTINGS.items()}
    for key in before | now:
        old, new = (arguments.get(key, defaults.get(key)) for arguments in (before, now))
        if old != new:
            raise ValueError(
                f"{folder} was begun with {key}={format_setting(old)}, not with {key}={format_setting(new)}: "
                "give the same arguments or another out="
            )


def _refuse_changed_data(folder: Path, state: dict[str, Any], tokenizer: HubTokenizer, source: DocumentSource) -> None:
    if tokenizer.fingerprint != state["tokenizer"]["fingerprint"]:  # its options are among the arguments
        raise ValueError(
            f"tokenizer {tokenizer.name} is not what it was when {folder} was begun (hash "
            f"{state['tokenizer']['fingerprint'][:8]}, now {tokenizer.fingerprint[:8]}): give another out="
        )
    for key, old in state["source"].items():
        if source.metadata.get(key) != old:
            raise ValueError(
                f"the data are not what they were when {folder} was begun ({key} was {old}, is "
                f"{source.metadata.get(key)}): give another out="
            )


def _sum_up(shards: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": sum(shard["tokens"] for shard in shards),
        "documents": sum(shard["documents"] for shard in shards),
        "text": fingerprint([shard["text"] for shard in shards]),
    }


def _summarize(index: dict[str, Any]) -> str:
    train, valid = index["train"]["tokens"], index["valid"]["tokens"]
    asked, count = index["arguments"]["tokens"], len(index["shards"])
    fewer = f" (all there are, fewer than the {asked:,} asked for)" if asked is not None and train < asked else ""
    return f"{train:,} tokens to train on{fewer} and {valid:,} held out, in {count} shards"


def _get_counts_name(shards: int) -> str:
    """Return the file of counts of ids in the first `shards` shards, kept until the next shard is complete."""
    return f"{COUNTS}.{shards:06d}.npy"


def _remove_leftovers(folder: Path) -> None:
    """Remove the files that only an unfinished folder needs."""
    for path in [folder / PROGRESS, *folder.glob(f"*{PARTIAL}"), *folder.glob(f"{COUNTS}.*.npy")]:
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = parse_json(read_regular(path, MAX_INDEX, follow_link=True))
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
def _explain_full_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(f"the disk of {folder} is full: make room, and the same command goes on") from error
