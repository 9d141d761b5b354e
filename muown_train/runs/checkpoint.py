"""The checkpoints of a run: complete or absent, tensors in safetensors and the rest in JSON, for any number of ranks.

A checkpoint is the union of what the ranks hold under names such as `model/blocks.0.mlp.out.weight` or
`optimizer/blocks.0.mlp.out.weight/momentum_buffer`. If several ranks hold a tensor, as all hold every weight, one of
them writes it, such that all have about as many bytes to write. Of a DTensor each rank holds its own rows, and the same
rule decides which of their replicas is written. Training pauses only for a copy to host memory; a thread of each rank
writes the rank's part while training goes on.

A checkpoint is written beside its final place, fsynced and renamed. If the files of a checkpoint do not match its
index, the trainer names it, sets it aside as `damaged-…`, never deletes it, and uses the one before it. Nothing is
unpickled. checkpoint_files.py knows the files, checkpoint_reader.py reads them.

torch.distributed.checkpoint is not used: its FileSystemWriter pickles metadata; its HuggingFaceStorageWriter, for
safetensors, writes everything that is not a tensor as torch.save pickles it, keeps no checksums, and does not say which
rank wrote what.
"""

import copy
import json
import math
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muown_train.config.stored_files import ROWS
from muown_train.runs import checkpoint_files as files
from muown_train.runs.checkpoint_reader import OpenCheckpoint, open_files
from muown_train.runs.state import Part, Stateful, flatten, list_parts, unflatten
from muown_train.runtime.distributed import World

DTYPES = {  # dtype -> its name in safetensors
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


def assign_writers(held: Sequence[Mapping[Part, int | None]]) -> dict[Part, int]:
    """Return the rank that writes each part of a checkpoint: one of those that hold it.

    What is no tensor is written by the first rank that holds it. A tensor, or some rows of one, goes to the one of its
    holders that has the fewest bytes to write, the largest first; what only one rank holds is counted before.

    Args:
        held: for each rank the bytes of each tensor, or rows of one, that it holds, and None for what is no tensor.
    """
    holders: dict[Part, list[int]] = {}
    for rank, sizes in enumerate(held):
        for key in sizes:
            holders.setdefault(key, []).append(rank)
    loads, writers = [0] * len(held), {}
    bytes_of = {key: held[ranks[0]][key] or 0 for key, ranks in holders.items()}
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -bytes_of[key], key)):
        ranks = holders[key]
        is_tensor = held[ranks[0]][key] is not None
        writer = min(ranks, key=lambda rank: loads[rank]) if is_tensor else ranks[0]
        loads[writer] += bytes_of[key]
        writers[key] = writer
    return writers


class _WriterThread(threading.Thread):
    """A thread that writes this rank's part of a checkpoint.

    It is a daemon, so that a program that ends does not wait for the disk: an unpublished checkpoint is absent.
    """

    def __init__(self, index: dict[str, Any], partial: Path, final: Path, write: Callable[[], files.Files]) -> None:
        super().__init__(name=f"writes {final.name}", daemon=True)
        self.index, self.partial, self.final, self.write = index, partial, final, write
        self.written: files.Files = {}
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.written = self.write()
        except Exception as error:  # `get_files` raises it, so that all ranks learn of it
            self.error = error

    def get_files(self) -> files.Files:
        """Return the files written, once the thread has ended; raise an OSError if it failed."""
        if isinstance(self.error, OSError):
            raise self.error
        if self.error:
            raise OSError(str(self.error)) from self.error
        return self.written


class HostCopy:
    """A copy of tensors in one block of host memory, laid out as in a safetensors file.

    The next copy reuses the block, since fresh pages cost as much as the copying. For a CUDA device the block is
    pinned; torch rounds pinned memory up to a power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self.block = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> tuple[bytes, memoryview]:
        """Copy the tensors; return head and data of the file that holds them. The data are valid until the next call.

        Args:
            tensors: dense tensors of any shape, strides and device, with a dtype in DTYPES.
        """
        # The format allows no gaps: writing the widest elements first keeps all of them aligned.
        order = sorted(tensors, key=lambda key: (-tensors[key].itemsize, key))
        places, end = {}, 0
        for key in order:
            start, end = end, end + tensors[key].numel() * tensors[key].itemsize
            places[key] = (start, end)
        if self.block.numel() < end:
            self.block = torch.empty(end, dtype=torch.uint8, pin_memory=self.pinned)
        with _use_one_thread():
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
def _use_one_thread() -> Iterator[None]:
    """Let torch use one thread: one core copies about as fast as memory allows, and several wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: the folder that holds them; it is made when the first is written.
        keep: the number of the newest checkpoints that stay, at least 1; the disk needs room for one more.
        keep_every: a checkpoint stays too if its step is a multiple of this.
        keep_best: the checkpoint with the lowest validation loss stays too.
        warn: called with a sentence for the user.
        metadata: a description of the run in JSON, stored with each checkpoint; `read_newest_metadata` returns it.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        keep: int = 2,
        keep_every: int | None = None,
        keep_best: bool = False,
        warn: Callable[[str], None] = print,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.world, self.warn, self.metadata = folder, world, warn, metadata or {}
        self.keep, self.keep_every, self.keep_best = keep, keep_every, keep_best
        self._copy = HostCopy(world.device)
        self._writer: _WriterThread | None = None
        self._remover: threading.Thread | None = None
        self._damaged: set[Path] = set()  # damaged checkpoints that could not be set aside

    def save(self, step: int, state: Mapping[str, Stateful], loss: float | None = None, wait: bool = False) -> None:
        """Copy the state after a step and begin to write it; do nothing if the step is saved already.

        The call is collective. It settles an earlier save first; if that failed, the user is warned and this save
        replaces it.

        Args:
            loss: the validation loss after this very step.
            wait: return only when the checkpoint is published.

        Raises:
            OSError: on every rank, if any rank cannot write; the earlier checkpoints are as they were.
        """
        self.settle_or_warn()
        final = self.folder / f"step-{step:08d}"
        parts = list_parts(flatten({name: stateful.state_dict() for name, stateful in state.items()}))
        sizes = {part: value.nbytes if isinstance(value, Tensor) else None for part, value in parts.items()}
        begun = self._attempt_on_all(lambda: (self._begin(final), sizes))
        partial = begun[0][0]
        if partial is None:
            return
        writers = assign_writers([sizes for _, sizes in begun])
        rank = self.world.rank
        mine = {part: value for part, value in parts.items() if writers[part] == rank}
        tensors = {part.key: value for part, value in mine.items() if isinstance(value, Tensor)}
        rest = {part.key: value for part, value in mine.items() if part.key not in tensors}
        if rows := {part.key: part.rows for part in mine if part.rows}:
            rest[ROWS] = rows
        head, data = self._copy.take(tensors)
        text = json.dumps(rest).encode()
        index = {
            "format": files.FORMAT_OF_ROWS if any(part.rows for part in writers) else files.FORMAT,
            "step": step,
            "valid_loss": loss if loss is not None and math.isfinite(loss) else None,
            "about": copy.deepcopy(self.metadata),
        }
        self._writer = _WriterThread(index, partial, final, lambda: files.write_rank(partial, rank, head, data, text))
        self._writer.start()
        if wait:
            self.settle(wait=True)

    def settle(self, wait: bool = False) -> bool:
        """Publish the pending checkpoint once all ranks have written their parts.

        The call is collective; it communicates only if a checkpoint is pending.

        Args:
            wait: wait until all ranks have written.

        Returns:
            True if nothing is pending any more.

        Raises:
            OSError: on every rank, if any could not write. Nothing is pending then, and earlier checkpoints stay.
        """
        settled = self._writer is None or self._publish(self._writer, wait)
        if wait and self._remover:
            self._remover.join()
        return settled

    def settle_or_warn(self) -> None:
        """Wait and settle, but only warn if the save failed, so that the caller can continue. A collective call."""
        step = self._writer.index["step"] if self._writer else None
        try:
            self.settle(wait=True)
        except OSError as error:
            if self.world.is_main:
                self.warn(f"the checkpoint after step {step} is lost: {error}")

    def load(self, state: Mapping[str, Stateful], other: Path | None = None) -> int | None:
        """Load the newest undamaged checkpoint into `state`; return its step, or None if there is none.

        The call is collective.

        Args:
            other: a whole checkpoint of another run to load instead.

        Raises:
            ValueError: the checkpoint belongs to another model, optimizer or data, or none can be used.
            OSError: the other run has removed its checkpoint meanwhile.
        """
        try:
            opened = open_files(other) if other else self.open_newest()
        except files.CheckpointRemovedError as error:  # this is not a wrong setting: the same command may go on later
            raise OSError(str(error)) from error
        if opened is None:
            return None
        nested = unflatten(opened.tensors | opened.rest)
        for name, stateful in state.items():
            try:
                stateful.load_state_dict(nested.get(name, {}))
            except KeyError as error:  # a stranger may have left out what every run saves
                raise ValueError(
                    f"{opened.folder} lacks {error} of the state of {name}: no run can go on from it"
                ) from error
        return opened.step

    def open_newest(self) -> OpenCheckpoint | None:
        """Open the newest undamaged checkpoint; damaged ones are set aside. A collective call.

        A pending save is settled first, as by `save`.

        Raises:
            ValueError: on every rank, if there are checkpoints but none that can be used.
        """
        self.settle_or_warn()
        newest = self.world.run_on_main(self._find_newest)
        return open_files(newest) if newest else None

    def abandon(self) -> None:
        """Remove the files of the pending checkpoint, which a run that fails never publishes; not collective."""
        if self._writer and self.world.is_main:
            shutil.rmtree(self._writer.partial, ignore_errors=True)

    def set_aside_newest(self, step: int, reason: str) -> None:
        """Set the newest checkpoint aside if it is of this step and not the only one; a collective call."""

        def set_aside() -> None:
            checkpoints = files.list_checkpoints(self.folder)
            if len(checkpoints) > 1 and files.parse_step(checkpoints[0]) == step:
                self._set_aside(checkpoints[0], f"checkpoint {checkpoints[0]} is left out ({reason})")

        self.settle_or_warn()
        self.world.run_on_main(set_aside)

    def _begin(self, final: Path) -> Path | None:
        """Make the folder to write to and return it, on the main rank; return None if the checkpoint exists."""
        if not self.world.is_main or (final.exists() and final not in self._damaged):
            return None
        return files.make_partial_folder(final)

    def _publish(self, writer: _WriterThread, wait: bool) -> bool:
        """Do the work of `settle`."""
        if wait:
            writer.join()
        elif not all(self.world.gather(not writer.is_alive())):
            return False
        self._writer = None
        main, partial = self.world.is_main, writer.partial
        try:
            parts = self._attempt_on_all(writer.get_files)
            index = {**writer.index, "files": {name: file for part in parts for name, file in part.items()}}
            self._attempt_on_all(lambda: files.publish(partial, writer.final, index) if main else None)
        except OSError:
            if main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if main:
            try:
                self._remover = files.prune(self.folder, self.keep, self.keep_every, self.keep_best, self.warn)
            except OSError as error:  # the new checkpoint is published all the same
                self.warn(f"old checkpoints stay: {error}")
        return True

    def _find_newest(self) -> Path | None:
        """Find the newest undamaged checkpoint, on the main rank; return None if there never was one."""
        newest = files.find_newest_whole(
            files.list_checkpoints(self.folder),
            lambda one, fault: self._set_aside(one, f"checkpoint {one} is damaged ({fault})"),
        )
        if newest is None and any(self.folder.glob("damaged-step-*")):
            raise ValueError(
                f"no checkpoint in {self.folder} can be used: restore one, or give the run another name to start again"
            )
        return newest

    def _set_aside(self, damaged: Path, sentence: str) -> None:
        try:
            aside = files.set_aside(damaged)
        except OSError as error:
            self._damaged.add(damaged)
            self.warn(f"{sentence} and cannot be set aside ({error}): trying the one before it")
        else:
            self.warn(f"{sentence}: set aside as {aside.name}, trying the one before it")

    def _attempt_on_all(self, action: Callable[[], Any]) -> list[Any]:
        """Return the results of all ranks, or raise one OSError on all of them: no rank waits for one that failed."""
        result, error = None, None
        try:
            result = action()
        except OSError as exception:
            reason = exception.strerror or exception
            # all ranks raise it, and only one of them may have a full disk
            where = f" (rank {self.world.rank} on {socket.gethostname()})" if self.world.size > 1 else ""
            error = exception.errno, f"cannot write a checkpoint to {self.folder}: {reason}{where}"
        results = self.world.gather((result, error))
        errors = [error for _, error in results if error]
        if errors:
            raised = OSError(errors[0][1])
            raised.errno = errors[0][0]  # the number tells a full disk from a wrong setting
            raise raised
        return [result for result, _ in results]
