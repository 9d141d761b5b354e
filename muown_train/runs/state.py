"""What a checkpoint holds of a run: the state of the model, the optimizer and the random number generators."""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muown_train.optim.param_groups import canonical_name
from muown_train.optim.row_shards.placement import (
    check_placements,
    find_row_shard,
    get_local,
    is_dtensor,
    release_gathered,
    take_own_rows,
    wrap_local,
)
from muown_train.runs.checkpoint_reader import StoredTensor
from muown_train.runtime.distributed import World

# nested; keys are strings without "/", leaves tensors or JSON; `x[...]` is the tensor of a leaf that is loaded
State = dict[str, Any]


class Stateful(Protocol):
    """An object whose state can be saved. Its state_dict() is local, without collectives.

    A tensor of the state that it saves may be a DTensor. Those that it loads are whole: tensors, or a `StoredTensor`,
    which is read when it is indexed.
    """

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State, /) -> Any: ...


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn {"a": {"b": 1}} into {"a/b": 1}. An empty dictionary is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        assert isinstance(key, str) and "/" not in key, f"a checkpoint cannot have the key {key!r}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> State:
    """Invert `flatten`, also for a union in which some ranks have an empty dictionary where others have content."""
    state: State = {}
    for path, value in flat.items():
        *parents, key = path.split("/")
        node = state
        for parent in parents:
            node = node.setdefault(parent, {})
        if isinstance(value, Mapping):  # an empty one, as `flatten` leaves no other
            node.setdefault(key, {})
        else:
            node[key] = value
    return state


class Part(NamedTuple):
    """What a rank holds of a value of a checkpoint: all of it, or some rows of a tensor."""

    key: str
    rows: tuple[int, ...] = ()  # the first row and the number of rows of the whole; () for all of it


def list_parts(state: Mapping[str, Any]) -> dict[Part, Any]:
    """Return what this rank holds of a flat state, with plain tensors: of a DTensor its own rows, if it has any.

    Raises:
        ValueError: a DTensor is not sharded by rows over one axis of its mesh.
    """
    parts = {}
    for key, value in state.items():
        if not (isinstance(value, Tensor) and is_dtensor(value)):
            parts[Part(key)] = value
            continue
        check_placements(key, value)
        shard, rows = (find_row_shard(value), value.shape[0]) if value.ndim else (None, 0)
        first, stop = shard.own if shard else (0, rows)
        if stop - first == rows:
            parts[Part(key)] = get_local(value)
        elif first < stop:
            parts[Part(key, (first, rows))] = get_local(value)
    return parts


def list_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by canonical name, each once."""
    release_gathered(model)
    return {canonical_name(name): p for name, p in model.named_parameters()}


class ModelState:
    """The weights of a model by canonical name, each parameter once."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list_parameters(model)

    def state_dict(self) -> State:
        return {name: p.detach() for name, p in self.parameters.items()}

    def check(self, state: State) -> None:
        """Refuse weights of another model, given whole.

        Raises:
            ValueError: a weight differs in name or shape.
        """
        _check_names("parameters", state, self.parameters)
        for name, p in self.parameters.items():
            if state[name].shape != p.shape:
                raise ValueError(
                    f"{name} has shape {tuple(state[name].shape)} in the checkpoint, {tuple(p.shape)} in the model"
                )

    @torch.no_grad()
    def load_state_dict(self, state: State, /) -> None:
        self.check(state)
        for name, p in self.parameters.items():
            get_local(p.detach()).copy_(take_own_rows(state[name], p)[...])


class OptimizerState:
    """Optimizer state by canonical parameter name. Hyper-parameters come from the configuration, not the checkpoint.

    For a sharded optimizer `state_dict` returns what this rank owns; `load_state_dict` takes the union of all ranks and
    keeps this rank's part.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        self.names: dict[Tensor, str] = {p: name for name, p in list_parameters(model).items()}

    def state_dict(self) -> State:
        return {self.names[p]: dict(state) for p, state in self.optimizer.state.items()}

    def load_state_dict(self, state: State, /) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        unknown = sorted(set(state) - {self.names[p] for p in params})
        if unknown:
            raise ValueError(f"the checkpoint has optimizer state for {unknown[0]}, which the model does not have")
        for part in getattr(self.optimizer, "optimizers", [self.optimizer]):
            own = [self.names[p] for group in part.param_groups for p in group["params"]]
            missing = [name for name in own if name not in state]
            if 0 < len(missing) < len(own):  # before the first step, and in plain SGD, no parameter has state
                raise ValueError(f"the checkpoint has no optimizer state for {missing[0]}")
        loaded = {
            index: {key: _read_state(value, p) for key, value in state[self.names[p]].items()}
            for index, p in enumerate(params)
            if self.names[p] in state
        }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": loaded, "param_groups": groups})


def _read_state(saved: Any, p: Tensor) -> Any:
    """Return a saved value of the state of a parameter, as its optimizer takes it: of a DTensor's a DTensor too."""
    if not isinstance(saved, Tensor | StoredTensor):
        return saved
    if is_dtensor(p) and saved.shape[:1] == p.shape[:1]:
        return wrap_local(take_own_rows(cast(Tensor, saved), p).to(p.device), p, torch.Size(saved.shape))
    return saved[...]


def _check_names(kind: str, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise a ValueError unless a checkpoint has the same names as the model or optimizer."""
    for side, extra in (
        ("only in the checkpoint", set(saved) - set(expected)),
        ("missing from the checkpoint", set(expected) - set(saved)),
    ):
        if extra:
            raise ValueError(f"{kind}: {', '.join(sorted(extra)[:3])} {side}; this is another model or optimizer")


class RandomState:
    """The global generators of torch (CPU, and this rank's CUDA device), numpy and Python, stored by rank.

    A state of N ranks loads on any number of ranks: a rank without a stored state keeps its generators as they are.
    """

    def __init__(self, world: World) -> None:
        self.rank, self.device = str(world.rank), world.device

    def state_dict(self) -> State:
        numpy = np.random.get_state(legacy=False)
        version, words, gauss = random.getstate()
        state: State = {
            "torch": torch.get_rng_state(),  # (5056,) uint8
            "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
            "python": [version, list(words), gauss],
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return {self.rank: state}

    def load_state_dict(self, state: State, /) -> None:
        if self.rank not in state:
            return
        own = state[self.rank]
        torch.set_rng_state(own["torch"][...])
        key = np.array(own["numpy"]["state"]["key"], dtype=np.uint32)
        np.random.set_state({**own["numpy"], "state": {**own["numpy"]["state"], "key": key}})
        version, words, gauss = own["python"]
        random.setstate((version, tuple(words), gauss))
        if self.device.type == "cuda" and "cuda" in own:
            torch.cuda.set_rng_state(own["cuda"][...], self.device)
