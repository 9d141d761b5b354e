"""What a checkpoint holds of a run: the state of the model, the optimizer and the random number generators."""

import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muown_train.optim.param_groups import canonical_name
from muown_train.runtime.distributed import World

State = dict[str, Any]  # nested; keys are strings without "/", leaves tensors or JSON


class Stateful(Protocol):
    """An object whose state can be saved. Its state_dict() is local, without collectives."""

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


class ModelState:
    """The weights of a model by canonical name, each parameter once."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {canonical_name(name): p for name, p in model.named_parameters()}

    def state_dict(self) -> State:
        return {name: p.detach() for name, p in self.parameters.items()}

    def check(self, state: State) -> None:
        """Refuse weights of another model.

        Raises:
            ValueError: a weight differs in name or shape.
        """
        _check_names("parameters", state, self.parameters)
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
    """Optimizer state by canonical parameter name. Hyper-parameters come from the configuration, not the checkpoint.

    For a sharded optimizer `state_dict` returns what this rank owns; `load_state_dict` takes the union of all ranks and
    keeps this rank's part.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        self.names: dict[Tensor, str] = {p: canonical_name(name) for name, p in model.named_parameters()}

    def _list_names(self) -> list[str]:
        """Return the names of the parameters in the optimizer's order."""
        return [self.names[p] for group in self.optimizer.param_groups for p in group["params"]]

    def state_dict(self) -> State:
        return {self.names[p]: dict(state) for p, state in self.optimizer.state.items()}

    def load_state_dict(self, state: State, /) -> None:
        names = self._list_names()
        unknown = sorted(set(state) - set(names))
        if unknown:
            raise ValueError(f"the checkpoint has optimizer state for {unknown[0]}, which the model does not have")
        for part in getattr(self.optimizer, "optimizers", [self.optimizer]):
            own = [self.names[p] for group in part.param_groups for p in group["params"]]
            missing = [name for name in own if name not in state]
            if 0 < len(missing) < len(own):  # before the first step, and in plain SGD, no parameter has state
                raise ValueError(f"the checkpoint has no optimizer state for {missing[0]}")
        loaded = {index: state[name] for index, name in enumerate(names) if name in state}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": loaded, "param_groups": groups})


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
        torch.set_rng_state(own["torch"])
        key = np.array(own["numpy"]["state"]["key"], dtype=np.uint32)
        np.random.set_state({**own["numpy"], "state": {**own["numpy"]["state"], "key": key}})
        version, words, gauss = own["python"]
        random.setstate((version, tuple(words), gauss))
        if self.device.type == "cuda" and "cuda" in own:
            torch.cuda.set_rng_state(own["cuda"], self.device)
