"""Prepared token shards as TrainingData: those that prepare.py writes, and those of modded-nanogpt as they are.

A folder holds `.bin` files (token_file.py) to train on and held out. prepare.py adds `index.json`, the tokenizer and
the count of each id in training. modded-nanogpt has no index: there the names of files tell which are to train on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from muown_train.config.stored_files import COUNT, MAPPING, TEXT, Kind, check_entries, list_of
from muown_train.data.cache import build_once, fingerprint, fingerprint_files
from muown_train.data.corpus import compute_unigram_loss, report_spelt_tokens
from muown_train.data.shards.checked import REMEDY, Shard, ShardRows
from muown_train.data.sources import RunInfo, TrainingData, describe_tokenizer, take_held_out_ids
from muown_train.data.text.tokenizer import (
    TOKENIZER,
    HubTokenizer,
    check_vocabulary,
    choose_dtype,
    load_tokenizer,
    select_options,
)
from muown_train.data.token_file import HEADER_BYTES, read_tokens
from muown_train.runtime.atomic_files import open_regular, parse_json, read_regular
from muown_train.runtime.formatting import format_setting
from muown_train.runtime.progress import Progress, StatusLine

FORMAT = 1  # version of index.json
INDEX, PROGRESS, COUNTS = "index.json", "progress.json", "train_counts.npy"
MAX_INDEX = 1 << 30  # bytes of index.json
_INDEX: dict[str, Kind] = {"tokenizer|train|valid": MAPPING, "shards": list_of(MAPPING)}
_TOKENIZER: dict[str, Kind] = {"name|fingerprint": TEXT, "size": COUNT, "options": MAPPING}
_SHARD: dict[str, Kind] = {"file|split|text|checksums": TEXT, "tokens|documents": COUNT, "spelt": MAPPING}
AT_ONCE = 1 << 24  # ids of a shard that are read together to find the largest
ENDS = 1 << 16  # bytes at both ends of a shard that identify it if there is no index


def shards(
    path: str | None = None,
    tokenizer: str | None = None,
    end_of_text: str | None = None,
    special_tokens: bool = False,
    bos: bool = False,
    *,
    run: RunInfo,
) -> TrainingData:
    """Return the shards in the folder `path`, through memory maps.

    Shards without an index are read through at their first use, since any of their ids may be beyond the tokenizer;
    the cache keeps the largest.

    Args:
        end_of_text, special_tokens: see HubTokenizer; prepare.py keeps them in the index.
        bos: whether the documents in the shards begin with end-of-text; this must be what the index says.

    Raises:
        ValueError: a shard is missing, truncated, of another version or dtype, not in the index or beyond the
            tokenizer; or the tokenizer is not that of the shards, or larger than `run.vocab_size`. The message names
            it.
    """
    if not path:
        raise ValueError(
            "data.path is not set: give a folder of shards that `muown-train prepare` wrote, or for fineweb10B "
            "modded-nanogpt's data/cached_fineweb10B.py"
        )
    folder = Path(path).expanduser()
    if not folder.is_dir():
        problem = "a file" if folder.exists() else "not there"
        raise ValueError(f"data.path={path} is {problem}: give the folder that `muown-train prepare` wrote to")
    index = _read_index(folder)
    names = _list_shards(folder, index)
    options = {"bos": bos} | select_options({"end_of_text": end_of_text, "special_tokens": special_tokens})
    encoder = _load_tokenizer(folder, index, tokenizer, options)
    check_vocabulary(encoder.name, encoder.size, run.vocab_size)
    train = _open_shards(folder, names["train"], index, encoder, random_access=True)
    held_out = _open_shards(folder, names["valid"], index, encoder)
    if index is None:
        _check_all_ids([*train, *held_out], encoder, run)
    else:
        report_spelt_tokens(index["shards"], encoder, run.progress)

    valid = take_held_out_ids(_take_first(held_out, run.valid_tokens + 1), str(folder), run)
    metadata = {
        "data": "shards",
        "content": _identify_content(folder, names, index),
        **describe_tokenizer(encoder),
        "shards": len(names["train"]),
        "tokens": sum(len(shard.tokens) for shard in train),
        "held_out_tokens": len(valid) - 1,
    }
    loss = None
    if index is not None:
        metadata["source"] = index["source"]
        metadata["documents"] = index["train"]["documents"]
        loss = compute_unigram_loss(_read_counts(folder, encoder.size, metadata["tokens"]), valid[1:])
    return TrainingData(ShardRows(train, run.seq_len, run.seed), valid, encoder, metadata, loss)


def check_shards(folder: Path) -> str:
    """Read all shards of a folder that prepare.py wrote, and return a sentence that says what was checked.

    Raises:
        ValueError: shards are damaged, or it is another folder; the message names all of them.
    """
    index = _read_index(folder)
    if index is None:
        raise ValueError(f"{folder} has no {INDEX}: give a folder that `muown-train prepare` wrote")
    names = [name for split in _list_shards(folder, index).values() for name in split]
    encoder = _load_tokenizer(folder, index, None, {})
    faults, done, unchecked = [], 0, 0
    with StatusLine(every=5.0, first=2.0) as line:
        progress = Progress(line, total=index["train"]["tokens"] + index["valid"]["tokens"], label="checking")
        for name in names:
            try:
                (part,) = _open_shards(folder, [name], index, encoder)
                for k in range(0, len(part.tokens), AT_ONCE):
                    done += len(part.read(k, k + AT_ONCE))
                    progress.update(done)
                unchecked += part.checksums is None
            except ValueError as error:
                faults.append(str(error))
    if faults:
        raise ValueError("; ".join(faults))
    without = f"; {unchecked} of them have no checksums, so only their sizes and ids were checked" if unchecked else ""
    return f"{folder}: {len(names)} shards with {done:,} tokens are as they were written{without}"


def _read_index(folder: Path) -> dict[str, Any] | None:
    """Return the index, or None if there is none."""
    path = folder / INDEX
    if not path.exists():
        if (folder / PROGRESS).exists():
            raise ValueError(f"{folder} is not finished: run the `muown-train prepare` command that began it again")
        return None
    try:
        index = check_entries(parse_json(read_regular(path, MAX_INDEX, follow_link=True)), {})
        version = index["format"]
        if version == FORMAT:
            check_entries(index, _INDEX)
            _ = [index["source"], index["tokenizer"]["fingerprint"]]
            check_entries(index["tokenizer"], _TOKENIZER)
            for part, keys in [
                *((index[split], ("text", "tokens")) for split in ("train", "valid")),
                *((shard, ("file", "split", "tokens")) for shard in index["shards"]),
            ]:
                check_entries(part, _SHARD)
                _ = [part[key] for key in keys]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {REMEDY}") from error
    if version != FORMAT:
        raise ValueError(f"{path} is of format {version}; format {FORMAT} is read")
    return index


def _list_shards(folder: Path, index: dict[str, Any] | None) -> dict[str, list[str]]:
    """Return the names of the shards to train on and held out, in order."""
    present = sorted(path.name for path in folder.glob("*.bin"))
    if index is not None:
        listed = [shard["file"] for shard in index["shards"]]
        for name in present:
            if name not in listed:
                raise ValueError(f"{folder / name} is missing from {folder / INDEX}: it belongs to other data")
        for name in listed:
            if name not in present:
                raise ValueError(f"{folder / name} does not exist, but {INDEX} lists it: {REMEDY}")
        return {
            split: [shard["file"] for shard in index["shards"] if shard["split"] == split]
            for split in ("train", "valid")
        }
    names = {
        "train": [name for name in present if "train" in name],
        "valid": [name for name in present if "val" in name],
    }
    for split, own in names.items():
        if not own:
            pattern = {"train": "*train*.bin", "valid": "*val*.bin"}[split]
            raise ValueError(f"data.path={folder} has neither an {INDEX} nor files {pattern}")
    both = sorted(set(names["train"]) & set(names["valid"]))
    if both:
        raise ValueError(f"{folder / both[0]} could be to train on or held out: its name has both train and val")
    return names


def _load_tokenizer(
    folder: Path, index: dict[str, Any] | None, given: str | None, options: dict[str, Any]
) -> HubTokenizer:
    if index is None:
        if not given and (folder / TOKENIZER).exists():
            raise ValueError(f"{folder / INDEX} is missing, which is written together with {TOKENIZER}: {REMEDY}")
        if not given:
            raise ValueError(f"{folder} does not say which tokenizer made it: give data.tokenizer, such as gpt2")
        if options.get("bos"):
            raise ValueError(
                f"{folder} has no {INDEX}, which says whether documents begin with end-of-text as data.bos=true asks: "
                "give data.bos=false to take the shards as they are, or shards that `muown-train prepare` wrote"
            )
        return load_tokenizer(str(given), **options)
    recorded = index["tokenizer"]
    made_with = {"special_tokens": False, "bos": False} | recorded.get("options", {})
    for key, value in options.items():
        if value != made_with.get(key):
            raise ValueError(
                f"the shards in {folder} were made with data.{key}={format_setting(made_with.get(key))}, "
                f"not {format_setting(value)}: give the setting that they were made with, or other shards"
            )
    if given:
        encoder = load_tokenizer(str(given), **made_with)
    else:
        try:
            raw = read_regular(folder / TOKENIZER, follow_link=True)
        except OSError as error:
            raise ValueError(
                f"{folder / TOKENIZER} cannot be read ({error.strerror}): copy it again, or give data.tokenizer"
            ) from error
        encoder = HubTokenizer(recorded["name"], raw, **made_with)
    if encoder.fingerprint != recorded["fingerprint"]:
        source = f"data.tokenizer={given}" if given else f"{folder / TOKENIZER}"
        raise ValueError(
            f"the shards in {folder} were made by tokenizer {recorded['name']} of {recorded['size']} entries (hash "
            f"{recorded['fingerprint'][:8]}), not by {source} of {encoder.size} entries (hash "
            f"{encoder.fingerprint[:8]})"
        )
    return encoder


def _open_shards(
    folder: Path, names: Sequence[str], index: dict[str, Any] | None, encoder: HubTokenizer, random_access: bool = False
) -> list[Shard]:
    """Return the shards, whose sizes are checked against index and tokenizer without reading them through."""
    entries = {shard["file"]: shard for shard in index["shards"]} if index else {}
    expected = choose_dtype(encoder.size)
    opened: list[Shard] = []
    for name in names:
        path = folder / name
        try:
            tokens = read_tokens(path, random_access)
        except ValueError as error:
            raise ValueError(f"{error}: {REMEDY}") from error
        if tokens.dtype != expected:
            raise ValueError(
                f"{path} holds {tokens.dtype}, but tokenizer {encoder.name} of {encoder.size} entries takes {expected}"
            )
        entry = entries.get(name, {})
        if index is not None and len(tokens) != entry["tokens"]:
            raise ValueError(f"{path} has {len(tokens)} tokens, but {INDEX} says {entry['tokens']}: {REMEDY}")
        opened.append(Shard(path, tokens, encoder.size, entry.get("checksums")))
    return opened


def _check_all_ids(parts: Sequence[Shard], encoder: HubTokenizer, run: RunInfo) -> None:
    """Check that the tokenizer has all ids of the shards, by the largest of each, which the cache keeps."""
    paths = [part.path for part in parts]
    if encoder.size >= 2 ** (8 * parts[0].tokens.itemsize):
        return  # no id of this dtype is larger
    folder = run.cache / f"largest-ids-{fingerprint(FORMAT, fingerprint_files(paths))}"
    try:
        largest = build_once(folder, lambda partial: {"largest": _find_largest_ids(paths)}, run.progress)["largest"]
    except OSError as error:  # shards need no cache but for this
        run.progress(f"{error}; until then the ids are checked at each start")
        largest = _find_largest_ids(paths)
    for path, i in zip(paths, largest, strict=True):
        if i >= encoder.size:
            raise ValueError(
                f"{path} holds id {i}, but tokenizer {encoder.name} has only {encoder.size} entries: "
                "it was made by another one, or is damaged"
            )


def _find_largest_ids(paths: Sequence[Path]) -> list[int]:
    """Return the largest id of each token file."""
    maps = [read_tokens(path) for path in paths]
    largest, done = [], 0
    with StatusLine(every=5.0, first=2.0) as line:
        progress = Progress(line, total=sum(map(len, maps)), label="checking ids")
        for tokens in maps:
            found = 0
            for k in range(0, len(tokens), AT_ONCE):
                found = max(found, int(tokens[k : k + AT_ONCE].max()))
                progress.update(done + k)
            largest.append(found)
            done += len(tokens)
    return largest


def _take_first(parts: Sequence[Shard], count: int) -> np.ndarray:
    """Return the first `count` ids of the concatenation, as a view if they lie in one part."""
    taken: list[np.ndarray] = []
    for part in parts:
        taken.append(part.read(0, count))
        count -= len(taken[-1])
        if count <= 0:
            break
    return taken[0] if len(taken) == 1 else np.concatenate(taken)


def _read_counts(folder: Path, size: int, tokens: int) -> np.ndarray:
    """Return the count of each id among the `tokens` ids to train on, (V,) int64."""
    path = folder / COUNTS
    try:
        with open_regular(path, follow_link=True) as file:
            counts: np.ndarray = np.load(file)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}): {REMEDY}") from error
    if counts.shape != (size,):
        raise ValueError(f"{path} counts {counts.size} ids, but the tokenizer has {size}")
    if counts.min() < 0 or counts.sum() != tokens:
        raise ValueError(f"{path} is damaged, since it does not count {tokens:,} ids: {REMEDY}")
    return counts


def _identify_content(folder: Path, names: dict[str, list[str]], index: dict[str, Any] | None) -> str:
    """Return a fingerprint of the tokens.

    Without an index it is made of the ends of each file, since reading all would take minutes.
    """
    if index is not None:
        parts = [[index[split]["text"], index[split]["tokens"]] for split in ("train", "valid")]
        options = [given] if (given := index["tokenizer"].get("options")) else []
        return fingerprint("shards", index["tokenizer"]["fingerprint"], parts, *options)
    return fingerprint(
        "shards", [[name, _hash_ends(folder / name)] for split in ("train", "valid") for name in names[split]]
    )


def _hash_ends(path: Path) -> str:
    with open_regular(path, follow_link=True) as file:
        size = file.seek(0, 2)
        file.seek(0)
        digest = hashlib.blake2b(file.read(HEADER_BYTES + ENDS), digest_size=8)
        file.seek(max(0, size - ENDS))
        digest.update(file.read(ENDS))
    return f"{size}-{digest.hexdigest()}"
