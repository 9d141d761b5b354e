"""Checkpoints: tensors in safetensors, everything else in JSON, complete or absent, for any number of ranks.

A checkpoint is the union of what the ranks hold under names such as `model/blocks.0.mlp.out.weight` or
`optimizer/blocks.0.mlp.out.weight/momentum_buffer`; what several ranks hold is written by the first of them.

    checkpoints/step-00000200/
        rank-00000.safetensors  rank-00000.json    what a rank wrote
        index.json                                 step, and size and SHA-256 of every other file

It is written beside its final place, fsynced and renamed. A checkpoint whose files do not match its index is named,
set aside as `damaged-…` and never deleted; the one before it is used. Nothing is unpickled.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from muown_train.distributed import World
from muown_train.files import sync
from muown_train.optim.param_roles import canonical_name

FORMAT = 1  # of the folder and of index.json

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
    """The inverse of `flatten`."""
    state: State = {}
    for path, value in flat.items():
        *parents, key = path.split("/")
        node = state
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = value
    return state


class ModelState:
    """Weights by canonical name, each parameter once."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {canonical_name(name): p for name, p in model.named_parameters()}

    def state_dict(self) -> State:
        return {name: p.detach() for name, p in self.parameters.items()}

    def load_state_dict(self, state: State, /) -> None:
        _same_names("parameters", state, self.parameters)
        for name, p in self.parameters.items():
            if state[name].shape != p.shape:
                raise ValueError(
                    f"{name} has shape {tuple(state[name].shape)} in the checkpoint, {tuple(p.shape)} in the model"
                )
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


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; made when the first is written.
        keep: how many of the newest stay.
        warn: called with a sentence for the user.
    """

    def __init__(self, folder: Path, world: World, keep: int = 2, warn: Callable[[str], None] = print) -> None:
        self.folder, self.world, self.keep, self.warn = folder, world, keep, warn

    def save(self, step: int, state: Mapping[str, Stateful]) -> None:
        """Write the checkpoint of a step; a collective call.

        Raises:
            OSError: on every rank, if any rank could not write; the earlier checkpoints are as they were.
        """
        final, partial = self.folder / f"step-{step:08d}", self.folder / f"partial-step-{step:08d}"
        if self.world.gather(final.exists())[0]:
            return
        flat = flatten({name: stateful.state_dict() for name, stateful in state.items()})
        keys_of_ranks = self.world.gather(sorted(flat))
        written_before = set().union(*keys_of_ranks[: self.world.rank])
        mine = {key: value for key, value in flat.items() if key not in written_before}
        main = self.world.is_main
        try:
            self._attempt(lambda: _fresh(partial) if main else None)
            files = self._attempt(lambda: _write_rank(partial, self.world.rank, mine))
            index = {"format": FORMAT, "step": step, "files": {k: v for part in files for k, v in part.items()}}
            self._attempt(lambda: _publish(partial, final, index) if main else None)
        except OSError:
            if main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if main:
            self._prune()

    def load(self, state: Mapping[str, Stateful]) -> int | None:
        """Load the newest undamaged checkpoint into `state`; its step, or None without any. A collective call.

        Raises:
            ValueError: the checkpoint is of another model, optimizer or data.
        """
        flat = self.read()
        if flat is None:
            return None
        step, nested = flat[0], unflatten(flat[1])
        for name, stateful in state.items():
            stateful.load_state_dict(nested.get(name, {}))
        return step

    def read(self) -> tuple[int, dict[str, Any]] | None:
        """Step and flat content of the newest undamaged checkpoint. A collective call.

        Raises:
            ValueError: on every rank, if there are checkpoints but none that can be used.
        """
        newest, error = self.world.gather(self._newest() if self.world.is_main else (None, None))[0]
        if error:
            raise ValueError(error)
        if newest is None:
            return None
        index = json.loads((self.folder / newest / "index.json").read_text())
        flat: dict[str, Any] = {}
        for file in index["files"]:
            path = self.folder / newest / file
            flat |= json.loads(path.read_text()) if path.suffix == ".json" else load_file(path)
        return index["step"], flat

    def _newest(self) -> tuple[str | None, str | None]:
        """Name of the newest undamaged checkpoint, or why there is none although there were some."""
        for folder in sorted(self.folder.glob("step-*"), reverse=True):
            try:
                fault = _fault(folder)
            except _OtherFormat as error:
                return None, str(error)
            if fault is None:
                return folder.name, None
            aside = folder.with_name(f"damaged-{folder.name}")
            while aside.exists():
                aside = aside.with_name(aside.name + "+")
            folder.rename(aside)
            self.warn(f"checkpoint {folder} is damaged ({fault}): set aside as {aside.name}, trying the one before it")
        if any(self.folder.glob("damaged-step-*")):
            return None, (
                f"no checkpoint in {self.folder} can be used: restore one, or give the run another name to start again"
            )
        return None, None

    def _attempt(self, action: Callable[[], Any]) -> list[Any]:
        """Results of all ranks, or one OSError on all of them: no rank waits for one that failed."""
        try:
            result, error = action(), None
        except (OSError, SafetensorError) as exception:
            result, error = None, f"cannot write a checkpoint to {self.folder}: {exception}"
        results = self.world.gather((result, error))
        errors = [error for _, error in results if error]
        if errors:
            raise OSError(errors[0])
        return [result for result, _ in results]

    def _prune(self) -> None:
        for old in sorted(self.folder.glob("step-*"))[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)


def _fresh(folder: Path) -> None:
    for leftover in folder.parent.glob("partial-step-*"):
        shutil.rmtree(leftover)
    folder.mkdir(parents=True)


def _write_rank(folder: Path, rank: int, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Write one rank's part; {file name: {"bytes", "sha256"}}."""
    tensors = {key: value for key, value in flat.items() if isinstance(value, Tensor)}
    rest = {key: value for key, value in flat.items() if key not in tensors}
    files = {}
    if tensors:
        path = folder / f"rank-{rank:05d}.safetensors"
        # copies: safetensors refuses tensors that share memory, as views of one buffer do
        save_file({key: value.detach().to("cpu", copy=True).contiguous() for key, value in tensors.items()}, path)
        files[path.name] = _seal(path)
    if rest:
        path = folder / f"rank-{rank:05d}.json"
        path.write_text(json.dumps(rest))
        files[path.name] = _seal(path)
    return files


def _seal(path: Path) -> dict[str, Any]:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _publish(partial: Path, final: Path, index: Mapping[str, Any]) -> None:
    path = partial / "index.json"
    path.write_text(json.dumps(index, indent=1))
    _seal(path)
    sync(partial)
    partial.rename(final)
    sync(final.parent)


class _OtherFormat(Exception):
    """A checkpoint of another version of the program, which is no damage."""


def _fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        index = json.loads((folder / "index.json").read_text())
        if index["format"] != FORMAT:
            raise _OtherFormat(f"{folder} has format {index['format']}, this version of the program reads {FORMAT}")
        for name, expected in index["files"].items():
            path = folder / name
            if path.parent != folder:
                return f"index.json names {name}"
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    return f"{name} has another SHA-256 than when it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"index.json cannot be used: {error}"
    return None
