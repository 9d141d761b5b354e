"""The files of one checkpoint: a copy of a rank's tensors in host memory, its way to the disk, and the index over all.

    step-00000200/
        rank-00000.safetensors  rank-00000.json    what a rank wrote
        index.json                                 step, validation loss, what the run is, size and SHA-256 of each file

The safetensors are written here and not by the library's `save_file`, in pieces: each is hashed while it is in the
cache, and a thread may be cut off between two of them when the program ends; inside of the library that aborts it.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muown_train.runtime.atomic_files import sync

FORMAT = 1  # of the folder and of index.json
INDEX = "index.json"
PIECE = 4 << 20  # bytes written and hashed at a time
DTYPES = {  # as safetensors calls them
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}

Files = dict[str, dict[str, Any]]  # name -> {"bytes": int, "sha256": hex digits}


class HostCopy:
    """Tensors copied into one block of host memory, laid out as in a safetensors file.

    The block is taken again for the next copy, since fresh pages cost as much as the copying. Of a CUDA device it is
    pinned; torch rounds pinned memory up to a power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self.block = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> tuple[bytes, memoryview]:
        """Head and data of the file with these tensors; the data are valid until the next call.

        Args:
            tensors: of any shape, strides and device, dense, of a dtype in DTYPES.
        """
        # the format allows no gaps: the widest elements first keep all of them aligned
        order = sorted(tensors, key=lambda key: (-tensors[key].itemsize, key))
        places, end = {}, 0
        for key in order:
            start, end = end, end + tensors[key].numel() * tensors[key].itemsize
            places[key] = (start, end)
        if self.block.numel() < end:
            self.block = torch.empty(end, dtype=torch.uint8, pin_memory=self.pinned)
        with _one_thread():
            for key, (start, stop) in places.items():
                tensor = tensors[key]
                self.block[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        if self.pinned:
            torch.cuda.synchronize()
        entries = {
            key: {"dtype": DTYPES[tensors[key].dtype], "shape": list(tensors[key].shape), "data_offsets": place}
            for key, place in places.items()
        }
        head = json.dumps(entries).encode()
        head += b" " * (-len(head) % 8)
        return len(head).to_bytes(8, "little") + head, self.block.numpy().data[:end]


@contextmanager
def _one_thread() -> Iterator[None]:
    """One core copies about as fast as memory allows; several wait for one another at each tensor, if busy for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def write_rank(folder: Path, rank: int, head: bytes, data: memoryview, rest: bytes) -> Files:
    """Write and fsync one rank's part.

    Args:
        head, data: as `HostCopy.take` gives them.
        rest: JSON.
    """
    return {
        f"rank-{rank:05d}.safetensors": _write(folder / f"rank-{rank:05d}.safetensors", head, data),
        f"rank-{rank:05d}.json": _write(folder / f"rank-{rank:05d}.json", rest),
    }


def _write(path: Path, *parts: bytes | memoryview) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]  # other threads run while one is written or hashed
                file.write(piece)
                digest.update(piece)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def publish(partial: Path, final: Path, index: Mapping[str, Any]) -> None:
    """Add the index to a complete folder and give it its name, on the disk on return."""
    _write(partial / INDEX, json.dumps(index, indent=1).encode())
    sync(partial)
    partial.rename(final)
    sync(final.parent)


def partial_name(final: Path) -> Path:
    """Where a checkpoint is while it is written or removed."""
    return final.with_name(f"partial-{final.name}")


def fresh(folder: Path) -> None:
    """Make the folder of a new checkpoint, and remove what earlier processes left."""
    for leftover in folder.parent.glob("partial-step-*"):
        shutil.rmtree(leftover)
    folder.mkdir(parents=True)


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whatever their state."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """After which update the checkpoint in a folder was."""
    return int(checkpoint.name[5:])


def read_index(folder: Path) -> dict[str, Any] | None:
    """What index.json of a checkpoint holds; None where it cannot be read."""
    try:
        index = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError):
        return None
    return index if isinstance(index, dict) else None


def weights_alone(index: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds nothing but weights: of a run's the main rank wrote counters beside its tensors."""
    try:
        return bool(index["files"]["rank-00000.json"]["bytes"] == len("{}"))
    except (KeyError, TypeError):
        return False


def complete(folder: Path) -> Iterator[dict[str, Any]]:
    """Indices of those checkpoints whose files are there with their sizes, newest first."""
    for path in newest_first(folder):
        index = read_index(path)
        try:
            if (
                index
                and not _misnamed(path, index["files"])
                and all((path / name).stat().st_size == file["bytes"] for name, file in index["files"].items())
            ):
                yield {**index, "step": step_of(path)}
        except (OSError, KeyError, TypeError, AttributeError):
            continue


def prune(
    folder: Path, keep: int, keep_every: int | None, keep_best: bool, warn: Callable[[str], None] = print
) -> threading.Thread:
    """Remove the checkpoints that need not stay. One that is not complete neither counts nor goes.

    Their names are gone on return, and a thread removes the files: a file system takes its time to free gigabytes.

    Args:
        keep: how many of the newest stay.
        keep_every: those stay too whose step is a multiple of this.
        keep_best: the one with the lowest validation loss stays too.
        warn: called with a sentence for each that could not be removed.
    """
    losses = {index["step"]: index.get("valid_loss") for index in complete(folder)}
    stay = set(list(losses)[:keep])
    if keep_every:
        stay |= {step for step in losses if step % keep_every == 0}
    known = [(loss, step) for step, loss in losses.items() if loss is not None]
    if keep_best and known:
        stay.add(min(known)[1])
    removed = []
    for step in losses.keys() - stay:
        old = folder / f"step-{step:08d}"
        try:
            removed.append(old.rename(partial_name(old)))  # one half removed is never taken for a damaged one
        except OSError as error:
            warn(f"an old checkpoint stays, since it cannot be removed: {error}")
    thread = threading.Thread(target=_remove, args=(removed,), daemon=True)
    thread.start()
    return thread


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # what is left goes when the next save begins


class OtherFormat(Exception):
    """A checkpoint of another version of the program, which is no damage."""


def fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None.

    Raises:
        OtherFormat
    """
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["format"] != FORMAT:
            raise OtherFormat(f"{folder} has format {index['format']}, this version of the program reads {FORMAT}")
        if misnamed := _misnamed(folder, index["files"]):
            return misnamed
        for name, expected in index["files"].items():
            path = folder / name
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    return f"{name} has another SHA-256 than when it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{INDEX} cannot be used: {error}"
    return None


def _misnamed(folder: Path, named: Files) -> str | None:
    """What is wrong with the names that an index lists: the two files of each rank, and all that lie there."""
    ranks = max(1, (len(named) + 1) // 2)
    wanted = {f"rank-{rank:05d}.{kind}" for rank in range(ranks) for kind in ("json", "safetensors")}
    if odd := named.keys() - wanted:
        return f"{INDEX} names {min(odd)}"
    if missing := (wanted | {path.name for path in folder.glob("rank-*")}) - named.keys():
        return f"{INDEX} does not name {min(missing)}"
    return None
