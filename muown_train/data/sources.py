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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from muown_train.config.checks import check_choice
from muown_train.config.instantiate import bind_target
from muown_train.data.cache import build_once, fingerprint, fingerprint_files, locate_cache
from muown_train.data.corpus import (
    Corpus,
    SplitDocuments,
    compute_unigram_loss,
    report_spelt_tokens,
    tokenize_corpus,
)
from muown_train.data.rows import RowSource, TokenRows
from muown_train.data.text.documents import expand_globs, find_unreadable, identify_file, read_documents
from muown_train.data.text.holdout import is_held_out, split_by_content
from muown_train.data.text.tokenizer import HubTokenizer, Tokenizer, check_vocabulary, load_tokenizer
from muown_train.data.text.train_bpe import LEAST, MOST, BpeRecipe
from muown_train.runtime.progress import StatusLine, print_line

FROM_RUN = ["run"]  # the argument of every data function that the program gives and no setting can
ON_BAD_FILE = ("error", "skip")  # what to do about files that cannot be read
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


def stdlib(bos: bool = False, *, run: RunInfo) -> TrainingData:
    """Return the source text of Python's own standard library: a real corpus on every machine, without a network.

    Args:
        bos: see HubTokenizer.
    """
    recipe = BpeRecipe(bos=bos)  # always the same, so that results on these data compare
    check_vocabulary(recipe.name, recipe.size, run.vocab_size)
    root = Path(sysconfig.get_path("stdlib"))
    paths = _find_library_files(root)
    if not paths:
        raise ValueError(f"Python's standard library has no source files in {root}: use data=files")

    def documents() -> Iterator[tuple[str, bool]]:
        for path in paths:
            text = path.read_bytes().decode("utf-8", errors="replace")
            yield text, is_held_out(path.relative_to(root).as_posix().encode())

    folder = run.cache / f"stdlib-{fingerprint(FORMAT, fingerprint_files(paths), *list_cached_options(recipe))}"
    corpus = tokenize_corpus(folder, documents, recipe, run.progress)
    return _make_training_data(corpus, "stdlib", run)


def files(
    train: str | Sequence[str] | None = None,
    valid: str | Sequence[str] | None = None,
    tokenizer: str | None = None,
    text: str = "text",
    end_of_text: str | None = None,
    special_tokens: bool = False,
    bos: bool = False,
    on_bad_file: str = "error",
    *,
    run: RunInfo,
) -> TrainingData:
    """Return the text of local files, given by globs or folders, in any mix of what `text/documents.py` reads.

    Without `valid` a fixed part is held out (text/holdout.py). Without `tokenizer` a BPE of as many entries as the
    model has is trained on the rest.

    Args:
        end_of_text, special_tokens, bos: see HubTokenizer.
        on_bad_file: "error", or "skip" for the data as if files that cannot be read did not exist.

    Raises:
        ValueError: a key, glob, file or line is at fault; the message names it, or all files that are.
    """
    encoder = choose_tokenizer(tokenizer, end_of_text, special_tokens, run.vocab_size, bos)
    train_paths, valid_paths, skipped = _list_files(train, valid, text, on_bad_file, run.cache, run.progress)
    tokenized_by = encoder.name if isinstance(encoder, BpeRecipe) else encoder.fingerprint
    of_files = fingerprint_files(train_paths), fingerprint_files(valid_paths)
    key = fingerprint(FORMAT, tokenized_by, text, *of_files, *list_cached_options(encoder))
    documents = _split_documents(train_paths, valid_paths, text)
    corpus = tokenize_corpus(run.cache / f"files-{key}", documents, encoder, run.progress)
    data = _make_training_data(corpus, "files", run)
    return replace(data, metadata=data.metadata | {"skipped_files": skipped}) if skipped else data


def train_tokenizer(
    size: int,
    train: str | Sequence[str] | None = None,
    valid: str | Sequence[str] | None = None,
    tokenizer: str | None = None,
    text: str = "text",
    end_of_text: str | None = None,
    special_tokens: bool = False,
    bos: bool = False,
    on_bad_file: str = "error",
    progress: Callable[[str], None] = print_line,
) -> bytes:
    """Return the tokenizer.json that `files` with these arguments trains for a model of `size` entries.

    `bos` changes nothing in it.

    Raises:
        ValueError: see `files`.
    """
    if tokenizer:
        raise ValueError(f"data.tokenizer={tokenizer}: a tokenizer is trained here, so none can be given")
    recipe = choose_tokenizer(None, end_of_text, special_tokens, size)
    assert isinstance(recipe, BpeRecipe)
    train_paths, valid_paths, _ = _list_files(train, valid, text, on_bad_file, locate_cache(None), progress)
    documents = _split_documents(train_paths, valid_paths, text)
    progress(f"training a tokenizer of {recipe.size} entries on {len(train_paths)} files")
    return recipe.train(lambda: (document for document, held in documents() if not held))


def _list_files(
    train: Any, valid: Any, text: str, on_bad_file: Any, cache: Path, progress: Callable[[str], None]
) -> tuple[list[Path], list[Path], dict[str, str]]:
    """Return the files to train on, those held out, and path -> fault of those that are skipped."""
    skip = check_choice("data.on_bad_file", on_bad_file, ON_BAD_FILE) == "skip"
    train_paths = expand_globs(train, "data.train", progress, any_kind=skip)
    valid_paths = expand_globs(valid, "data.valid", progress, any_kind=skip) if valid else []
    faults: dict[Path, str] = {}
    if skip:
        faults = _find_unreadable_once([*train_paths, *valid_paths], text, cache, progress)
        train_paths, valid_paths = (skip_files(paths, faults) for paths in (train_paths, valid_paths))
    trained_on = {identify_file(path) for path in train_paths}
    if both := [path for path in valid_paths if identify_file(path) in trained_on]:
        raise ValueError(f"{both[0].resolve()} is both in data.train and in data.valid")
    return train_paths, valid_paths, {str(path): fault for path, fault in faults.items()}


def choose_tokenizer(
    tokenizer: str | None, end_of_text: str | None, special_tokens: bool, vocab_size: int, bos: bool = False
) -> HubTokenizer | BpeRecipe:
    """Return the tokenizer of a name, or without one a recipe for one of as many entries as the model has.

    Raises:
        ValueError: there is no such tokenizer, or it does not fit the model.
    """
    if tokenizer:
        encoder = load_tokenizer(str(tokenizer), end_of_text, special_tokens, bos)
        check_vocabulary(encoder.name, encoder.size, vocab_size)
        return encoder
    if not isinstance(end_of_text, str | None):
        raise ValueError(f"data.end_of_text={end_of_text} must be the text of a token")
    recipe = BpeRecipe(min(vocab_size, MOST), end_of_text or None, special_tokens, bos)
    check_vocabulary(recipe.name, LEAST, vocab_size)
    return recipe


def list_cached_options(encoder: Tokenizer | BpeRecipe) -> list[dict[str, Any]]:
    """Return the options by which cached tokens differ: [] without any, since older caches know of none."""
    return [encoder.options] if encoder.options else []


def skip_files(paths: list[Path], faults: Mapping[Path, str]) -> list[Path]:
    """Return the paths without those that have a fault.

    Raises:
        ValueError: none is left.
    """
    left = [path for path in paths if path not in faults]
    if paths and not left:
        raise ValueError(f"all {len(paths)} files cannot be read, such as: {faults[paths[0]]}")
    return left


def report_skipped(faults: Mapping[Path, str], files: int, progress: Callable[[str], None]) -> None:
    """Say how many of `files` files are skipped, if any are."""
    if faults:
        names = ", ".join(map(str, list(faults)[:5])) + (", …" if len(faults) > 5 else "")
        progress(f"{len(faults)} of {files} files cannot be read and are skipped (data.on_bad_file=skip): {names}")


def _find_unreadable_once(
    paths: list[Path], text: str, cache: Path, progress: Callable[[str], None]
) -> dict[Path, str]:
    """Return path -> fault for the files that cannot be read; the cache keeps what was found."""

    def build(partial: Path) -> dict[str, Any]:
        with StatusLine(every=5.0, first=2.0) as line:
            faults = find_unreadable(
                paths, text, watch=lambda n: line.show(f"reading file {n + 1:,} of {len(paths):,}", n / len(paths))
            )
        return {"faults": {str(paths.index(path)): fault for path, fault in faults.items()}}

    folder = cache / f"unreadable-{fingerprint(FORMAT, text, fingerprint_files(paths))}"
    faults = {paths[int(number)]: fault for number, fault in build_once(folder, build, progress)["faults"].items()}
    report_skipped(faults, len(paths), progress)
    return faults


def _find_library_files(root: Path) -> list[Path]:
    paths: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY and not name.startswith("config-")]
        paths += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(GENERATED)]
    return sorted(path for path in paths if path.is_file())


def _split_documents(train: list[Path], valid: list[Path], text: str) -> SplitDocuments:
    def split_by_file() -> Iterator[tuple[str, bool]]:
        yield from ((document, False) for document in read_documents(train, text, further=valid))
        yield from ((document, True) for document in read_documents(valid, text))

    if valid:
        return split_by_file
    return lambda: split_by_content(lambda: read_documents(train, text))


def _make_training_data(corpus: Corpus, data: str, run: RunInfo) -> TrainingData:
    index = corpus.index
    if not index["train"]["documents"]:
        raise ValueError(f"data={data}: there is no text to train on")
    rows = TokenRows(corpus.train, run.seq_len, run.seed)
    valid = take_held_out_ids(corpus.valid, f"data={data}", run)
    report_spelt_tokens((index["train"], index["valid"]), corpus.tokenizer, run.progress)
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


def take_held_out_ids(tokens: np.ndarray, label: str, run: RunInfo) -> np.ndarray:
    """Return the first valid_tokens + 1 ids, whose targets are valid_tokens tokens, or as many as there are.

    Args:
        label: names the data in the message that says that there are fewer.

    Raises:
        ValueError: `run.valid_tokens` is below 1, or there is no target.
    """
    if run.valid_tokens < 1:
        raise ValueError(f"valid_tokens must be 1 or more, not {run.valid_tokens}")
    if len(tokens) < 2:
        raise ValueError(f"the held-out part has {len(tokens)} tokens, too few to evaluate: give more data")
    if len(tokens) <= run.valid_tokens:
        run.progress(f"{label}: {len(tokens) - 1} tokens are held out, fewer than valid_tokens={run.valid_tokens}")
    return tokens[: run.valid_tokens + 1]


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the entries on the tokenizer in the metadata of data."""
    described = {"tokenizer": tokenizer.name, "tokenizer_hash": tokenizer.fingerprint, "vocabulary": tokenizer.size}
    return described | tokenizer.options
