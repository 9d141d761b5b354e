"""Write, find, verify and remove the files of a checkpoint. checkpoint_reader.py reads them.

    step-00000200/
        rank-00000.safetensors  rank-00000.json    the tensors that a rank wrote, and everything else, such as `rows`:
                                                   of which tensors it wrote some rows, and which
        index.json                                 step, validation loss, metadata of the run, size and SHA-256 of each
                                                   file, and in its first line the SHA-256 of all that follows

The safetensors file is written here, in pieces, and not by the library's `save_file`, for two reasons. Each piece is
hashed while it is in the cache. And when the program ends, the thread that writes may be cut off between two pieces,
whereas cutting it off inside the library aborts the process.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from muown_train.config.stored_files import (
    ROWS,
    Layout,
    check_entries,
    check_index,
    check_keys,
    check_rows,
    check_state,
    check_tensors,
    join_rows,
    shorten,
)
from muown_train.runtime.atomic_files import open_regular, parse_json, read_regular, sync_to_disk

FORMAT = 1  # version of the folder's layout and of index.json
FORMAT_OF_ROWS = 2  # the same, of a checkpoint in which files hold rows of tensors
INDEX = "index.json"
PIECE = 4 << 20  # bytes written and hashed at a time

Files = dict[str, dict[str, Any]]  # name -> {"bytes": int, "sha256": hex digits}


def write_rank(folder: Path, rank: int, head: bytes, data: memoryview, rest: bytes) -> Files:
    """Write and fsync one rank's part of a checkpoint.

    Args:
        head, data: the safetensors file, as `HostCopy.take` returns it.
        rest: everything that is not a tensor, as JSON.
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
    """Add the index to a complete folder and give it its final name; both are on the disk on return."""
    _write(partial / INDEX, encode_index(index))
    sync_to_disk(partial)
    partial.rename(final)
    sync_to_disk(final.parent)


def make_partial_folder(final: Path) -> Path:
    """Make a folder in which a new checkpoint is written, and remove what earlier processes left, as far as it can be.

    Returns:
        The folder, whose name is its own: a leftover that cannot be removed may stand where it usually is.
    """
    for leftover in final.parent.glob("partial-step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = _find_free_name(final, "partial-")
    partial.mkdir(parents=True)
    return partial


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint to a free name that begins with `damaged-`, and return its new path."""
    return checkpoint.rename(_find_free_name(checkpoint, "damaged-"))


def _find_free_name(checkpoint: Path, prefix: str) -> Path:
    path = checkpoint.with_name(f"{prefix}{checkpoint.name}")
    while os.path.lexists(path):
        path = path.with_name(f"{path.name}+")
    return path


def prune(
    folder: Path, keep: int, keep_every: int | None, keep_best: bool, warn: Callable[[str], None] = print
) -> threading.Thread:
    """Remove the checkpoints that need not stay. An incomplete checkpoint neither counts nor is removed.

    On return their names are gone, and a thread removes the files: a file system needs time to free gigabytes.

    Args:
        keep: the number of the newest checkpoints that stay.
        keep_every: a checkpoint stays too if its step is a multiple of this.
        keep_best: the checkpoint with the lowest validation loss stays too.
        warn: called with a sentence for each checkpoint that could not be removed.
    """
    losses = {index["step"]: index.get("valid_loss") for index in read_complete_indices(folder)}
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
            # a half-removed one is never taken for a damaged one
            removed.append(old.rename(_find_free_name(old, "partial-")))
        except OSError as error:
            warn(f"an old checkpoint stays, since it cannot be removed: {error}")
    thread = threading.Thread(target=_remove, args=(removed,), daemon=True)
    thread.start()
    return thread


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # the next save removes what is left


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first, whatever their state."""
    try:
        names = os.listdir(folder)  # unlike glob it does not take a folder that cannot be read for an empty one
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise ValueError(f"{folder} must be the folder of the checkpoints, and is a file: move it away") from None
    paths = [folder / name for name in names if re.fullmatch(r"step-\d{8,}", name)]
    return sorted(paths, key=parse_step, reverse=True)


def parse_step(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved, from the name of its folder."""
    return int(checkpoint.name[5:])


def encode_index(index: Mapping[str, Any]) -> bytes:
    """Return the content of index.json."""
    body = json.dumps(index, indent=1).encode()[1:]
    return _encode_digest(body) + body


def _encode_digest(body: bytes) -> bytes:
    return b'{"sha256": "%s",' % hashlib.sha256(body).hexdigest().encode()


def decode_index(content: bytes) -> dict[str, Any]:
    """Return the index that index.json holds. (Earlier versions of the program wrote it without a digest.)

    Raises:
        ValueError: it is damaged; every bit counts.
        OtherFormatError: another version of the program wrote it.
    """
    index = check_entries(parse_json(content), {})
    if "sha256" in index:
        body = content[len(_encode_digest(b"")) :]
        if content != _encode_digest(body) + body:
            raise ValueError("it has another SHA-256 than when it was written")
        del index["sha256"]
    if odd := sorted(index.keys() - {"format", "step", "valid_loss", "about", "files"}):
        raise ValueError(f"it has an unknown entry {odd[0]!r}")
    if index.get("format") not in (FORMAT, FORMAT_OF_ROWS):
        found = shorten(index.get("format"))
        raise OtherFormatError(
            f"it has format {found}, this version of the program reads {FORMAT} and {FORMAT_OF_ROWS}"
        )
    return check_index(index)


def read_checked_index(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's index.json; the errors are those of `read_regular` and `decode_index`."""
    return decode_index(read_regular(checkpoint / INDEX))


def read_index(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's index.json; {} if there is none, or if it is damaged.

    Raises:
        OSError: it cannot be read, which is not damage.
    """
    try:
        return read_checked_index(checkpoint)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}


def holds_weights_alone(index: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint holds weights alone: in a run the main rank saves counters beside its tensors."""
    try:
        return bool(index["files"]["rank-00000.json"]["bytes"] == len("{}"))
    except (KeyError, TypeError):
        return False


def read_complete_indices(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the indices of the checkpoints whose files are there and have the right sizes, newest first."""
    for path in list_checkpoints(folder):
        index = read_index(path)
        try:
            if index and not _find_wrong_file(path, index):
                yield {**index, "step": parse_step(path)}
        except FileNotFoundError:
            continue


class OtherFormatError(ValueError):
    """A checkpoint has the format of another version of the program, which is not damage."""


class CheckpointRemovedError(ValueError):
    """A checkpoint was there and is no longer: a run keeps only its newest ones."""


def make_removed_error(checkpoint: Path) -> CheckpointRemovedError:
    """Return the error that says that a run has removed a checkpoint while it was read."""
    return CheckpointRemovedError(f"{checkpoint}: the run has removed step {parse_step(checkpoint):,} meanwhile")


def find_newest_whole(checkpoints: Sequence[Path], on_damage: Callable[[Path, str], None]) -> Path | None:
    """Return the first undamaged checkpoint of a list; None if there is none. Every file is read and hashed.

    Args:
        checkpoints: as `list_checkpoints` returns them, newest first.
        on_damage: called with each damaged checkpoint that is passed over and a sentence on what is wrong with it.

    Raises:
        OtherFormatError: another version of the program wrote it.
        CheckpointRemovedError: a checkpoint vanished while it was read.
    """
    for checkpoint in checkpoints:
        fault = find_fault(checkpoint)
        if fault is None:
            return checkpoint
        if not checkpoint.exists():
            raise make_removed_error(checkpoint)
        on_damage(checkpoint, fault)
    return None


def find_fault(checkpoint: Path) -> str | None:
    """Return a sentence on what is wrong with a checkpoint; None if it is whole.

    Raises:
        OtherFormatError: another version of the program wrote it.
        OSError: a file cannot be read now, which is not damage: the disk, the network or the process may be at fault.
    """
    try:
        index = read_checked_index(checkpoint)
        if index.get("step") != parse_step(checkpoint):
            return f"{INDEX} has step={shorten(index.get('step'))}, which is not that of the folder"
        return _find_wrong_file(checkpoint, index, hashes=True) or _find_wrong_state(checkpoint, index)
    except OtherFormatError as error:
        raise OtherFormatError(f"{checkpoint / INDEX}: {error}") from None
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except NotADirectoryError:
        return "it is a file"
    except ValueError as error:
        return f"{INDEX} cannot be used: {error}"


def _find_wrong_state(checkpoint: Path, index: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the content of the files of a checkpoint, which may be a stranger's."""
    try:
        state, _ = read_content(checkpoint, index)
    except ValueError as error:
        return str(error)
    trained = state.get("trainer/step", index["step"])
    return None if trained == index["step"] else f"it holds a run after step {trained}, which is not that of the folder"


def read_content(checkpoint: Path, index: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Layout]]:
    """Return what a checkpoint holds: what is not a tensor by key, and where each tensor lies in its files.

    Raises:
        ValueError: the content of a file is wrong, or the files do not fit together; the message names them.
    """
    state: dict[str, Any] = {}
    tensors, rows = {}, {}
    for name in index.get("files", {}):
        path = checkpoint / name
        try:
            if path.suffix == ".json":
                own = check_state(parse_json(read_regular(path)))
                rows[path.stem] = check_rows(own.pop(ROWS, {})) if index["format"] == FORMAT_OF_ROWS else {}
                state |= own
            else:
                with open_regular(path) as file:
                    tensors[path.stem] = _check_random_states(check_tensors(file, index["files"][name]["bytes"]))
        except ValueError as error:
            raise ValueError(f"{name} cannot be used: {error}") from None
    try:
        layouts = join_rows(tensors, rows)
        check_keys(layouts | state)
    except ValueError as error:
        raise ValueError(f"its state cannot be used: {error}") from None
    return state, layouts


def _check_random_states(tensors: dict[str, tuple[str, list[int]]]) -> dict[str, tuple[str, list[int]]]:
    """Return dtypes and shapes of tensors, after a check of those that are states of random number generators."""
    import torch  # here, so that a start is counted before anything large is imported

    for key, (dtype, shape) in tensors.items():
        length = {"torch": torch.get_rng_state().numel(), "cuda": 16}.get(key.rpartition("/")[2])
        if re.fullmatch(r"random/\d+/(torch|cuda)", key) and (dtype, shape) != ("U8", [length]):
            raise ValueError(f"its tensor {key!r} has dtype {dtype} and shape {shape}: it is no state of a generator")
    return tensors


def _find_wrong_file(checkpoint: Path, index: Mapping[str, Any], hashes: bool = False) -> str | None:
    """Return what is wrong with the files that an index lists: names, sizes and, with `hashes`, content."""
    files: Files = index.get("files", {})
    # An index must list the two files of each rank and everything that lies there.
    ranks = max(1, (len(files) + 1) // 2)
    wanted = {f"rank-{rank:05d}.{kind}" for rank in range(ranks) for kind in ("json", "safetensors")}
    if odd := files.keys() - wanted:
        return f"{INDEX} names {min(odd)}"
    if missing := (wanted | {path.name for path in checkpoint.glob("rank-*")}) - files.keys():
        return f"{INDEX} does not name {min(missing)}"
    for name, expected in files.items():
        path = checkpoint / name
        if not os.path.lexists(path):
            return f"{name} is missing"
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected.get("bytes"):
                    return f"{name} has {size} bytes instead of {expected.get('bytes')}"
                if hashes and hashlib.file_digest(file, "sha256").hexdigest() != expected.get("sha256"):
                    return f"{name} has another SHA-256 than when it was written"
        except ValueError as error:
            return str(error)
    return None
