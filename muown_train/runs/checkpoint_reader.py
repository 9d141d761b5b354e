"""The reader of checkpoints, for the trainer that resumes and for everything else that uses a run's weights.

Opening a checkpoint makes nothing else of its run. Its files stay open, so that its content can be read as long as it
is needed, even if the run removes it meanwhile.
"""

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from muown_train.config.stored_files import shorten
from muown_train.runs import checkpoint_files as files
from muown_train.runs.checkpoint_files import CheckpointRemovedError, make_removed_error
from muown_train.runtime.atomic_files import open_regular
from muown_train.runtime.formatting import escape_controls

_MODEL = "model/"  # prefix of the keys of weights in a checkpoint
_OPTIMIZER = "optimizer/"
_ATTEMPTS = 5  # attempts to open the newest checkpoint of a run that removes checkpoints meanwhile


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint, of which several files may hold some rows each.

    `stored[...]` reads all of it, `stored[a:b]` its rows a to b - 1, on the CPU, as they were saved. What lies in one
    file is mapped into memory and not copied.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[int, Callable[[], Tensor]], ...]  # the first row of each part and what reads it, in order

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0][1]()[rows]
        first, stop, _ = slice(None).indices(self.shape[0]) if rows is ... else rows.indices(self.shape[0])
        pieces = [read()[max(first - start, 0) : max(stop - start, 0)] for start, read in self.parts]
        found = [piece for piece in pieces if len(piece)] or pieces[:1]
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A whole checkpoint. Its content can be read as long as this object exists, whatever the run removes meanwhile."""

    folder: Path
    step: int
    metadata: dict[str, Any]  # a description of the run, such as its `config` and `data`
    weights_alone: bool  # whether it lacks the state from which a run could resume
    tensors: dict[str, StoredTensor]  # by key
    rest: dict[str, Any]  # everything that is not a tensor, by key, such as `data/rows`

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration of the run."""
        config: dict[str, Any] = self.metadata["config"]
        return config

    @property
    def data(self) -> dict[str, Any]:
        """Metadata of the run's data."""
        data: dict[str, Any] = self.metadata.get("data", {})
        return data

    @cached_property
    def weights(self) -> dict[str, StoredTensor]:
        """The weights by canonical name."""
        return {key.removeprefix(_MODEL): stored for key, stored in self.tensors.items() if key.startswith(_MODEL)}

    def load_weights(self) -> dict[str, Tensor]:
        """Return all weights by canonical name, on the CPU, as they were saved."""
        return {name: stored[...] for name, stored in self.weights.items()}

    def load_optimizer_state(self, names: Collection[str]) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of optimizer state with these names, on the CPU, for each parameter's canonical name.

        A parameter without any of them has an empty dictionary. A checkpoint of weights alone has no parameter here.
        """
        state: dict[str, dict[str, Tensor]] = {}
        for key, stored in self.tensors.items():
            if key.startswith(_OPTIMIZER):
                parameter, _, name = key.removeprefix(_OPTIMIZER).rpartition("/")
                state.setdefault(parameter, {}).update({name: stored[...]} if name in names else {})
        return state


def print_warning(sentence: str) -> None:
    """Print a warning on standard error."""
    print(f"warning: {escape_controls(sentence)}", file=sys.stderr, flush=True)


def open_checkpoint(path: Path, step: int | None = None) -> OpenCheckpoint:
    """Find a whole checkpoint of a run and open it; print a warning for each damaged one that is passed over.

    Args:
        path: the folder of a run, or of one checkpoint.
        step: the step after which it was saved; by default that of the newest checkpoint that is whole.

    Raises:
        ValueError: there is no such checkpoint, the requested one is damaged, or it does not describe its run.
        CheckpointRemovedError: the run removed the checkpoint while it was read, or, if any of them would do, removed
            the newest again and again.
    """
    one = step is not None or _is_checkpoint(path)
    attempts = 1 if one else _ATTEMPTS
    while True:
        attempts -= 1
        try:
            opened = open_files(_find_checkpoint(path, step))
            _check_metadata(opened)
            return opened
        except CheckpointRemovedError:
            if not attempts:
                raise


def list_steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints, in order, whatever their state.

    Raises:
        ValueError: the folder has no checkpoint.
    """
    return [files.parse_step(checkpoint) for checkpoint in reversed(_list_candidates(run))]


def _is_checkpoint(path: Path) -> bool:
    return (path / files.INDEX).exists() and path in files.list_checkpoints(path.parent)


def _list_candidates(path: Path) -> list[Path]:
    """Return the checkpoints that a path names, newest first; at least one."""
    if _is_checkpoint(path):
        return [path]
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}: give that of a run, such as runs/NAME")
    checkpoints = files.list_checkpoints(path / "checkpoints")
    if not checkpoints:
        raise ValueError(f"{path} has no checkpoint: it is not a run's folder, or the run has not saved yet")
    return checkpoints


def _find_checkpoint(path: Path, step: int | None) -> Path:
    """Return the folder of the checkpoint that `open_checkpoint` opens."""
    candidates = _list_candidates(path)
    if step is not None:
        steps = [files.parse_step(checkpoint) for checkpoint in candidates]
        if step not in steps:
            raise ValueError(f"{path} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
        candidates = [candidates[steps.index(step)]]
    faults: list[str] = []
    whole = files.find_newest_whole(candidates, lambda one, fault: faults.append(f"{one} is damaged: {fault}"))
    if whole is None:
        raise ValueError("; ".join(faults))
    for fault in faults:
        print_warning(f"{fault}; {whole.name} is read instead")
    return whole


def open_files(checkpoint: Path) -> OpenCheckpoint:
    """Open the files of a checkpoint that has been found to be whole.

    Raises:
        CheckpointRemovedError: the run has removed it meanwhile.
        ValueError: the content of a file is wrong.
    """
    try:
        index = files.read_checked_index(checkpoint)
        rest, layouts = files.read_content(checkpoint, index)
        stems = {file for layout in layouts.values() for _, _, file in layout.parts}
        opened = {stem: _open_tensors(checkpoint / f"{stem}.safetensors") for stem in stems}
    except FileNotFoundError:
        raise make_removed_error(checkpoint) from None
    except ValueError as error:
        raise ValueError(f"{checkpoint} cannot be read: {error}") from None
    tensors: dict[str, StoredTensor] = {}
    for key, layout in layouts.items():
        parts = [(first, partial(opened[file].get_tensor, key)) for first, _, file in layout.parts]
        tensors[key] = StoredTensor(tuple(layout.shape), tuple(parts))
    step = index.get("step")
    if step != files.parse_step(checkpoint):
        raise ValueError(f"{checkpoint / files.INDEX} has step={shorten(step)}, which is not that of the folder")
    alone = files.holds_weights_alone(index)
    return OpenCheckpoint(checkpoint, step, index.get("about", {}), alone, tensors, rest)


def _open_tensors(path: Path) -> Any:
    open_regular(path).close()
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def _check_metadata(opened: OpenCheckpoint) -> None:
    """Check that a checkpoint, which may be a stranger's, describes the model and the data of its run.

    Raises:
        ValueError: it does not.
    """
    folder, metadata = opened.folder, opened.metadata
    if "config" not in metadata:
        raise ValueError(f"{folder} does not say what it is a checkpoint of: it was written by an earlier version")
    model = metadata["config"].get("model")
    if not isinstance(model, dict) or not isinstance(model.get("_target_"), str):
        raise ValueError(f"{folder} has the configuration model={shorten(model)}: it must be a mapping with a _target_")


def read_newest_metadata(folder: Path) -> dict[str, Any] | None:
    """Return the metadata of a run's newest checkpoint whose index can be read; None if there is none.

    Nothing is verified, and the call is not collective.

    Args:
        folder: the folder of the run's checkpoints.

    Raises:
        ValueError: it holds weights alone, so that no run can resume from it.
    """
    for checkpoint in files.list_checkpoints(folder):
        if index := files.read_index(checkpoint):
            if files.holds_weights_alone(index):
                raise ValueError(
                    f"{folder.parent} holds weights alone, as an average or an import does: to train on from them "
                    f"give the run another name, and init_from={folder.parent}"
                )
            metadata: dict[str, Any] = index.get("about", {})
            return metadata
    return None


def check_finite(name: str, weight: Tensor) -> Tensor:
    """Return the weight itself.

    Raises:
        ValueError: it holds NaN or infinity.
    """
    if not weight.isfinite().all():
        raise ValueError(f"{name} holds numbers that are not finite: the model has diverged, or was damaged")
    return weight
