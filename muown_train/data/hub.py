"""The data files of a data set on the hub, read as streams of documents by `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from muown_train.data.documents import well_formed

BATCH = 256  # documents handed over at once
TIMEOUT = 30.0  # seconds for the first answer of the hub


@dataclass(frozen=True)
class HubFiles:
    """The files of one split: their number, and the documents of each by number."""

    label: str
    revision: str  # the commit, so that all ranks and every resume read the same
    files: int
    text: str
    dataset: Any  # datasets.IterableDataset

    def documents(self, file: int, first: int) -> Iterator[str]:
        """Documents of a file from number `first` on; where the text is null there is an empty one.

        Raises ConnectionError naming data set, file and cause.
        """
        part = self.dataset.shard(num_shards=self.files, index=file).select_columns([self.text])
        passed = 0
        try:
            for table in part.with_format("arrow").iter(batch_size=BATCH):
                column = table.column(self.text).slice(max(0, first - passed))
                passed += table.num_rows
                for text in column.to_pylist():
                    yield well_formed(text or "")
        except Exception as error:  # of HTTP, of the file system or of the format, as versions differ
            raise ConnectionError(f"data set {self.label}: reading file {file} failed ({_reason(error)})") from error


def open_hub(path: str, name: str | None, split: str, text: str, revision: str) -> HubFiles:
    """Looks the data set up; reads no document.

    Raises ConnectionError where the hub cannot be reached, ValueError where it has no such data set,
    configuration, split or column.
    """
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar
    from huggingface_hub import HfApi, errors

    label = f"{path} ({name})" if name else path
    disable_progress_bar()
    try:
        commit = HfApi().dataset_info(path, revision=revision, timeout=TIMEOUT).sha or revision
        dataset = load_dataset(path, name, split=split, revision=commit, streaming=True)
    except errors.HFValidationError as error:
        raise ValueError(f"data.path={path!r} is not a name of a data set on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"the hub has no data set {path}, or it is private or gated and needs a login") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"data set {path} has no revision {revision!r} (data.revision)") from error
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"data set {label}, split {split!r}: {_reason(error)}") from error
    except Exception as error:
        raise ConnectionError(f"data set {label} cannot be fetched from the hub ({_reason(error)})") from error
    if dataset.features is not None and text not in dataset.features:
        raise ValueError(
            f"data set {label} has no column {text!r} (data.text); its columns: {', '.join(dataset.features)}"
        )
    return HubFiles(label, commit, dataset.num_shards, text, dataset)


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
