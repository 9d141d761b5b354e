"""The documents of a data configuration in the order of its files, tokenised, from any place in them on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from muown_train.data.cache import files_fingerprint
from muown_train.data.corpus import with_ids
from muown_train.data.hub.files import Unit, open_hub
from muown_train.data.hub.retry import LIMIT, Retry
from muown_train.data.prefetch import ReadAhead, end
from muown_train.data.text.documents import expand, grouped, read_documents
from muown_train.data.text.tokenizer import Tokenizer

FILES_AT_ONCE = 4  # read ahead, so that cores need not wait for a network
DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE = 256, 1 << 20  # that readers hand over together
AHEAD = 4  # of these for each file


@dataclass(frozen=True)
class Source:
    facts: dict[str, Any]  # JSON: what must not change until all is read
    files: int
    documents: Callable[[int, int], Iterator[str]]  # (file, number of a document) -> that document and those after it
    close: Callable[[], None]  # ends what `documents` may be waiting for


@dataclass(frozen=True)
class Cursor:
    """Where the next token is."""

    file: int = 0
    document: int = 0
    token: int = 0  # in the document; its length where it is all read


class Piece(NamedTuple):
    ids: np.ndarray  # 1-D uint16 or uint32
    begins: str | None  # the text, where this is the beginning of its document


class Reader:
    """Ids of the documents from a cursor on, each document ending with end-of-text."""

    def __init__(self, source: Source, cursor: Cursor, tokenizer: Tokenizer) -> None:
        self.cursor = cursor
        self._files = source.files
        self._located = _located(source, cursor)
        self._documents = with_ids(self._located, tokenizer)
        self._text, self._ids = "", np.empty(0, dtype=np.uint16)
        self._skip = cursor.token

    @property
    def done(self) -> float:
        """Part of the files that is read."""
        return self.cursor.file / self._files

    def take(self, most: int | None) -> Piece | None:
        """The rest of the document at the cursor, of at most `most` ids, or of the next; None at the end."""
        while self._skip >= len(self._ids):
            following = next(self._documents, None)
            if following is None:
                return None
            self._text, (file, document), self._ids = following
            if (file, document) != (self.cursor.file, self.cursor.document):
                self._skip = 0
            self.cursor = Cursor(file, document, self._skip)
        begin, stop = self._skip, len(self._ids) if most is None else min(self._skip + most, len(self._ids))
        self._skip = stop
        self.cursor = Cursor(self.cursor.file, self.cursor.document, stop)
        return Piece(self._ids[begin:stop], self._text if begin == 0 else None)

    def close(self) -> None:
        self._documents.close()
        self._located.close()


Located = tuple[str, tuple[int, int]]  # text; file, number of the document in it


def _located(source: Source, cursor: Cursor) -> Any:
    """Generator of the documents from the one at the cursor on; some files are read ahead by threads."""
    readers: deque[ReadAhead[list[Located] | None]] = deque()
    following = cursor.file
    try:
        while True:
            while following < source.files and len(readers) < FILES_AT_ONCE:
                first = cursor.document if following == cursor.file else 0
                readers.append(ReadAhead(_batches(source, following, first), AHEAD))
                following += 1
            if not readers:
                return
            while (batch := next(readers[0])) is not None:
                yield from batch
            readers.popleft()
    finally:
        source.close()
        end(readers)


def _batches(source: Source, file: int, first: int) -> Iterator[list[Located] | None]:
    """Lists of documents of a file, and None at its end."""
    documents = ((text, (file, number)) for number, text in enumerate(source.documents(file, first), first))
    yield from grouped(documents, DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE, lambda one: len(one[0]))
    yield None


def _open_files(settings: Mapping[str, Any], before: dict[str, Any] | None, progress: Callable[[str], None]) -> Source:
    if not settings.get("train"):
        raise ValueError("data.train is not set: give the files as a glob, such as data.train='texts/**/*.txt'")
    if settings.get("valid"):
        raise ValueError("data.valid is for training without preparation: here the first documents are held out")
    paths = expand(settings["train"], "data.train")
    text = settings.get("text", "text")
    facts = {"data": "files", "files": len(paths), "revision": files_fingerprint(paths)}
    return Source(
        facts,
        len(paths),
        lambda file, first: islice(read_documents([paths[file]], text), first, None),
        lambda: None,
    )


def _open_hub(settings: Mapping[str, Any], before: dict[str, Any] | None, progress: Callable[[str], None]) -> Source:
    path, name = settings["path"], settings.get("name")
    split, text = settings.get("split", "train"), settings.get("text", "text")
    # what `main` was when the folder was begun
    revision = before["revision"] if before else settings.get("revision", "main")
    retry = Retry(settings.get("retries", LIMIT))
    hub = open_hub(path, name, split, text, revision, retry, progress)
    facts = {"data": path, "name": name, "split": split, "revision": hub.revision, "files": len(hub.names)}
    return Source(facts, len(hub.names), lambda file, first: hub.documents(Unit(file), first), retry.interrupt)


# by the name of the function that a data configuration has as its target
OPENERS: dict[str, Callable[[Mapping[str, Any], dict[str, Any] | None, Callable[[str], None]], Source]] = {
    "files": _open_files,
    "hub_stream": _open_hub,
}
