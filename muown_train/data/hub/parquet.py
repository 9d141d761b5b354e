"""Parquet files on a web server: Range requests fetch only the wanted row groups, and of these only the text column.

HfFileSystem is not used for this: it looks each file up by an API call before it reads, fetches blocks around what is
asked for, and retries by itself, in waits that `Retry.interrupt` could not end and that no message would tell of.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from muown_train.data.text.documents import check_text_column

BATCH = 256  # documents that are decoded together
TIMEOUT = 30.0  # seconds without an answer


class HTTPError(ConnectionError):
    """An answer without the bytes that were asked for."""

    def __init__(self, response: Any) -> None:
        phrases = {status.value: status.phrase for status in HTTPStatus}
        super().__init__(f"HTTP {response.status_code} {phrases.get(response.status_code, '')}".strip())
        self.response = response


class RangeFile(io.RawIOBase):
    """A file of a server that answers Range requests: a read is one request, and nothing is kept.

    Raises:
        HTTPError: an answer has none of the bytes; ConnectionError: it has fewer than promised. Errors of the HTTP
            library of huggingface_hub pass through.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._place = 0
        response = self._get(0, 4)
        self._size = int(response.headers["Content-Range"].rpartition("/")[2])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._size, self._place + size)
        if end <= self._place:
            return b""
        content: bytes = self._get(self._place, end).content
        if len(content) != end - self._place:
            raise ConnectionError(f"{len(content)} bytes came of {end - self._place}")
        self._place = end
        return content

    def _get(self, begin: int, end: int) -> Any:
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        response = get_session().get(self._url, headers=headers, timeout=TIMEOUT)
        if response.status_code != HTTPStatus.PARTIAL_CONTENT:
            raise HTTPError(response)
        return response


def read_row_group_sizes(url: str) -> list[int]:
    """Return the number of documents in each row group, from the footer of the file."""
    import pyarrow.parquet as pq

    with RangeFile(url) as raw, pq.ParquetFile(raw) as file:
        return [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]


def read_texts(url: str, name: str, column: str, begin: int, end: int | None, first: int) -> Iterator[str | None]:
    """Yield texts of consecutive row groups, which are fetched one at a time.

    Args:
        name: of the file, for messages.
        begin: the first row group.
        end: the row group after the last; None means up to the end of the file.
        first: the number, in these row groups, of the first text; row groups that end before it are not fetched.

    Raises:
        ValueError: the file has no such column, or the column holds no text.
    """
    import pyarrow.parquet as pq

    with RangeFile(url) as raw, pq.ParquetFile(raw, pre_buffer=False) as file:
        check_text_column(name, file.schema_arrow, column)
        stop = file.num_row_groups if end is None else end
        while begin < stop and first >= (documents := file.metadata.row_group(begin).num_rows):
            first -= documents
            begin += 1
        for group in range(begin, stop):  # each by itself, since a batch across two would need both
            for batch in file.iter_batches(BATCH, row_groups=[group], columns=[column], use_threads=False):
                skipped = min(first, batch.num_rows)
                first -= skipped
                yield from batch.column(0).slice(skipped).to_pylist()
