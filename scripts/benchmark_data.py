"""Measure the speed of the data: `python scripts/benchmark_data.py --tokenizer FILE_OR_NAME --files GLOB`.

A Markdown table is printed. Tokenizing and reading prepared rows use one thread and are counted per second of processor
time, so that other programs do not count; streaming is counted per second of the clock. In every round each contender
of a section has its turn, in an order that rotates. The table has medians, and medians of each round's ratio to the
section's first contender.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from muown_train.cli.errors import CommandParser, parse_count
from muown_train.cli.process import run_script
from muown_train.data.hub.streaming import StreamRows
from muown_train.data.rows import RowSource, TokenRows
from muown_train.data.text.documents import expand_globs, read_documents
from muown_train.data.text.tokenizer import Tokenizer, encode_documents, load_tokenizer
from muown_train.data.token_file import TokenWriter, read_tokens
from muown_train.data.workers import AHEAD, add_workers

SEQ_LEN = 1024
ROWS = 64  # rows of a batch
STREAMS = 16
CHARACTERS = 20_000_000  # characters of the texts that are used
ROUNDS = 7

READ_AHEAD = (AHEAD + 3) * STREAMS * SEQ_LEN  # tokens that all workers together read ahead


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, gpt2.tiktoken or a hub name")
    parser.add_argument("--files", required=True, nargs="+", help="globs of .txt, .jsonl, .parquet")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of a contender in a round (default 1)")
    parser.add_argument(
        "--tokens",
        type=parse_count(ROWS * (SEQ_LEN + 1), 10**10),
        default=100_000_000,
        help="tokens of the file of prepared rows",
    )
    arguments = parser.parse_args()
    if not 0 < arguments.seconds <= 3600:
        parser.error(f"--seconds {arguments.seconds:g} must be above 0 and at most 3600")
    # the libraries read these variables when they are first used
    os.environ.update({"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"})
    cores = os.sched_getaffinity(0)
    try:
        tokenizer = load_tokenizer(arguments.tokenizer)
        texts = read_some_texts(expand_globs(arguments.files, "--files"))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if len(texts) < STREAMS:
        parser.error(f"--files have {len(texts)} documents: give {STREAMS} or more, one for each stream")

    print(f"{len(cores)} cores; tokenizer {tokenizer.name}, by {tokenizer.backend}; rows of {SEQ_LEN} tokens\n")
    print("| | tokens/s | ratio |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        os.sched_setaffinity(0, {min(cores)})  # encoding takes as many threads as there are cores
        compare(make_tokenizing(tokenizer, texts), arguments.seconds, time.process_time)
        compare(make_reading(Path(folder), arguments.tokens), arguments.seconds, time.process_time)
        os.sched_setaffinity(0, cores)
        compare(make_streaming(Path(folder), texts, tokenizer), arguments.seconds, time.perf_counter, READ_AHEAD)


def compare(contenders: dict[str, Iterator[int]], seconds: float, clock: Callable[[], float], untimed: int = 1) -> None:
    """Print a line for each contender, an endless iterator of the numbers of tokens that it has just made.

    Args:
        untimed: tokens that come first in each turn, because they were read ahead while others had their turns.
    """
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(ROUNDS):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            left = untimed
            while left > 0:
                left -= next(contenders[name])
            begin, tokens = clock(), 0
            while (elapsed := clock() - begin) < seconds:
                tokens += next(contenders[name])
            speeds[name].append(tokens / elapsed)
    first = speeds[names[0]]
    for name, own in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
        print(f"| {name} | {statistics.median(own) / 1e6:.2f}M | {ratio:.2f} |", flush=True)
    for contender in contenders.values():
        contender.close()  # type: ignore[attr-defined]


def read_some_texts(paths: list[Path]) -> list[str]:
    """Return the first texts that together have at least CHARACTERS characters."""
    texts, characters = [], 0
    for text in read_documents(paths, "text"):
        texts.append(text)
        characters += len(text)
        if characters >= CHARACTERS:
            break
    return texts


def make_tokenizing(tokenizer: Tokenizer, texts: list[str]) -> dict[str, Iterator[int]]:
    """Return contenders that tokenize the same documents: the library, and this package."""

    def encode_by_library() -> Iterator[int]:
        library = tokenizer._library  # type: ignore[attr-defined]
        documents = cycle(texts)
        while True:
            encoded = library.encode_batch_fast(list(islice(documents, ROWS)), add_special_tokens=False)
            yield sum(len(one.ids) + 1 for one in encoded)

    def encode_by_package() -> Iterator[int]:
        yield from map(len, encode_documents(cycle(texts), tokenizer))

    return {
        "tokenizing, one core: the `tokenizers` library": encode_by_library(),
        "tokenizing, one core: this package": encode_by_package(),
    }


def make_reading(folder: Path, tokens: int) -> dict[str, Iterator[int]]:
    """Return contenders that read rows of a file of random ids: alone, and with the loader's hashes and tensors."""
    from muown_train.data.loader import Loader  # loads torch, which worker processes, which import this file, lack

    path = folder / "random.bin"
    generator = np.random.default_rng(0)
    with closing(TokenWriter(path, np.dtype("<u2"))) as writer:
        for begin in range(0, tokens, 1 << 20):
            writer.write(generator.integers(0, 50_000, min(1 << 20, tokens - begin)).astype(np.uint16))

    def open_rows() -> TokenRows:
        return TokenRows(read_tokens(path), SEQ_LEN, seed=0)

    def load_batches() -> Iterator[int]:
        for batch in Loader(open_rows(), ROWS, prefetch=0):
            yield batch.tokens.numel() - ROWS

    return {
        "prepared rows, one core": take_batches(open_rows()),
        "prepared rows, one core, through the loader": load_batches(),
    }


def make_streaming(folder: Path, texts: list[str], tokenizer: Tokenizer) -> dict[str, Iterator[int]]:
    """Return contenders that read and encode local documents while their rows are asked for."""
    paths = [folder / f"{number}.jsonl" for number in range(STREAMS)]
    for number, path in enumerate(paths):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[number::STREAMS]))

    def stream(count: int) -> Iterator[int]:
        source = StreamRows(read_from, [[path] for path in paths], tokenizer, SEQ_LEN, shuffle=128)
        return take_batches(add_workers(source, count))

    return {"streaming, 1 worker": stream(1), "streaming, no workers": stream(0), "streaming, 2 workers": stream(2)}


def read_from(path: Path, first: int) -> Iterator[str]:
    """Yield the documents of a file from the one with the number `first` on."""
    return islice(read_documents([path], "text"), first, None)


def take_batches(rows: RowSource) -> Iterator[int]:
    """Take batch after batch, and yield the number of tokens of each."""
    begin = 0
    while True:
        rows.take(range(begin, begin + ROWS))
        begin += ROWS
        yield ROWS * SEQ_LEN


if __name__ == "__main__":
    run_script(main)
