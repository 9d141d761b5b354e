"""The data files of a data set on the hub, read as streams of documents that outlast failures of the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from muown_train.data.corpus import print_line
from muown_train.data.hub.parquet import BATCH, TIMEOUT, read_texts, row_group_sizes
from muown_train.data.hub.retry import Retry, reason, transient
from muown_train.data.text.documents import well_formed

FOOTERS_AT_ONCE = 8
LEAST = {"streams": 1, "shuffle": 1, "retries": 0}  # of the settings that change no document
T = TypeVar("T")


@dataclass(frozen=True)
class Unit:
    """What a stream reads in one go: a file, or consecutive row groups of one."""

    file: int
    begin: int = 0  # row group
    end: int | None = None  # the row group after the last; None: all there are
    skip: int = 0  # documents at the beginning that are held out


@dataclass(frozen=True)
class HubFiles:
    """The files of one split, in the order of `datasets`, and the documents of each part of them.

    Parquet files are read by `urls`, row group by row group; others, which have none, by `datasets`, which
    reads a file from its beginning whatever document is asked for.
    """

    label: str
    revision: str  # the commit, so that all ranks and every resume read the same
    names: tuple[str, ...]  # of the files
    text: str
    urls: tuple[str, ...] = ()
    dataset: Any = None  # datasets.IterableDataset
    retry: Retry = field(default_factory=Retry)
    progress: Callable[[str], None] = print_line
    _said: set[Any] = field(default_factory=set, compare=False)

    def documents(self, unit: Unit, first: int) -> Iterator[str]:
        """Documents of a unit from number `first` on, numbered as rows of the file: a null text is an empty one.

        Failures that may pass are retried at the document where they came. Raises ConnectionError naming data
        set, file and cause after the limit, and at once for what will not pass.
        """
        read = partial(self._by_row_groups if self.urls else self._by_datasets, unit)
        for text in self._persistent(unit, unit.file, read, first + unit.skip):
            yield well_formed(text or "")

    def row_groups(self) -> list[list[int]]:
        """Documents in each row group of each file, from the footers; raises ConnectionError as `documents` does."""

        def sizes(file: int) -> list[int]:
            return next(self._persistent(("footer", file), file, lambda _: iter([row_group_sizes(self.urls[file])]), 0))

        pool = ThreadPoolExecutor(FOOTERS_AT_ONCE)
        try:
            return list(pool.map(sizes, range(len(self.urls))))
        finally:  # after one has failed, or Ctrl-C, the others need not wait any longer
            pool.shutdown(wait=False, cancel_futures=True)
            self.retry.interrupt()
            pool.shutdown()

    def _persistent(self, key: Any, file: int, read: Callable[[int], Iterator[T]], first: int) -> Iterator[T]:
        """Items of read(first), which is called again, with the number of the item, where one fails."""
        failures, stop = 0, self.retry.session()
        while True:
            try:
                for item in read(first):
                    yield item
                    first, failures = first + 1, 0
                return
            except Exception as error:  # of HTTP, of the file system or of the format, as versions differ
                failures += 1
                what = f"data set {self.label}: reading {self.names[file]} failed"
                if not transient(error):
                    raise ConnectionError(f"{what} ({reason(error)})") from error
                if failures > self.retry.limit:
                    raise ConnectionError(f"{what} {failures} times in a row ({reason(error)})") from error
                if key not in self._said:
                    self._said.add(key)
                    self.progress(f"{what} ({reason(error)}); trying again for {self.retry.minutes:.0f} minutes")
                self.retry.wait(failures, error, stop)

    def _by_row_groups(self, unit: Unit, first: int) -> Iterator[str | None]:
        return read_texts(self.urls[unit.file], self.text, unit.begin, unit.end, first)

    def _by_datasets(self, unit: Unit, first: int) -> Iterator[str | None]:
        part = self.dataset.shard(num_shards=len(self.names), index=unit.file).select_columns([self.text])
        for table in part.with_format("arrow").iter(batch_size=BATCH):
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
    """Looks the data set up; reads no document.

    Raises ConnectionError where the hub cannot be reached, ValueError where it has no such data set,
    configuration, split or column.
    """
    from datasets import load_dataset_builder
    from datasets.utils.logging import disable_progress_bar
    from huggingface_hub import HfApi, errors

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
        raise ValueError(f"data set {label}, split {split!r}: {reason(error)}") from error
    except Exception as error:
        raise ConnectionError(f"data set {label} cannot be fetched from the hub ({reason(error)})") from error
    _check_column(dataset.features, text, label)
    names = _parquet_names(builder, path, commit, split)
    if len(names) == dataset.num_shards:
        urls = tuple(_url(path, name, commit) for name in names)
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


def _parquet_names(builder: Any, path: str, commit: str, split: str) -> tuple[str, ...]:
    """The split's files within the repository; none where it is not made of whole parquet files there."""
    from datasets.packaged_modules.parquet.parquet import Parquet

    if not isinstance(builder, Parquet) or getattr(builder.config, "filters", None) is not None:
        return ()
    splits: dict[Any, list[Any]] = builder.config.data_files or {}
    files = next((files for key, files in splits.items() if str(key) == split), [])
    root = f"hf://datasets/{path}@{commit}/"
    if not all(str(file).startswith(root) for file in files):
        return ()
    return tuple(str(file).removeprefix(root) for file in files)


def _url(path: str, name: str, commit: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(path, name, repo_type="dataset", revision=commit)
