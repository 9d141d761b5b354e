"""Checkpoints: tensors in safetensors, everything else in JSON, complete or absent, for any number of ranks.

A checkpoint is the union of what the ranks hold under names such as `model/blocks.0.mlp.out.weight` or
`optimizer/blocks.0.mlp.out.weight/momentum_buffer`; what several ranks hold is written by the first of them. Training
pauses for a copy to host memory; each rank's thread writes its part while training goes on (checkpoint_files.py).

It is written beside its final place, fsynced and renamed. A checkpoint whose files do not match its index is named,
set aside as `damaged-…` and never deleted; the one before it is used. Nothing is unpickled.

Not torch.distributed.checkpoint: of its writers FileSystemWriter pickles its metadata, and HuggingFaceStorageWriter,
for safetensors, writes what is no tensor as torch.save pickled it, keeps no checksums and does not say who wrote what.
"""

import copy
import json
import math
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from muown_train.optim.param_groups import canonical_name
from muown_train.runs import checkpoint_files as files
from muown_train.runtime.distributed import World

State = dict[str, Any]  # nested; keys are strings without "/", leaves tensors or JSON


class Stateful(Protocol):
    """What can be saved: state_dict() is local, without collectives."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State, /) -> Any: ...


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a/b": 1}; an empty dictionary is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        assert isinstance(key, str) and "/" not in key, f"not a key of a checkpoint: {key!r}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> State:
    """The inverse of `flatten`, also of a union in which some have an empty dictionary where others have content."""
    state: State = {}
    for path, value in flat.items():
        *parents, key = path.split("/")
        node = state
        for parent in parents:
            node = node.setdefault(parent, {})
        if isinstance(value, Mapping):  # an empty one
            node.setdefault(key, {})
        else:
            node[key] = value
    return state


class ModelState:
    """Weights by canonical name, each parameter once."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {canonical_name(name): p for name, p in model.named_parameters()}

    def state_dict(self) -> State:
        return {name: p.detach() for name, p in self.parameters.items()}

    def check(self, state: State) -> None:
        """Refuse weights of another model.

        Raises:
            ValueError: naming one that differs in name or shape.
        """
        _same_names("parameters", state, self.parameters)
        for name, p in self.parameters.items():
            if state[name].shape != p.shape:
                raise ValueError(
                    f"{name} has shape {tuple(state[name].shape)} in the checkpoint, {tuple(p.shape)} in the model"
                )

    def load_state_dict(self, state: State, /) -> None:
        self.check(state)
        for name, p in self.parameters.items():
            p.data.copy_(state[name])


class OptimizerState:
    """Optimizer state by canonical parameter name. Hyper-parameters are the configuration's, never the checkpoint's.

    Of a sharded optimizer `state_dict` is what this rank owns; `load_state_dict` takes the union and keeps as much.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        self.names: dict[Tensor, str] = {p: canonical_name(name) for name, p in model.named_parameters()}

    def _order(self) -> list[str]:
        return [self.names[p] for group in self.optimizer.param_groups for p in group["params"]]

    def state_dict(self) -> State:
        return {self.names[p]: dict(state) for p, state in self.optimizer.state.items()}

    def load_state_dict(self, state: State, /) -> None:
        order = self._order()
        unknown = sorted(set(state) - set(order))
        if unknown:
            raise ValueError(f"the checkpoint has optimizer state for {unknown[0]}, which is no parameter here")
        expected = self.optimizer.state_dict()
        for index, name in enumerate(order):
            if index in expected["state"]:  # else state comes into being with the first step, as torch's AdamW does
                _same_names(f"optimizer state of {name}", state.get(name, {}), expected["state"][index])
        loaded = {index: state[name] for index, name in enumerate(order) if name in state}
        self.optimizer.load_state_dict({"state": loaded, "param_groups": expected["param_groups"]})


def _same_names(what: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for side, extra in (
        ("only in the checkpoint", set(found) - set(expected)),
        ("missing from the checkpoint", set(expected) - set(found)),
    ):
        if extra:
            raise ValueError(f"{what}: {', '.join(sorted(extra)[:3])} {side}; this is another model or optimizer")


class _Writing(threading.Thread):
    """A checkpoint on its way to the disk: this rank's part of it.

    A daemon, so that a program that ends does not wait for the disk: what was not published is absent.
    """

    def __init__(self, index: dict[str, Any], final: Path, write: Callable[[], files.Files]) -> None:
        super().__init__(name=f"writes {final.name}", daemon=True)
        self.index, self.final, self.write = index, final, write
        self.written: files.Files = {}
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.written = self.write()
        except Exception as error:  # all ranks are to hear of it
            self.error = error

    def result(self) -> files.Files:
        """What was written, once the thread has ended."""
        if isinstance(self.error, OSError):
            raise self.error
        if self.error:
            raise OSError(str(self.error)) from self.error
        return self.written


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; made when the first is written.
        keep: how many of the newest stay, at least 1; the disk needs room for one more.
        keep_every: those stay too whose step is a multiple of this.
        keep_best: the one with the lowest validation loss stays too.
        warn: called with a sentence for the user.
        about: what the run is, in JSON; stored with each checkpoint and given back by `about_newest`.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        keep: int = 2,
        keep_every: int | None = None,
        keep_best: bool = False,
        warn: Callable[[str], None] = print,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.world, self.warn, self.about = folder, world, warn, about or {}
        self.keep, self.keep_every, self.keep_best = keep, keep_every, keep_best
        self._copy = files.HostCopy(world.device)
        self._writing: _Writing | None = None
        self._removing: threading.Thread | None = None  # what need not stay

    def save(self, step: int, state: Mapping[str, Stateful], loss: float | None = None, wait: bool = False) -> None:
        """Copy a step's state and begin to write it; a collective call. Without effect where the step is saved already.

        An earlier save is settled first; if it failed the user is warned, and this one counts.

        Args:
            loss: validation loss of this very step.
            wait: return when it is published.

        Raises:
            OSError: on every rank, if any rank cannot write; the earlier checkpoints are as they were.
        """
        self.settle_or_warn()
        final = self.folder / f"step-{step:08d}"
        flat = flatten({name: stateful.state_dict() for name, stateful in state.items()})
        begun = self._attempt(lambda: (self._begin(final), sorted(flat)))
        if not begun[0][0]:
            return
        written_before = set().union(*(keys for _, keys in begun[: self.world.rank]))
        mine = {key: value for key, value in flat.items() if key not in written_before}
        tensors = {key: value for key, value in mine.items() if isinstance(value, Tensor)}
        rest = json.dumps({key: value for key, value in mine.items() if key not in tensors}).encode()
        head, data = self._copy.take(tensors)
        index = {
            "format": files.FORMAT,
            "step": step,
            "valid_loss": loss if loss is not None and math.isfinite(loss) else None,
            "about": copy.deepcopy(self.about),
        }
        partial, rank = files.partial_name(final), self.world.rank
        self._writing = _Writing(index, final, lambda: files.write_rank(partial, rank, head, data, rest))
        self._writing.start()
        if wait:
            self.settle(wait=True)

    def settle(self, wait: bool = False) -> bool:
        """Publish what all ranks have written; a collective call, without communication when nothing is pending.

        Args:
            wait: until all have written.

        Returns:
            Whether nothing is pending any more.

        Raises:
            OSError: on every rank, if any could not write. Nothing is pending then, and earlier checkpoints stay.
        """
        settled = self._writing is None or self._published(self._writing, wait)
        if wait and self._removing:
            self._removing.join()
        return settled

    def load(self, state: Mapping[str, Stateful], other: Path | None = None) -> int | None:
        """Load the newest undamaged checkpoint into `state`; its step, or None without any. A collective call.

        Args:
            other: load this whole checkpoint, of another run, instead.

        Raises:
            ValueError: the checkpoint is of another model, optimizer or data.
        """
        flat = read(other) if other else self.read()
        if flat is None:
            return None
        step, nested = flat[0], unflatten(flat[1])
        for name, stateful in state.items():
            stateful.load_state_dict(nested.get(name, {}))
        return step

    def read(self) -> tuple[int, dict[str, Any]] | None:
        """Step and flat content of the newest undamaged checkpoint. A collective call.

        A save that is pending is settled first, as by `save`.

        Raises:
            ValueError: on every rank, if there are checkpoints but none that can be used.
        """
        self.settle_or_warn()
        newest = self.world.on_main(self._newest)
        if newest is None:
            return None
        return read(self.folder / newest)

    def _begin(self, final: Path) -> bool:
        """Make the folder to write to, on the main rank; False where the checkpoint exists."""
        if self.world.is_main:
            if final.exists():
                return False
            files.fresh(files.partial_name(final))
        return True

    def _published(self, writing: _Writing, wait: bool) -> bool:
        """The work of `settle`."""
        if wait:
            writing.join()
        elif not all(self.world.gather(not writing.is_alive())):
            return False
        self._writing = None
        main, partial = self.world.is_main, files.partial_name(writing.final)
        try:
            parts = self._attempt(writing.result)
            index = {**writing.index, "files": {name: file for part in parts for name, file in part.items()}}
            self._attempt(lambda: files.publish(partial, writing.final, index) if main else None)
        except OSError:
            if main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if main:
            try:
                self._removing = files.prune(self.folder, self.keep, self.keep_every, self.keep_best, self.warn)
            except OSError as error:  # the checkpoint is there all the same
                self.warn(f"old checkpoints stay: {error}")
        return True

    def settle_or_warn(self) -> None:
        """Settle, waiting, where a save that failed is not to end what is done next; a collective call."""
        try:
            self.settle(wait=True)
        except OSError as error:
            if self.world.is_main:
                self.warn(f"the last checkpoint is lost: {error}")

    def _newest(self) -> str | None:
        """Name of the newest undamaged checkpoint, None where there never was one; on the main rank."""
        for folder in files.newest_first(self.folder):
            try:
                fault = files.fault(folder)
            except files.OtherFormat as error:
                raise ValueError(str(error)) from None
            if fault is None:
                return folder.name
            aside = folder.with_name(f"damaged-{folder.name}")
            while aside.exists():
                aside = aside.with_name(aside.name + "+")
            folder.rename(aside)
            self.warn(f"checkpoint {folder} is damaged ({fault}): set aside as {aside.name}, trying the one before it")
        if any(self.folder.glob("damaged-step-*")):
            raise ValueError(
                f"no checkpoint in {self.folder} can be used: restore one, or give the run another name to start again"
            )
        return None

    def _attempt(self, action: Callable[[], Any]) -> list[Any]:
        """Results of all ranks, or one OSError on all of them: no rank waits for one that failed."""
        result, error = None, None
        try:
            result = action()
        except OSError as exception:
            error = exception.errno, f"cannot write a checkpoint to {self.folder}: {exception}"
        results = self.world.gather((result, error))
        errors = [error for _, error in results if error]
        if errors:
            raised = OSError(errors[0][1])
            raised.errno = errors[0][0]  # which tells a full disk from a setting that cannot be
            raise raised
        return [result for result, _ in results]


def read(checkpoint: Path) -> tuple[int, dict[str, Any]]:
    """Step and flat content of a whole checkpoint.

    Raises:
        OSError: another run, of which it is, has removed it meanwhile.
    """
    try:
        index = json.loads((checkpoint / files.INDEX).read_text())
        flat: dict[str, Any] = {}
        for file in index["files"]:
            path = checkpoint / file
            flat |= json.loads(path.read_text()) if path.suffix == ".json" else load_file(path)
    except FileNotFoundError as error:
        raise OSError(f"{checkpoint}: the run has removed step {files.step_of(checkpoint):,} meanwhile") from error
    return index["step"], flat


def about_newest(folder: Path) -> dict[str, Any] | None:
    """`about` of the newest checkpoint whose index can be read; None without one. Not collective.

    Raises:
        ValueError: it holds weights alone, so that no run can go on from it.
    """
    for path in files.newest_first(folder):
        index = files.read_index(path)
        if index is not None:
            if files.weights_alone(index):
                raise ValueError(
                    f"{folder.parent} holds weights alone, as an average or an import does: to train on from them "
                    f"give the run another name, and init_from={folder.parent}"
                )
            about = index.get("about")
            return about if isinstance(about, dict) else {}
    return None
