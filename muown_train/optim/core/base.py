"""The base of every optimizer of this library: it checks options and parameters, and keeps the state where they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..row_shards.placement import create_meta_whole, get_local, get_local_like, is_dtensor, wrap_local
from .checks import check_number
from .layouts import get_local_options
from .loading import get_function_name, match_by_name, name_functions
from .names import describe_parameter
from .skip_step import run_or_restore, split_into_chunks

Group = dict[str, Any]
State = dict[str, Tensor]


class BaseOptimizer(torch.optim.Optimizer):
    """A torch optimizer that checks what it is given.

    As with torch's own optimizers, the state of a parameter is created at its first step, and anew if it was removed,
    and it follows the parameter to another device or dtype.

    A subclass defines the state of a parameter (`init_state`), what it refuses (`check_group`, `check_parameter`), and
    how it moves the parameters of one group (`step_group`) or of all groups together (`step_groups`).

    `found_inf`, where it is set, is a float32 tensor of one element: a step for which it is 1 leaves everything as it
    is. An optimizer with `can_skip_on_device` does so without asking the host; the others wait for the flag.
    """

    found_inf: Tensor | None = None
    optional_state: frozenset[str] = frozenset()  # keys that a saved state may lack
    momentum_key = "momentum_buffer"  # the key of a state that has the parameter's shape

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        if not isinstance(params, Tensor):
            # torch refuses an optimizer without parameters, which a model without matrices would need
            params = list(params) or [{"params": []}]  # type: ignore[assignment]
        super().__init__(params, defaults)

    def create_state(self, W: Tensor, group: Group) -> State:
        """Return all state of a new parameter; on the meta device this gives the shapes and dtypes of the state."""
        return self.init_state(W, group)

    def init_state(self, W: Tensor, group: Group) -> State:
        """Return the state of a new parameter that the algorithm needs."""
        raise NotImplementedError

    def get_momentum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the state `momentum_key` for parameters of a dtype."""
        return dtype

    def check_group(self, group: Group) -> None:
        """Raise ValueError if an option of the group is invalid; subclasses add their checks."""
        check_number("lr", group["lr"])
        check_number("weight_decay", group["weight_decay"])

    def check_parameter(self, name: str, W: Tensor, group: Group) -> None:
        """Raise ValueError naming W if this group cannot take it; subclasses add their checks."""
        if not W.is_floating_point():
            raise ValueError(f"{name}: {type(self).__name__} takes real floating-point parameters, got {W.dtype}")

    def agree_on_group(self, group: Group, j: int) -> None:
        """Raise ValueError on all ranks if they give different groups with DTensors, which needs their agreement."""

    @property
    def can_skip_on_device(self) -> bool:
        """True if `step_groups` takes a skip flag."""
        return False

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
                weights = list(map(get_local, chunk))
                grads = list(map(get_local_gradient, chunk))
                states = [{key: get_local(s) for key, s in self.state[p].items()} for p in chunk]
                written = chain(weights, *(state.values() for state in states))
                run_or_restore(skip, partial(self.step_group, weights, grads, states, group), written)

    def step_group(self, params: list[Tensor], grads: list[Tensor], states: list[State], group: Group) -> None:
        """Move parameters of one group and their state in place; each of them has a gradient.

        Of DTensors these are the parts that this rank has.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with all parameters that have a gradient. Ambient autocast does not reach it.

        Args:
            closure: evaluates the model again and returns the loss, as for any torch optimizer.

        Returns:
            The result of the closure, or None.

        Raises:
            ValueError: for a sparse gradient, or for a parameter without state that this optimizer cannot take; no
                parameter has moved then.
        """
        flag = self.found_inf
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = self._collect_params()
        skip = None if flag is None else flag.reshape(()) != 0
        if skip is not None and not self.can_skip_on_device:
            if skip:  # the host waits
                return loss
            skip = None
        with _suspend_autocast(params):
            self._place_state()
            self.step_groups(params, skip)
        return loss

    def _collect_params(self) -> list[list[Tensor]]:
        """Return the parameters of each group that have a gradient.

        Raises:
            ValueError: for a sparse gradient.
        """
        for j, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None and p.grad.layout != torch.strided:
                    name = describe_parameter(group, i, j)
                    raise ValueError(f"{name}: its gradient must be dense, got {p.grad.layout}")
        return [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]

    @torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler.disable would import the compiler at once
    def _place_state(self) -> None:
        """Create the state that parameters with a gradient lack, and bring the rest to where and as it should be."""
        new: dict[Tensor, State] = {}
        for j, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state = self.state.get(p)
                if not state:
                    self.check_parameter(describe_parameter(group, i, j), p.detach(), group)
                    new[p] = self._create_state_of(p, group)
                elif not self._is_in_place(p, state[self.momentum_key]):
                    new[p] = _copy_state(state, self._create_state_of(p, group, on_meta=True), p.device)
        self.state.update(new)

    def _create_state_of(self, p: Tensor, group: Group, on_meta: bool = False) -> State:
        """Return the state of a new parameter; that of a DTensor has its mesh and placements, besides scalars.

        Args:
            on_meta: create tensors on the meta device, with their shapes and dtypes alone.
        """
        W = p.detach()
        if not is_dtensor(W):
            return self.create_state(W.to("meta") if on_meta else W, group)
        local = get_local(W)
        state = self.create_state(local.to("meta") if on_meta else local, get_local_options(group))
        whole = self.create_state(create_meta_whole(W), group)
        return {key: wrap_local(s, W, whole[key].shape) if s.ndim else s for key, s in state.items()}

    def _is_in_place(self, p: Tensor, momentum: Tensor) -> bool:
        """Return whether the state of a parameter is where and as `create_state` would make it now."""
        return momentum.device == p.device and momentum.dtype == self.get_momentum_dtype(p.dtype)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters and check it.

        Raises:
            ValueError: naming the invalid parameter or option; the optimizer is then as before.
        """
        super().add_param_group(param_group)
        group, j = self.param_groups[-1], len(self.param_groups) - 1
        try:
            group.update({key: _to_python_number(key, value) for key, value in group.items()})
            self.agree_on_group(group, j)
            self.check_group(group)
            seen = set()
            for i, p in enumerate(group["params"]):
                if p in seen:
                    raise ValueError(f"{describe_parameter(group, i, j)} is in the group twice")
                seen.add(p)
                self.check_parameter(describe_parameter(group, i, j), p.detach(), group)
        except Exception:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the options of the groups; a user's function is stored by its name."""
        return name_functions(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of one with the same state (torch.optim.Muon's into Muon).

        Parameters are matched by name where both sides have names, else by their order. State takes the dtypes and the
        device of a state created now, where torch alone would round it to the dtype of the parameter. Options that the
        saved groups lack stay as they are. As with torch's optimizers, parameters without saved state have none then.

        Raises:
            ValueError: if the saved groups, their options or the state of a parameter do not fit this optimizer, which
                is then as before.
        """
        options: list[Group] = []
        loaded: dict[Tensor, State] = {}

        def check(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            state_dict = match_by_name(self.param_groups, state_dict)
            options.extend(self._merge_options(state_dict["param_groups"]))
            for j, (group, saved_group) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=True)):
                for i, (p, key) in enumerate(zip(group["params"], saved_group["params"], strict=True)):
                    if saved := state_dict["state"].get(key):
                        expected = self._create_state_of(p, group, on_meta=True)
                        self._check_saved_state(describe_parameter(group, i, j), expected, saved)
                        loaded[p] = _copy_state(saved, expected, p.device)
            return state_dict

        def restore(_: torch.optim.Optimizer) -> None:
            for group, merged in zip(self.param_groups, options, strict=True):
                group.update(merged)
            self.state.update(loaded)

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
        options = []
        for j, (group, saved_group) in enumerate(zip(self.param_groups, saved, strict=True)):
            merged = {**group, **saved_group, "params": group["params"]}
            for key, value in group.items():
                if callable(value) and merged[key] == get_function_name(value):
                    merged[key] = value
            self.check_group(merged)
            if merged.get("blocks") != group.get("blocks"):
                raise ValueError(
                    f"group {j} was saved with blocks={merged['blocks']}, but in this optimizer has "
                    f"blocks={group['blocks']}"
                )
            options.append({key: value for key, value in merged.items() if key not in ("params", "param_names")})
        return options

    def _check_saved_state(self, name: str, own: State, saved: State) -> None:
        """Raise ValueError if the saved state of a parameter has other keys or shapes than its own."""
        if own.keys() - self.optional_state != saved.keys() - self.optional_state:
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


def _copy_state(state: State, expected: State, device: torch.device) -> State:
    """Return copies of a state with the dtypes and strides of `expected`, whose tensors on meta stand for `device`.

    DTensors in `expected` take their part of what they are given, be it DTensors or whole tensors.
    """
    copies = {}
    for key, tensor in expected.items():
        local = get_local(tensor)
        target = torch.empty_like(local, device=device if local.is_meta else local.device)
        target.copy_(get_local_like(state[key], tensor) if key in state else local)
        copies[key] = wrap_local(target, tensor, tensor.shape) if is_dtensor(tensor) else target
    return copies


def get_local_gradient(p: Tensor) -> Tensor:
    """Return this rank's part of a parameter's gradient."""
    assert p.grad is not None
    return get_local_like(p.grad, p)


def _suspend_autocast(params: list[list[Tensor]]) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off on the device of the parameters."""
    for p in chain.from_iterable(params):
        kind = p.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
    return nullcontext()


def _to_python_number(key: str, value: Any) -> Any:
    """Return numpy's numbers and one-element tensors, except lr's, as Python's, which load with weights_only."""
    if isinstance(value, Tensor) and value.numel() == 1 and key != "lr":
        return value.item()
    if isinstance(value, Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, Integral) else float(value)
    return value
