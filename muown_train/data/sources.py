"""Data configurations (configs/data/) -> TrainingData: the source of rows, the held-out tokens and the tokenizer.

`build_data` calls the function that a configuration names as its `_target_`: `stdlib` and `files` here, `hub_stream`
(hub/dataset.py), `shards` (shards/dataset.py) or `random_tokens` (random_tokens.py). The configuration gives the
settings of that function and the run gives a RunInfo. Each function compares the size of the tokenizer with
`run.vocab_size` before it reads data.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from muown_train.config.instantiate import bind_target
from muown_train.data.cache import fingerprint, fingerprint_files
from muown_train.data.corpus import Corpus, SplitDocuments, compute_unigram_loss, tokenize_corpus
from muown_train.data.rows import RowSource, TokenRows
from muown_train.data.text import train_bpe as bpe
from muown_train.data.text.documents import expand_globs, identify_file, read_documents
from muown_train.data.text.holdout import is_held_out, split_by_content
from muown_train.data.text.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from muown_train.runtime.progress import print_line

FROM_RUN = ["run"]  # the argument of every data function that the program gives and no setting can
FORMAT = 2  # version of the cached tokens: raise it when the same input would give others
NOT_LIBRARY = {  # folders of the standard library that are left out
    *("test", "tests", "idlelib", "idle_test", "lib2to3", "ensurepip", "turtledemo", "lib-dynload"),
    *("site-packages", "dist-packages", "__pycache__"),
}
GENERATED = ("_sysconfigdata", "sitecustomize")  # beginnings of names of files that a build of Python generates


@dataclass(frozen=True)
class RunInfo:
    """The values of a run that every data function needs."""

    seq_len: int  # targets in a row of T+1 tokens
    seed: int  # decides the order of rows
    valid_tokens: int  # held-out targets, at most
    cache: Path  # folder of prepared data
    vocab_size: int  # entries of the model, which the tokenizer must not exceed
    progress: Callable[[str], None] = print_line  # takes one line of text about work that takes long


@dataclass(frozen=True)
class TrainingData:
    """The data of a run."""

    train: RowSource
    valid: np.ndarray  # 1-D held-out ids, uint16 or uint32, at most valid_tokens + 1 of them
    tokenizer: Tokenizer
    metadata: dict[str, Any]  # JSON for the run's manifest
    unigram_loss: float | None  # nats per held-out target; None for streams


def build_data(settings: Mapping[str, Any], run: RunInfo, trust: Sequence[str] = ()) -> TrainingData:
    """Return the data that the section `data` of a configuration asks for.

    Args:
        settings: the section, resolved, with its `_target_`.
        trust: targets that are allowed besides those of this package.

    Raises:
        ValueError: a setting is unknown or wrong, or the data do not suit the run.
        ConnectionError: the hub cannot be reached.
        OSError: files cannot be read or the cache cannot be written.
    """
    data: TrainingData = bind_target(settings, "data", FROM_RUN, trust)(run=run)
    return data


def stdlib(*, run: RunInfo) -> TrainingData:
    """Return the source text of Python's own standard library: a real corpus on every machine, without a network."""
    check_vocabulary(bpe.NAME, bpe.SIZE, run.vocab_size)
    root = Path(sysconfig.get_path("stdlib"))
    paths = _find_library_files(root)
    if not paths:
        raise ValueError(f"Python's standard library has no source files in {root}: use data=files")

    def documents() -> Iterator[tuple[str, bool]]:
        for path in paths:
            text = path.read_bytes().decode("utf-8", errors="replace")
            yield text, is_held_out(path.relative_to(root).as_posix().encode())

    folder = run.cache / f"stdlib-{fingerprint(FORMAT, fingerprint_files(paths))}"
    corpus = tokenize_corpus(folder, documents, None, run.progress)
    return _make_training_data(corpus, "stdlib", run)


def files(
    train: str | Sequence[str] | None = None,
    valid: str | Sequence[str] | None = None,
    tokenizer: str | None = None,
    text: str = "text",
    *,
    run: RunInfo,
) -> TrainingData:
    """Return the text of local files, given by globs or folders, in any mix of what `text/documents.py` reads.

    Without `valid` a fixed part is held out (text/holdout.py). Without `tokenizer` a BPE of 4096 entries is trained
    on the rest.

    Raises:
        ValueError: a key, glob, file or line is at fault; the message names it.
    """
    train_paths = expand_globs(train, "data.train", run.progress)
    encoder = load_tokenizer(str(tokenizer)) if tokenizer else None
    check_vocabulary(*((encoder.name, encoder.size) if encoder else (bpe.NAME, bpe.SIZE)), run.vocab_size)
    valid_paths = expand_globs(valid, "data.valid", run.progress) if valid else []
    trained_on = {identify_file(path) for path in train_paths}
    if both := [path for path in valid_paths if identify_file(path) in trained_on]:
        raise ValueError(f"{both[0].resolve()} is both in data.train and in data.valid")

    tokenized_by = encoder.fingerprint if encoder else bpe.NAME
    key = fingerprint(FORMAT, tokenized_by, text, fingerprint_files(train_paths), fingerprint_files(valid_paths))
    documents = _split_documents(train_paths, valid_paths, text)
    corpus = tokenize_corpus(run.cache / f"files-{key}", documents, encoder, run.progress)
    return _make_training_data(corpus, "files", run)


def _find_library_files(root: Path) -> list[Path]:
    paths: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY and not name.startswith("config-")]
        paths += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(GENERATED)]
    return sorted(path for path in paths if path.is_file())


def _split_documents(train: list[Path], valid: list[Path], text: str) -> SplitDocuments:
    def split_by_file() -> Iterator[tuple[str, bool]]:
        yield from ((document, False) for document in read_documents(train, text))
        yield from ((document, True) for document in read_documents(valid, text))

    if valid:
        return split_by_file
    return lambda: split_by_content(lambda: read_documents(train, text))


def _make_training_data(corpus: Corpus, data: str, run: RunInfo) -> TrainingData:
    index = corpus.index
    if not index["train"]["documents"]:
        raise ValueError(f"data={data}: there is no text to train on")
    rows = TokenRows(corpus.train, run.seq_len, run.seed)
    valid = take_held_out_ids(corpus.valid, run.valid_tokens)
    metadata = {
        "data": data,
        "content": fingerprint(index["train"]["text"], index["valid"]["text"]),
        **describe_tokenizer(corpus.tokenizer),
        "documents": index["train"]["documents"],
        "tokens": index["train"]["tokens"],
        "held_out_documents": index["valid"]["documents"],
        "held_out_tokens": len(valid) - 1,
    }
    loss = compute_unigram_loss(np.array(index["train_counts"]), valid[1:])
    return TrainingData(rows, valid, corpus.tokenizer, metadata, loss)


def take_held_out_ids(tokens: np.ndarray, valid_tokens: int) -> np.ndarray:
    """Return the first valid_tokens + 1 ids, whose targets are valid_tokens tokens, or as many as there are.

    Raises:
        ValueError: `valid_tokens` is below 1, or there is no target.
    """
    if valid_tokens < 1:
        raise ValueError(f"valid_tokens must be 1 or more, not {valid_tokens}")
    if len(tokens) < 2:
        raise ValueError(f"the held-out part has {len(tokens)} tokens, too few to evaluate: give more data")
    return tokens[: valid_tokens + 1]


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the entries on the tokenizer in the metadata of data."""
    return {"tokenizer": tokenizer.name, "tokenizer_hash": tokenizer.fingerprint, "vocabulary": tokenizer.size}
