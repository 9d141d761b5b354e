"""Make TrainingData of a data set of the hub: the parts that are held out, and those that each stream reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from muown_train.config.checks import check_int
from muown_train.data.cache import build_once, fingerprint
from muown_train.data.corpus import SplitWriter, encode_labelled, report_spelt_tokens
from muown_train.data.hub.files import MINIMUM, HubFiles, Unit, open_hub
from muown_train.data.hub.retry import LIMIT, Retry
from muown_train.data.hub.streaming import StreamRows
from muown_train.data.rows import permute
from muown_train.data.sources import (
    FORMAT,
    RunInfo,
    TrainingData,
    describe_tokenizer,
    list_cached_options,
    take_held_out_ids,
)
from muown_train.data.text.holdout import PARTS
from muown_train.data.text.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from muown_train.data.token_file import read_tokens

HELD_OUT = 20_000  # documents if files are split: about 20M tokens of web text
PIECES = 16  # pieces in which a stream reads its row groups, in another order each epoch


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
    end_of_text: str | None = None,
    special_tokens: bool = False,
    bos: bool = False,
    *,
    run: RunInfo,
) -> TrainingData:
    """Return a data set of the hub, streamed: only the held-out tokens and the sizes of row groups are stored.

    With more files than `streams` the last file is held out and the others are dealt out to the streams in an order
    that the seed shuffles. With fewer, parquet files are split: the row groups at the end that hold 20,000 documents
    are held out, or a 20th of all row groups if that is less, and the others are cut into stretches of equal length,
    one for each stream. Files of other formats stay whole, so there are then fewer streams than asked for.

    `run.valid_tokens` says how many of the held-out tokens are used and changes no row of training, with one
    exception: if there is a single file that cannot be split, training skips its first documents, as many as are used.
    For `end_of_text`, `special_tokens` and `bos` see HubTokenizer.
    """
    given = {"streams": streams, "shuffle": shuffle, "retries": retries}
    streams, shuffle, retries = (check_int(f"data.{key}", value, MINIMUM[key]) for key, value in given.items())
    encoder = load_tokenizer(str(tokenizer), end_of_text, special_tokens, bos)
    check_vocabulary(encoder.name, encoder.size, run.vocab_size)
    hub = open_hub(path, name, split, text, revision, Retry(retries), run.progress)
    groups = _list_row_groups(hub, run.cache, streams, run.progress)
    *files, last = (Unit(file) for file in range(len(hub.names)))
    stretches, held = _split_row_groups(groups, streams) if groups else ([[file] for file in files], [last])

    key = fingerprint(
        *(FORMAT, encoder.fingerprint, path, name, split, text, hub.revision, run.valid_tokens, repr(held)),
        *list_cached_options(encoder),
    )
    folder = run.cache / f"hub-{key}"
    index = build_once(
        folder, lambda partial: _write_held_out(partial, hub, held, encoder, run.valid_tokens), run.progress
    )
    valid = take_held_out_ids(read_tokens(folder / "valid.bin"), f"data set {hub.label}", run)
    report_spelt_tokens([index["valid"]], encoder, run.progress)
    if len(valid) <= run.valid_tokens and not stretches:
        raise ValueError(
            f"data set {hub.label} is one part, and all is held out: lower valid_tokens={run.valid_tokens}"
        )
    if not stretches:  # a single file, of which a part is held out
        stretches = [[Unit(0, skip=index["read"])]]

    order = permute(np.arange(len(stretches)), len(stretches), (run.seed,)).tolist()
    count = min(streams, len(order))
    units = [[unit for k in order[number::count] for unit in stretches[k]] for number in range(count)]
    train = StreamRows(hub.read_documents, units, encoder, run.seq_len, shuffle, run.seed, hub.retry.interrupt)
    metadata = {
        "data": path,
        "name": name,
        "split": split,
        "revision": hub.revision,
        "files": len(hub.names),
        "streams": count,
        "shuffle": shuffle,
        **describe_tokenizer(encoder),
        "held_out_content": index["valid"]["text"],
        "held_out_tokens": max(0, len(valid) - 1),
    }
    return TrainingData(train, valid, encoder, metadata, None)


def _list_row_groups(
    hub: HubFiles, cache: Path, streams: int, progress: Callable[[str], None]
) -> list[tuple[int, int, int]] | None:
    """Return (file, number, documents) of each row group, which `cache` keeps, or None if files are not split."""
    if not hub.urls or len(hub.urls) > streams:
        return None
    folder = cache / f"row-groups-{fingerprint(FORMAT, hub.urls)}"
    index = build_once(folder, lambda partial: {"documents": hub.read_row_group_sizes()}, progress)
    sizes = index["documents"]
    groups = [(file, k, size) for file, row in enumerate(sizes) for k, size in enumerate(row) if size]
    return groups if len(groups) > 1 else None


def _split_row_groups(groups: Sequence[tuple[int, int, int]], streams: int) -> tuple[list[list[Unit]], list[Unit]]:
    """Return stretches of units to train on, one for each stream, and the held-out units.

    Both depend on the data set and the number of streams alone.
    """
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
        pieces.append(
            [unit for k in range(begin, end, length) for unit in _make_units(train[k : min(k + length, end)])]
        )
    return pieces, _make_units([group[:2] for group in groups[-held:]])


def _make_units(groups: Sequence[tuple[int, int]]) -> list[Unit]:
    """Return one unit for each file that consecutive row groups, between which there may be empty ones, lie in."""
    numbers = [(file, [k for _, k in own]) for file, own in groupby(groups, key=lambda group: group[0])]
    return [Unit(file, own[0], own[-1] + 1) for file, own in numbers]


def _write_held_out(
    folder: Path, hub: HubFiles, units: Sequence[Unit], tokenizer: Tokenizer, valid_tokens: int
) -> dict[str, Any]:
    writer = SplitWriter(folder / "valid.bin", tokenizer)
    pairs = ((document, number) for unit in units for number, document in enumerate(hub.read_documents(unit, 0), 1))
    left, read = valid_tokens + 1, 0
    for document, number, ids in encode_labelled(pairs, tokenizer):
        writer.write(document, ids)
        left, read = left - len(ids), number
        if left <= 0:
            break
    return {"valid": writer.close(), "read": read}  # `read`: rows of the last unit that were read
