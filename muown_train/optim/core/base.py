"""The base of every optimizer of this library: it checks options and parameters, and creates all state at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .checks import check_number
from .skip_step import run_or_restore, split_into_chunks

Group = dict[str, Any]
State = dict[str, Tensor]


class BaseOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose state exists from construction on, so that saving never depends on lazy shapes.

    A subclass defines the state of a parameter (`init_state`), what it refuses (`check_group`, `check_parameter`), and
    how it moves the parameters of one group (`step_group`) or of all groups together (`step_groups`).

    `found_inf`, where it is set, is a float32 tensor of one element: a step for which it is 1 leaves everything as it
    is. An optimizer with `can_skip_on_device` does so without asking the host; the others wait for the flag.
    """

    found_inf: Tensor | None = None
    optional_state: frozenset[str] = frozenset()  # keys that a saved state may lack

    def create_state(self, W: Tensor, group: Group) -> State:
        """Return all state of a new parameter."""
        return self.init_state(W, group)

    def init_state(self, W: Tensor, group: Group) -> State:
        """Return the state of a new parameter that the algorithm needs."""
        raise NotImplementedError

    def check_group(self, group: Group) -> None:
        """Raise ValueError if an option of the group is invalid; subclasses add their checks."""
        check_number("lr", group["lr"])
        check_number("weight_decay", group["weight_decay"])

    def check_parameter(self, name: str, W: Tensor, group: Group) -> None:
        """Raise ValueError naming W if this group cannot take it; subclasses add their checks."""
        if not W.is_floating_point():
            raise ValueError(f"{name}: {type(self).__name__} takes real floating-point parameters, got {W.dtype}")

    @property
    def can_skip_on_device(self) -> bool:
        """True if `step_groups` takes a skip flag."""
        return False

    def is_past_first_step(self, params: list[list[Tensor]]) -> bool:
        """Return whether every parameter is past its first step, before which the host has work to do."""
        return True

    def step_groups(self, params: list[list[Tensor]], skip: Tensor | None) -> None:
        """Move parameters and their state in place.

        Args:
            params: for each group its parameters that have a gradient.
            skip: (), boolean, on the device; if it is true, nothing has moved afterwards. None if the step is not
                skipped.
        """
        for all_params, group in zip(params, self.param_groups, strict=True):
            chunks = [all_params] if skip is None and all_params else split_into_chunks(all_params)
            for chunk in chunks:
                grads = [p.grad for p in chunk if p.grad is not None]
                states = [self.state[p] for p in chunk]
                written = chain(chunk, *(state.values() for state in states))
                run_or_restore(skip, partial(self.step_group, chunk, grads, states, group), written)

    def step_group(self, params: list[Tensor], grads: list[Tensor], states: list[State], group: Group) -> None:
        """Move parameters of one group and their state in place; each of them has a gradient."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with all parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss, as for any torch optimizer.

        Returns:
            The result of the closure, or None.

        Raises:
            ValueError: for a sparse gradient; no parameter has moved then.
        """
        flag = self.found_inf
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = []
        for j, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None and p.grad.layout != torch.strided:
                    name = describe_parameter(group, i, j)
                    raise ValueError(f"{name}: its gradient must be dense, got {p.grad.layout}")
            params.append([p for p in group["params"] if p.grad is not None])
        skip = None if flag is None else flag.reshape(()) != 0
        if skip is not None and not (self.can_skip_on_device and self.is_past_first_step(params)):
            if skip:  # the host waits
                return loss
            skip = None
        self.step_groups(params, skip)
        return loss

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, check it, and create its state.

        Raises:
            ValueError: naming the invalid parameter or option; the optimizer is then as before.
        """
        super().add_param_group(param_group)
        group, j = self.param_groups[-1], len(self.param_groups) - 1
        try:
            group.update({key: _to_python_number(key, value) for key, value in group.items()})
            self.check_group(group)
            seen = set()
            for i, p in enumerate(group["params"]):
                if p in seen:
                    raise ValueError(f"{describe_parameter(group, i, j)} is in the group twice")
                seen.add(p)
                self.check_parameter(describe_parameter(group, i, j), p.detach(), group)
            states = [self.create_state(p.detach(), group) for p in group["params"]]
        except Exception:
            self.param_groups.pop()
            raise
        for p, state in zip(group["params"], states, strict=True):
            self.state[p] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of one with the same state (torch.optim.Muon's into Muon).

        State keeps the dtype it was created with, where torch alone would round it to that of the parameter. Options
        that the saved groups lack stay as they are, and so does the state of a parameter for which none is saved.

        Raises:
            ValueError: if the saved groups, their options or the state of a parameter do not fit this optimizer, which
                is then as before.
        """
        options: list[Group] = []
        saved: dict[Tensor, State] = {}
        own = {p: state for p, state in self.state.items() if state}  # a sharded optimizer has only its share

        def check(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            options.extend(self._merge_options(state_dict["param_groups"]))
            ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
            parameters = chain.from_iterable(group["params"] for group in self.param_groups)
            saved.update({p: state_dict["state"].get(i, {}) for p, i in zip(parameters, ids, strict=True)})
            for j, group in enumerate(self.param_groups):
                for i, p in enumerate(group["params"]):
                    if p in own:
                        self._check_saved_state(describe_parameter(group, i, j), own[p], saved[p])

        def restore(_: torch.optim.Optimizer) -> None:
            for group, merged in zip(self.param_groups, options, strict=True):
                group.update(merged)
            for p, state in own.items():
                self.state[p] = {key: tensor.copy_(saved[p].get(key, tensor)) for key, tensor in state.items()}

        # `check` runs after the user's pre-hooks and `restore` before the user's post-hooks, so that users see and can
        # change what is loaded.
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

    def _merge_options(self, saved: list[Group]) -> list[Group]:
        """Return the options that each group has after the saved groups are loaded."""
        check_group_sizes(self.param_groups, saved)
        options = []
        for j, (group, saved_group) in enumerate(zip(self.param_groups, saved, strict=True)):
            merged = {**group, **saved_group, "params": group["params"]}
            self.check_group(merged)
            if merged.get("blocks") != group.get("blocks"):
                raise ValueError(
                    f"group {j} was saved with blocks={merged['blocks']}, but in this optimizer has "
                    f"blocks={group['blocks']}"
                )
            options.append({key: value for key, value in merged.items() if key != "params"})
        return options

    def _check_saved_state(self, name: str, own: State, saved: State) -> None:
        """Raise ValueError if the saved state of a parameter has other keys or shapes than its own."""
        if saved and own.keys() - self.optional_state != saved.keys() - self.optional_state:
            kept, keeps = (", ".join(sorted(state)) for state in (saved, own))
            raise ValueError(f"{name}: the saved optimizer kept {kept}, this one keeps {keeps}")
        for key, value in saved.items():
            if value.shape != own[key].shape:
                shapes = f"{tuple(value.shape)}, not {tuple(own[key].shape)}"
                raise ValueError(f"{name}: the saved {key} has shape {shapes}")


def collect_defaults(arguments: dict[str, Any], **group_only: Any) -> Group:
    """Return the default options of a constructor, given its `locals()`: every argument besides self and params.

    An option is thus written once, in the signature, and none can be missing among the defaults.

    Args:
        group_only: further defaults, of options that only a group of parameters can set.
    """
    return {key: value for key, value in arguments.items() if key not in ("self", "params", "__class__")} | group_only


def check_group_sizes(own: list[Group], saved: list[Group]) -> None:
    """Raise ValueError unless the saved groups have as many parameters as the optimizer's own."""
    sizes, saved_sizes = ([len(group["params"]) for group in groups] for groups in (own, saved))
    if sizes != saved_sizes:
        raise ValueError(f"the saved optimizer has groups of {saved_sizes} parameters, this one of {sizes}")


def describe_parameter(group: Group, i: int, j: int) -> str:
    """Return the words for parameter i of group j in messages: its name, or its place and shape."""
    if "param_names" in group:
        return f"parameter {group['param_names'][i]!r}"
    return f"parameter {i} of group {j}, of shape {tuple(group['params'][i].shape)}"


def _to_python_number(key: str, value: Any) -> Any:
    """Return numpy's numbers and one-element tensors, except lr's, as Python's, which load with weights_only."""
    if isinstance(value, Tensor) and value.numel() == 1 and key != "lr":
        return value.item()
    if isinstance(value, Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, Integral) else float(value)
    return value
