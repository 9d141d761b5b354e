"""The documents of a data configuration in the order of its files, tokenized, from any place in them on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from muown_train.data.cache import fingerprint_files
from muown_train.data.corpus import encode_labelled
from muown_train.data.hub.files import Unit, open_hub
from muown_train.data.hub.retry import LIMIT, Retry
from muown_train.data.prefetch import Prefetcher, stop_all
from muown_train.data.sources import report_skipped, skip_files
from muown_train.data.text.documents import expand_globs, find_unreadable, group_documents, read_documents
from muown_train.data.text.tokenizer import Tokenizer

FILES_AT_ONCE = 4  # files that are read ahead, so that encoding need not wait for a network
DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE = 256, 1 << 20  # the most that a thread hands over together
AHEAD = 4  # groups of documents that are read ahead for each file


@dataclass(frozen=True)
class DocumentSource:
    """Numbered files of documents."""

    metadata: dict[str, Any]  # JSON that must not change until all is read
    files: int
    documents: Callable[[int, int], Iterator[str]]  # (file, number of a document) -> that document and those after it
    close: Callable[[], None]  # ends a wait of `documents`


@dataclass(frozen=True)
class Position:
    """The place of the next token in a source."""

    file: int = 0
    document: int = 0
    token: int = 0  # number of the token in the document; its length if it is all read


class Piece(NamedTuple):
    """A document or a part of one."""

    ids: np.ndarray  # 1-D uint16 or uint32
    text: str | None  # the text of the whole document, if the piece is its beginning


class TokenReader:
    """Reads the ids of documents from a position on; each document ends with end-of-text."""

    def __init__(self, source: DocumentSource, position: Position, tokenizer: Tokenizer) -> None:
        self.position = position
        self._files = source.files
        self._located = _read_located(source, position)
        self._documents = encode_labelled(self._located, tokenizer)
        self._text, self._ids = "", np.empty(0, dtype=np.uint16)
        self._skip = position.token

    @property
    def fraction_read(self) -> float:
        """The part of the files that is read."""
        return self.position.file / self._files

    def take(self, most: int | None) -> Piece | None:
        """Return the rest of the document at the position, or else the next document; None at the end.

        Args:
            most: the greatest number of ids to return.
        """
        while self._skip >= len(self._ids):
            following = next(self._documents, None)
            if following is None:
                return None
            self._text, (file, document), self._ids = following
            if (file, document) != (self.position.file, self.position.document):
                self._skip = 0
            self.position = Position(file, document, self._skip)
        begin, stop = self._skip, len(self._ids) if most is None else min(self._skip + most, len(self._ids))
        self._skip = stop
        self.position = Position(self.position.file, self.position.document, stop)
        return Piece(self._ids[begin:stop], self._text if begin == 0 else None)

    def close(self) -> None:
        self._documents.close()
        self._located.close()


LocatedDocument = tuple[str, tuple[int, int]]  # text; file, number of the document in it


def _read_located(source: DocumentSource, position: Position) -> Any:
    """Generate the documents from the one at the position on, while threads read ahead in some files."""
    prefetchers: deque[Prefetcher[list[LocatedDocument] | None]] = deque()
    next_file = position.file
    try:
        while True:
            while next_file < source.files and len(prefetchers) < FILES_AT_ONCE:
                first = position.document if next_file == position.file else 0
                prefetchers.append(Prefetcher(_group_file(source, next_file, first), AHEAD))
                next_file += 1
            if not prefetchers:
                return
            while (group := next(prefetchers[0])) is not None:
                yield from group
            prefetchers.popleft()
    finally:
        source.close()
        stop_all(prefetchers)


def _group_file(source: DocumentSource, file: int, first: int) -> Iterator[list[LocatedDocument] | None]:
    """Yield lists of documents of a file, and None at its end."""
    documents = ((text, (file, number)) for number, text in enumerate(source.documents(file, first), first))
    yield from group_documents(documents, DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE, lambda document: len(document[0]))
    yield None


def _open_files(
    settings: Mapping[str, Any], begun_with: dict[str, Any] | None, progress: Callable[[str], None]
) -> DocumentSource:
    skip = settings.get("on_bad_file") == "skip"
    paths = expand_globs(settings.get("train"), "data.train", progress, any_kind=skip)
    if settings.get("valid"):
        raise ValueError("data.valid is for training without preparation: here the first documents are held out")
    text = settings.get("text", "text")
    metadata: dict[str, Any] = {"data": "files", "files": len(paths), "revision": fingerprint_files(paths)}
    if skip:
        if begun_with and begun_with["revision"] == metadata["revision"]:
            faults = {paths[int(number)]: fault for number, fault in begun_with["skipped"].items()}
        else:
            faults = find_unreadable(paths, text)
        report_skipped(faults, len(paths), progress)
        metadata["skipped"] = {str(paths.index(path)): fault for path, fault in faults.items()}
        paths = skip_files(paths, faults)

    def read(file: int, first: int) -> Iterator[str]:
        return islice(read_documents([paths[file]], text, further=paths[file + 1 :]), first, None)

    return DocumentSource(metadata, len(paths), read, lambda: None)


def _open_hub(
    settings: Mapping[str, Any], begun_with: dict[str, Any] | None, progress: Callable[[str], None]
) -> DocumentSource:
    path, name = settings["path"], settings.get("name")
    split, text = settings.get("split", "train"), settings.get("text", "text")
    # `main` may have moved since the folder was begun
    revision = begun_with["revision"] if begun_with else settings.get("revision", "main")
    retry = Retry(settings.get("retries", LIMIT))
    hub = open_hub(path, name, split, text, revision, retry, progress)
    metadata = {"data": path, "name": name, "split": split, "revision": hub.revision, "files": len(hub.names)}
    return DocumentSource(
        metadata, len(hub.names), lambda file, first: hub.read_documents(Unit(file), first), retry.interrupt
    )


# the name of the function that a data configuration has as its target -> a function of its settings, the metadata of
# the source with which a folder was begun, if it was, and `progress`
OPENERS: dict[str, Callable[[Mapping[str, Any], dict[str, Any] | None, Callable[[str], None]], DocumentSource]] = {
    "files": _open_files,
    "hub_stream": _open_hub,
}
