"""A data set of the hub as TrainingData: which parts are held out, and which of the rest each stream reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from muown_train.config.checks import check_int
from muown_train.data.cache import fingerprint, prepared
from muown_train.data.corpus import Part, with_ids
from muown_train.data.hub.files import LEAST, HubFiles, Unit, open_hub
from muown_train.data.hub.retry import LIMIT, Retry
from muown_train.data.hub.streaming import StreamRows
from muown_train.data.permutation import permute
from muown_train.data.sources import FORMAT, RunInfo, TrainingData, held_out_ids, tokenizer_facts
from muown_train.data.text.holdout import PARTS
from muown_train.data.text.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from muown_train.data.token_file import read_tokens

HELD_OUT = 20_000  # documents, where files are split: 20M tokens or so of web text
PIECES = 16  # a stream of row groups reads them in so many pieces, in an order of each epoch's own


def hub_stream(
    path: str,
    tokenizer: str,
    name: str | None = None,
    split: str = "train",
    text: str = "text",
    revision: str = "main",
    streams: int = 64,
    shuffle: int = 128,
    retries: int = LIMIT,
    *,
    run: RunInfo,
) -> TrainingData:
    """A data set of the hub, streamed: nothing but the held-out tokens (and the sizes of row groups) is stored.

    With more files than `streams` the last file is held out and the others are dealt out to the streams in an
    order that the seed shuffles. With fewer, parquet files are split: the row groups at the end that hold
    20,000 documents are held out, or a 20th of them if that is less, and the others are cut into stretches of
    equal length, one a stream. Files of other formats stay whole, so there are fewer streams than asked for.

    `valid_tokens` says how many of the held-out tokens are used and changes no row of training, but where
    there is a single file that cannot be split: training skips its first documents, as many as are used.
    """
    given = {"streams": streams, "shuffle": shuffle, "retries": retries}
    streams, shuffle, retries = (check_int(f"data.{key}", value, LEAST[key]) for key, value in given.items())
    encoder = load_tokenizer(str(tokenizer))
    check_vocabulary(encoder.name, encoder.size, run.vocab_size)
    hub = open_hub(path, name, split, text, revision, Retry(retries), run.progress)
    groups = _row_groups(hub, run.cache, streams, run.progress)
    stretches, held = _split(groups, streams) if groups else _whole_files(len(hub.names), streams)

    key = fingerprint(FORMAT, encoder.fingerprint, path, name, split, text, hub.revision, run.valid_tokens, repr(held))
    folder = run.cache / f"hub-{key}"
    index = prepared(
        folder, lambda partial: _write_held_out(partial, hub, held, encoder, run.valid_tokens), run.progress
    )
    valid = held_out_ids(read_tokens(folder / "valid.bin"), run.valid_tokens)
    if len(valid) <= run.valid_tokens:
        run.progress(
            f"data set {hub.label}: {len(valid) - 1} tokens are held out, fewer than valid_tokens={run.valid_tokens}"
        )
    if not stretches and len(valid) <= run.valid_tokens:
        raise ValueError(
            f"data set {hub.label} is one part, and all is held out: lower valid_tokens={run.valid_tokens}"
        )
    if not stretches:
        stretches = [[Unit(0, skip=index["read"])]]

    order = permute(np.arange(len(stretches)), len(stretches), (run.seed,)).tolist()
    count = min(streams, len(order))
    units = [[unit for k in order[number::count] for unit in stretches[k]] for number in range(count)]
    train = StreamRows(hub.documents, units, encoder, run.seq_len, shuffle, run.seed, hub.retry.interrupt)
    facts = {
        "data": path,
        "name": name,
        "split": split,
        "revision": hub.revision,
        "files": len(hub.names),
        "streams": count,
        "shuffle": shuffle,
        **tokenizer_facts(encoder),
        "held_out_content": index["valid"]["text"],
        "held_out_tokens": max(0, len(valid) - 1),
    }
    return TrainingData(train, valid, encoder, facts, None)


def _row_groups(
    hub: HubFiles, cache: Path, streams: int, progress: Callable[[str], None]
) -> list[tuple[int, int, int]] | None:
    """(file, number, documents) of each row group where the files are to be split, kept in `cache`."""
    if not hub.urls or len(hub.urls) > streams:
        return None
    folder = cache / f"row-groups-{fingerprint(FORMAT, hub.urls)}"
    index = prepared(folder, lambda partial: {"documents": hub.row_groups()}, progress)
    sizes = index["documents"]
    groups = [(file, k, size) for file, row in enumerate(sizes) for k, size in enumerate(row) if size]
    return groups if len(groups) > 1 else None


def _split(groups: Sequence[tuple[int, int, int]], streams: int) -> tuple[list[list[Unit]], list[Unit]]:
    """Stretches of units to train on, one a stream, and the held-out units; of the data set alone."""
    held, documents = 0, 0
    while documents < HELD_OUT and held < max(1, len(groups) // PARTS):
        held += 1
        documents += groups[-held][2]
    train = [group[:2] for group in groups[:-held]]
    count = min(streams, len(train))
    bounds = [len(train) * k // count for k in range(count + 1)]
    pieces = []
    for begin, end in pairwise(bounds):
        length = -(-(end - begin) // PIECES)
        pieces.append([unit for k in range(begin, end, length) for unit in _units(train[k : min(k + length, end)])])
    return pieces, _units([group[:2] for group in groups[-held:]])


def _units(groups: Sequence[tuple[int, int]]) -> list[Unit]:
    """Of consecutive row groups one unit a file (between them there may be empty ones)."""
    numbers = [(file, [k for _, k in own]) for file, own in groupby(groups, key=lambda group: group[0])]
    return [Unit(file, own[0], own[-1] + 1) for file, own in numbers]


def _whole_files(files: int, streams: int) -> tuple[list[list[Unit]], list[Unit]]:
    """Each file but the last to train on; nothing where there is but one, which is held out in part."""
    return [[Unit(file)] for file in range(files - 1)], [Unit(files - 1)]


def _write_held_out(
    folder: Path, hub: HubFiles, units: Sequence[Unit], tokenizer: Tokenizer, valid_tokens: int
) -> dict[str, Any]:
    part = Part(folder / "valid.bin", tokenizer)
    pairs = ((document, number) for unit in units for number, document in enumerate(hub.documents(unit, 0), 1))
    left, read = valid_tokens + 1, 0
    for document, number, ids in with_ids(pairs, tokenizer):
        part.write(document, ids)
        left, read = left - len(ids), number
        if left <= 0:
            break
    return {"valid": part.close(), "read": read}  # rows of the last unit that was read
