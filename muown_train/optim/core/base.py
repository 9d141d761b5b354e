"""What all optimizers here share: options and parameters are checked, and all state made, when a group is added."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .skip_step import portions, unless

Group = dict[str, Any]
State = dict[str, Tensor]


class EagerOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose state exists from construction on, so that saving never depends on lazy shapes.

    A subclass says which state a parameter has (`init_state`), what can be (`check_group`, `check_parameter`), and how
    the parameters of a group move (`update_group`), or of all groups together (`update_groups`).

    `found_inf`, where it is set, is a float32 tensor of one: a step for which it is 1 leaves everything as it is. An
    optimizer that `heeds_flag` does so on the device; the others wait for it.
    """

    found_inf: Tensor | None = None
    optional_state: frozenset[str] = frozenset()  # what a saved state may lack

    def new_state(self, W: Tensor, group: Group) -> State:
        """All state of a new parameter."""
        return self.init_state(W, group)

    def init_state(self, W: Tensor, group: Group) -> State:
        """The state of a new parameter."""
        raise NotImplementedError

    def check_group(self, group: Group) -> None:
        """Raise ValueError if an option of the group cannot be."""
        raise NotImplementedError

    def check_parameter(self, name: str, W: Tensor, group: Group) -> None:
        """Raise ValueError naming W if it cannot be in this group."""
        if not W.is_floating_point():
            raise ValueError(f"{name}: {type(self).__name__} takes real floating-point parameters, got {W.dtype}")

    @property
    def heeds_flag(self) -> bool:
        """Whether `update_groups` takes a flag."""
        return False

    def have_begun(self, moved: list[list[Tensor]]) -> bool:
        """Whether none of these parameters needs the host for what is done before its first update."""
        return True

    def update_groups(self, moved: list[list[Tensor]], skip: Tensor | None) -> None:
        """Move parameters, those of each group that have a gradient, and their state, in place.

        Args:
            skip: (), boolean, on the device: nothing is to have moved if it is true. None where that is known.
        """
        for all_params, group in zip(moved, self.param_groups, strict=True):
            for params in [all_params] if skip is None and all_params else portions(all_params):
                grads = [p.grad for p in params if p.grad is not None]
                states = [self.state[p] for p in params]
                written = chain(params, *(state.values() for state in states))
                unless(skip, partial(self.update_group, params, grads, states, group), written)

    def update_group(self, params: list[Tensor], grads: list[Tensor], states: list[State], group: Group) -> None:
        """Move the parameters of one group that have a gradient, and their state, in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss, as for any torch optimizer.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: for a sparse gradient; nothing has been updated then.
        """
        flag = self.found_inf
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = []
        for j, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None and p.grad.layout != torch.strided:
                    name = parameter_name(group, i, j)
                    raise ValueError(f"{name}: its gradient must be dense, got {p.grad.layout}")
            moved.append([p for p in group["params"] if p.grad is not None])
        skip = None if flag is None else flag.reshape(()) != 0
        if skip is not None and not (self.heeds_flag and self.have_begun(moved)):
            if skip:  # the host waits
                return loss
            skip = None
        self.update_groups(moved, skip)
        return loss

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, check it, and make its state.

        Raises:
            ValueError: naming the parameter or option that cannot be; the optimizer is then as before.
        """
        super().add_param_group(param_group)
        group, j = self.param_groups[-1], len(self.param_groups) - 1
        try:
            group.update({key: _plain(key, value) for key, value in group.items()})
            self.check_group(group)
            seen = set()
            for i, p in enumerate(group["params"]):
                if p in seen:
                    raise ValueError(f"{parameter_name(group, i, j)} is in the group twice")
                seen.add(p)
                self.check_parameter(parameter_name(group, i, j), p.detach(), group)
            states = [self.new_state(p.detach(), group) for p in group["params"]]
        except Exception:
            self.param_groups.pop()
            raise
        for p, state in zip(group["params"], states, strict=True):
            self.state[p] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of one with the same state (torch.optim.Muon's into Muon).

        State keeps the dtype it was constructed with, where torch alone would round it to that of the parameter.
        Options that the saved groups lack stay as they are, and so does the state of a parameter of which nothing is
        saved.

        Raises:
            ValueError: if the saved groups, their options or the state of a parameter do not fit this optimizer, which
                is then as before.
        """
        options: list[Group] = []
        saved: dict[Tensor, State] = {}
        own = {p: state for p, state in self.state.items() if state}  # sharded: other ranks keep the rest

        def check(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            options.extend(self._fitting_options(state_dict["param_groups"]))
            ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
            parameters = chain.from_iterable(group["params"] for group in self.param_groups)
            saved.update({p: state_dict["state"].get(i, {}) for p, i in zip(parameters, ids, strict=True)})
            for j, group in enumerate(self.param_groups):
                for i, p in enumerate(group["params"]):
                    if p in own:
                        self._check_fit(parameter_name(group, i, j), own[p], saved[p])

        def restore(_: torch.optim.Optimizer) -> None:
            for group, of_group in zip(self.param_groups, options, strict=True):
                group.update(of_group)
            for p, state in own.items():
                self.state[p] = {key: tensor.copy_(saved[p].get(key, tensor)) for key, tensor in state.items()}

        # after the hooks before, before the hooks after: those of users see and change what is loaded
        handles = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            with torch.no_grad():
                super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _fitting_options(self, saved: list[Group]) -> list[Group]:
        """The options of each group after loading the saved groups."""
        sizes, saved_sizes = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved))
        if sizes != saved_sizes:
            raise ValueError(f"the saved optimizer has groups of {saved_sizes} parameters, this one of {sizes}")
        options = []
        for j, (group, saved_group) in enumerate(zip(self.param_groups, saved, strict=True)):
            merged = {**group, **saved_group, "params": group["params"]}
            self.check_group(merged)
            if merged.get("blocks") != group.get("blocks"):
                raise ValueError(
                    f"group {j} was saved with blocks={merged['blocks']}, but is one with blocks={group['blocks']} here"
                )
            options.append({key: value for key, value in merged.items() if key != "params"})
        return options

    def _check_fit(self, name: str, own: State, saved: State) -> None:
        if saved and own.keys() - self.optional_state != saved.keys() - self.optional_state:
            kept, keeps = (", ".join(sorted(state)) for state in (saved, own))
            raise ValueError(f"{name}: the saved optimizer kept {kept}, this one keeps {keeps}")
        for key, value in saved.items():
            if value.shape != own[key].shape:
                shapes = f"{tuple(value.shape)}, not {tuple(own[key].shape)}"
                raise ValueError(f"{name}: the saved {key} has shape {shapes}")


def _plain(key: str, value: Any) -> Any:
    """numpy's numbers, and tensors of one element but lr's, as Python's own, which load with weights_only."""
    if isinstance(value, Tensor) and value.numel() == 1 and key != "lr":
        return value.item()
    if isinstance(value, Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def parameter_name(group: Group, i: int, j: int) -> str:
    """How messages call parameter i of group j."""
    if "param_names" in group:
        return f"parameter {group['param_names'][i]!r}"
    return f"parameter {i} of group {j}, of shape {tuple(group['params'][i].shape)}"
