"""Texts to evaluate on: the same documents for every run, which each run encodes by its own tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from muown_train.config.checks import check_choice
from muown_train.config.instantiate import bind_target
from muown_train.data import sources
from muown_train.data.corpus import encode_labelled
from muown_train.data.sources import FROM_RUN, RunInfo, TrainingData
from muown_train.data.text.documents import expand_globs, find_unreadable, read_with_labels
from muown_train.data.text.tiktoken_bpe import build_byte_alphabet
from muown_train.data.text.tokenizer import Tokenizer, choose_dtype
from muown_train.runtime.progress import print_line

MOST_FILES = 20  # up to this many files each is a source of its own
ALL = "all"  # the one source of documents that are not distinguished


@dataclass(frozen=True)
class EvalText:
    """Documents, each with the name of its source, by which scores are tabulated."""

    name: str  # a description for people
    documents: Callable[[], Iterator[tuple[str, str]]]  # pairs (document, source), the same at every call


def read_eval_text(data: Mapping[str, Any], label: str | None, valid_tokens: int, cache: Path) -> EvalText:
    """Return the text to evaluate on that a data configuration names.

    For data=files it is `data.valid`, or else all of `data.train`; for others it is what they hold out,
    `valid_tokens` tokens by their own tokenizer.

    Args:
        data: the section of a resolved configuration.
        label: key or column whose value is the source of a document. Without it each of up to 20 files is a source.

    Raises:
        ValueError: the configuration is wrong; see `bind_target` and data/sources.py.
    """
    target = bind_target(data, "data", FROM_RUN)
    if target.func is sources.files:
        return _read_files(label, **target.keywords)
    if label is not None:
        raise ValueError(
            f"--source {label} names a key or column of .jsonl or .parquet files: give data=files with data.valid=GLOB"
        )
    held_out: TrainingData = target(run=RunInfo(1, 0, valid_tokens, cache, vocab_size=2**31))
    name = str(held_out.metadata["data"])
    if held_out.tokenizer.raw is None:
        raise ValueError(f"data={name} has no text to evaluate on")
    documents = list(_decode_documents(held_out.valid, held_out.tokenizer))
    return EvalText(f"held-out text of {name}", lambda: ((document, ALL) for document in documents))


def _read_files(
    label: str | None,
    train: Any = None,
    valid: Any = None,
    text: str = "text",
    on_bad_file: Any = "error",
    **of_tokenizer: Any,
) -> EvalText:
    for key, value in of_tokenizer.items():
        if value:
            raise ValueError(f"data.{key}={value}: each run reads the text by its own tokenizer")
    skip = check_choice("data.on_bad_file", on_bad_file, sources.ON_BAD_FILE) == "skip"
    key, patterns = ("data.train", train) if train and not valid else ("data.valid", valid)
    paths = expand_globs(patterns, key, any_kind=skip)
    if skip:
        faults = find_unreadable(paths, text, label)
        sources.report_skipped(faults, len(paths), print_line)
        paths = sources.skip_files(paths, faults)
    if label is None and 1 < len(paths) <= MOST_FILES:
        names = _shorten(paths)
        return EvalText(
            f"{len(paths)} files", lambda: ((one, names[path]) for one, path in read_with_labels(paths, text))
        )
    name = str(paths[0]) if len(paths) == 1 else f"{len(paths)} files"
    return EvalText(
        name, lambda: ((one, value if label else ALL) for one, value in read_with_labels(paths, text, label))
    )


def _shorten(paths: Sequence[Path]) -> dict[str, str]:
    """Return path -> its name relative to the folder that all paths share."""
    parent = os.path.commonpath([path.absolute().parent for path in paths])
    return {str(path): os.path.relpath(path, parent) for path in paths}


def _decode_documents(ids: np.ndarray, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the documents of ids in which each ends with end-of-text, without half a character at the end."""
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    for document in np.split(ids, ends + 1):
        whole = len(document) > 0 and document[-1] == tokenizer.end_of_text
        text = tokenizer.decode((document[:-1] if whole else document).tolist())
        yield text if whole else text.rstrip("\ufffd")


def encode_sources(text: EvalText, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Return the ids of each source, 1-D uint16 or uint32: end-of-text, then its documents, each with end-of-text.

    Thus every token of the documents is a target, as in the middle of training data.
    """
    begin = np.array([tokenizer.end_of_text], dtype=choose_dtype(tokenizer.size))
    parts: dict[str, list[np.ndarray]] = {}
    for _, source, ids in encode_labelled(text.documents(), tokenizer):
        parts.setdefault(source, [begin]).append(ids)
    if not parts:
        raise ValueError(f"{text.name}: there is no text to evaluate on")
    return {source: np.concatenate(ids) for source, ids in sorted(parts.items())}


def count_token_bytes(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the bytes of text, (V,) int64, that each id of a byte-level BPE stands for, or None if unknown.

    End-of-text stands for no text: 0.
    """
    config = json.loads(tokenizer.raw) if tokenizer.raw else {}
    decoder = config.get("decoder") or {}
    if "ByteLevel" not in [part.get("type") for part in (decoder, *decoder.get("decoders", ()))]:
        return None
    letters = build_byte_alphabet()
    sizes = np.zeros(tokenizer.size, dtype=np.int64)
    added = {token["id"]: len(token["content"].encode()) for token in config.get("added_tokens", ())}
    for token, i in config["model"]["vocab"].items():
        if i not in added and not all(letter in letters for letter in token):
            return None
        sizes[i] = len(token)
    for i, size in added.items():
        sizes[i] = size
    sizes[tokenizer.end_of_text] = 0
    return sizes
