"""Several optimizers as one, for schedulers, gradient scalers, trainers and checkpoints that take a single one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..core.base import Group
from ..core.loading import match_by_name
from ..core.matrix import MatrixOptimizer
from ..core.skip_step import can_skip_on_device, step_or_skip
from .parts import PartGroups, PartState


class Combined(torch.optim.Optimizer):
    """One torch optimizer made of several parts: `Combined(Muown(matrix), AdamW(rest))`.

    `optimizers` are the parts. `param_groups` is a list of the parts' own groups, first in their order and then in the
    order in which groups were added. `state` is a mapping of the state of all parts. Both can be changed in every way
    in which those of a torch optimizer can, and the parts follow; changes made in a part are seen here.

    The state dict has torch's format, with the parameters numbered in the order of `param_groups`.

    Groups without parameters are dropped, so that the parts may be empty: the matrices of a model that has none.

    `defaults` has no options, since the parts have different ones. `OneCycleLR` and `CyclicLR` therefore need
    `cycle_momentum=False`.

    Raises:
        TypeError: if a part is no optimizer.
        ValueError: if there are no parts, or if two groups own a parameter.
    """

    found_inf: Tensor | None = None

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        if not optimizers:
            raise ValueError("Combined needs at least one optimizer")
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"Combined takes optimizers, one after the other, got {type(optimizer).__name__}")
        for optimizer in optimizers:
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        # Optimizer.__init__ would create groups and state of its own; this sets up everything else.
        self.__setstate__({"defaults": {}, "optimizers": optimizers, "param_groups": groups})

    # Everything that can change is in `_groups`, never in an attribute of this object: Lightning wraps an optimizer
    # into an object of a class derived from it, to which properties of this class would write.
    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "optimizers": self.optimizers, "param_groups": self.param_groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._groups = PartGroups(state["optimizers"], state["param_groups"])
        super().__setstate__({"defaults": state["defaults"]})

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The parts."""
        self._groups.synchronize()
        return self._groups.parts

    @property
    def param_groups(self) -> list[Group]:
        """The groups of all parts."""
        return self._groups.synchronize()

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        self._groups.replace(groups)

    @property  # type: ignore[override]
    def state(self) -> PartState:
        """The state of all parts by parameter."""
        return PartState(self._groups)

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        self.state.replace(state)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each part in order; a closure is evaluated once, before them, and its loss returned.

        A skip flag in `found_inf` goes to each part, see `core.skip_step.step_or_skip`.
        """
        flag = self.found_inf
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            if flag is None:
                optimizer.step()
            else:
                step_or_skip(optimizer, flag)
        return loss

    @property
    def can_skip_on_device(self) -> bool:
        """True if all parts obey a skip flag without asking the host."""
        return all(map(can_skip_on_device, self.optimizers))

    def compile(self, **options: Any) -> None:
        """Compile the parts that support it, see `MatrixOptimizer.compile`."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, MatrixOptimizer):
                optimizer.compile(**options)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the part that is to take it.

        A group with a "role" goes to the first part that has groups of this role. If there is none, role "matrix" goes
        to the first optimizer of matrices (or the first part), and any other role to the last part that is none (or the
        last part). A group without a role goes back to the part that its parameters were in. If they are new, it goes
        where a role other than "matrix" would go, with a warning if matrices are among them.

        Groups with and without names of parameters may stand side by side.

        Raises:
            TypeError: if the group is no dictionary.
            ValueError: if a parameter is in a group already, or if the part refuses the group; nothing has changed
                then.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a group must be a dictionary, got {type(param_group).__name__}")
        self._groups.add(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of the parts as one."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        numbers = {p: i for i, p in enumerate(_list_params(self.param_groups))}
        state: dict[Any, Any] = {}
        groups: dict[int, Group] = {}
        for optimizer in self.optimizers:
            saved = optimizer.state_dict()
            own = optimizer.param_groups
            new = dict(zip(_list_params(saved["param_groups"]), map(numbers.get, _list_params(own)), strict=True))
            state |= {new.get(key, key): value for key, value in saved["state"].items()}
            for group, saved_group in zip(own, saved["param_groups"], strict=True):
                groups[id(group)] = saved_group | {"params": [new[i] for i in saved_group["params"]]}
        state_dict = {"state": state, "param_groups": [groups[id(group)] for group in self.param_groups]}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand each part its share of the state dict of a `Combined`.

        Parameters are matched by name where all groups on both sides have names, else by their order.

        Raises:
            ValueError: if the groups or their state do not match; no part has changed then.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = self.param_groups
        state_dict = match_by_name(groups, state_dict)
        saved = {id(group): other for group, other in zip(groups, state_dict["param_groups"], strict=True)}
        before = [(optimizer, optimizer.state, optimizer.param_groups) for optimizer in self.optimizers]
        try:
            for optimizer in self.optimizers:
                own = [saved[id(group)] for group in optimizer.param_groups]
                ids = set(_list_params(own))
                share = {i: state for i, state in state_dict["state"].items() if i in ids}
                optimizer.load_state_dict({"state": share, "param_groups": own})
        except Exception:  # loading makes a part's state and groups anew, so the old ones are as they were
            for optimizer, state, own in before:
                optimizer.state, optimizer.param_groups = state, own
            raise
        self._groups.synchronize()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _list_params(groups: list[Group]) -> list[Any]:
    """Return what the groups hold, in order: parameters, or their numbers in a state dict."""
    return list(chain.from_iterable(group["params"] for group in groups))
