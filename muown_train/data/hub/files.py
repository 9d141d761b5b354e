"""The data files of a data set on the hub, read as streams of documents that outlast failures of the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from muown_train.data.hub.parquet import BATCH, TIMEOUT, read_row_group_sizes, read_texts
from muown_train.data.hub.retry import Retry, describe_cause, is_transient
from muown_train.data.text.documents import check_text_column, replace_surrogates
from muown_train.runtime.progress import print_line

FOOTERS_AT_ONCE = 8  # files whose footers are read at the same time
MINIMUM = {"streams": 1, "shuffle": 1, "retries": 0}  # least values of the settings that select no documents
T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """The part of a data set that a stream reads in one go: a file, or consecutive row groups of one."""

    file: int
    begin: int = 0  # first row group
    end: int | None = None  # the row group after the last; None means up to the end of the file
    skip: int = 0  # documents at the beginning that are held out


@dataclass(frozen=True)
class HubFiles:
    """The files of one split, in the order of `datasets`, and the documents of each part of them.

    Parquet files have `urls` and are read row group by row group. `datasets` reads files of other formats, from the
    beginning whatever document is asked for.
    """

    label: str
    revision: str  # the commit, so that all ranks and every resume read the same
    names: tuple[str, ...]  # names of the files in messages
    text: str  # the column
    urls: tuple[str, ...] = ()
    dataset: Any = None  # datasets.IterableDataset
    retry: Retry = field(default_factory=Retry)
    progress: Callable[[str], None] = print_line
    _reported: set[Any] = field(default_factory=set, compare=False)

    def read_documents(self, unit: Unit, first: int) -> Iterator[str]:
        """Yield the documents of a unit from number `first` on, numbered as rows of the file; a null text is empty.

        After a failure that may pass, reading continues at the document where it occurred.

        Raises:
            ConnectionError: reading failed too often, or for a reason that will not pass; the message names data set,
                file and cause.
        """
        read = partial(self._read_row_groups if self.urls else self._read_by_datasets, unit)
        for text in self._read_with_retries(unit, unit.file, read, first + unit.skip):
            yield replace_surrogates(text or "")

    def read_row_group_sizes(self) -> list[list[int]]:
        """Return the documents in each row group of each file; raises ConnectionError as `read_documents` does."""

        def read_footer(file: int) -> list[int]:
            def read(first: int) -> Iterator[list[int]]:
                yield read_row_group_sizes(self.urls[file])

            return next(self._read_with_retries(("footer", file), file, read, 0))

        pool = ThreadPoolExecutor(FOOTERS_AT_ONCE)
        try:
            return list(pool.map(read_footer, range(len(self.urls))))
        finally:  # after a failure or Ctrl-C the other threads need not wait any longer
            pool.shutdown(wait=False, cancel_futures=True)
            self.retry.interrupt()
            pool.shutdown()

    def _read_with_retries(self, key: Any, file: int, read: Callable[[int], Iterator[T]], first: int) -> Iterator[T]:
        """Yield the items of read(first); after a failure call it again with the number of the item that failed.

        Args:
            key: identifies what is read, so that its failures are reported once.
        """
        failures, stop = 0, self.retry.start_session()
        while True:
            try:
                for item in read(first):
                    yield item
                    first, failures = first + 1, 0
                return
            except Exception as error:  # HTTP, file system and format raise other types in other versions
                failures += 1
                failure = f"data set {self.label}: reading {self.names[file]} failed"
                if not is_transient(error):
                    raise ConnectionError(f"{failure} ({describe_cause(error)})") from error
                if failures > self.retry.limit:
                    raise ConnectionError(f"{failure} {failures} times in a row ({describe_cause(error)})") from error
                if key not in self._reported:
                    self._reported.add(key)
                    self.progress(
                        f"{failure} ({describe_cause(error)}); trying again for {self.retry.minutes:.0f} minutes"
                    )
                self.retry.wait(failures, error, stop)

    def _read_row_groups(self, unit: Unit, first: int) -> Iterator[str | None]:
        return read_texts(self.urls[unit.file], self.names[unit.file], self.text, unit.begin, unit.end, first)

    def _read_by_datasets(self, unit: Unit, first: int) -> Iterator[str | None]:
        part = self.dataset.shard(num_shards=len(self.names), index=unit.file).select_columns([self.text])
        for table in part.with_format("arrow").iter(batch_size=BATCH):
            check_text_column(self.names[unit.file], table.schema, self.text)
            skipped = min(first, table.num_rows)
            first -= skipped
            yield from table.column(self.text).slice(skipped).to_pylist()


def open_hub(
    path: str,
    name: str | None,
    split: str,
    text: str,
    revision: str,
    retry: Retry,
    progress: Callable[[str], None] = print_line,
) -> HubFiles:
    """Find the files of a data set without reading a document.

    Raises:
        ConnectionError: the hub cannot be reached.
        ValueError: the hub has no such data set, configuration, split or column.
    """
    from datasets import load_dataset_builder
    from datasets.utils.logging import disable_progress_bar
    from huggingface_hub import HfApi, errors, hf_hub_url

    label = f"{path} ({name})" if name else path
    disable_progress_bar()
    try:
        commit = HfApi().dataset_info(path, revision=revision, timeout=TIMEOUT).sha or revision
        builder = load_dataset_builder(path, name, revision=commit)
        dataset = builder.as_streaming_dataset(split=split)
    except errors.HFValidationError as error:
        raise ValueError(f"data.path={path!r} is not a name of a data set on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"the hub has no data set {path}, or it is private or gated and needs a login") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"data set {path} has no revision {revision!r} (data.revision)") from error
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"data set {label}, split {split!r}: {describe_cause(error)}") from error
    except Exception as error:
        raise ConnectionError(f"data set {label} cannot be fetched from the hub ({describe_cause(error)})") from error
    _check_column(dataset.features, text, label)
    names = _list_parquet_files(builder, path, commit, split)
    if len(names) == dataset.num_shards:
        urls = tuple(hf_hub_url(path, name, repo_type="dataset", revision=commit) for name in names)
        return HubFiles(label, commit, names, text, urls, None, retry, progress)
    names = tuple(f"file {k}" for k in range(dataset.num_shards))
    return HubFiles(label, commit, names, text, (), dataset, retry, progress)


def _check_column(features: Any, text: str, label: str) -> None:
    if features is None:
        return
    if text not in features:
        raise ValueError(f"data set {label} has no column {text!r} (data.text); its columns: {', '.join(features)}")
    kind = getattr(features[text], "dtype", type(features[text]).__name__)
    if kind not in ("string", "large_string", "string_view"):
        raise ValueError(f"data set {label}: column {text!r} (data.text) holds {kind}, not text")


def _list_parquet_files(builder: Any, path: str, commit: str, split: str) -> tuple[str, ...]:
    """Return the names of the split's files in the repository; none if it is not made of whole parquet files there."""
    from datasets.packaged_modules.parquet.parquet import Parquet

    if not isinstance(builder, Parquet) or getattr(builder.config, "filters", None) is not None:
        return ()
    splits: dict[Any, list[Any]] = builder.config.data_files or {}
    files = next((files for key, files in splits.items() if str(key) == split), [])
    root = f"hf://datasets/{path}@{commit}/"
    if not all(str(file).startswith(root) for file in files):
        return ()
    return tuple(str(file).removeprefix(root) for file in files)
