"""Several optimizers as one, for schedulers, gradient scalers and checkpoints that take a single one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .core.base import check_group_sizes, describe_parameter
from .core.matrix import MatrixOptimizer
from .core.skip_step import can_skip_on_device, step_or_skip


class Combined(torch.optim.Optimizer):
    """One torch optimizer made of several parts: `Combined(Muown(matrix), AdamW(rest))`.

    `optimizers` are the parts. `param_groups` are the parts' own groups in a row, so that a scheduler's
    changes reach the parts; `state` is that of all parts; the state dict has torch's format, with parameters numbered
    over all groups.

    Raises:
        ValueError: if there are no parts, or if two groups own a parameter.
    """

    found_inf: Tensor | None = None

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        if not optimizers:
            raise ValueError("Combined needs at least one optimizer")
        owned: set[Tensor] = set()
        for j, group in enumerate(chain.from_iterable(optimizer.param_groups for optimizer in optimizers)):
            for i, p in enumerate(group["params"]):
                if p in owned:
                    raise ValueError(f"{describe_parameter(group, i, j)} is in two groups: one optimizer must own it")
                owned.add(p)
        # Optimizer.__init__ would create groups and state of its own; this sets up everything else.
        self.__setstate__({"defaults": {}, "optimizers": optimizers})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all parts in order, as a new list of the same dicts."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The state of all parts by parameter, as a new dict of the same entries."""
        merged: defaultdict[Tensor, Any] = defaultdict(dict)
        for optimizer in self.optimizers:
            merged.update(optimizer.state)
        return merged

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizers: tuple[torch.optim.Optimizer, ...]
        super().__setstate__(state)

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand each part its share of the state dict of a `Combined`.

        Raises:
            ValueError: if the groups do not match; no part has changed then.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved = state_dict["param_groups"]
        check_group_sizes(self.param_groups, saved)
        start = 0
        for optimizer in self.optimizers:
            groups = saved[start : start + len(optimizer.param_groups)]
            start += len(groups)
            ids = {i for group in groups for i in group["params"]}
            share = {i: state for i, state in state_dict["state"].items() if i in ids}
            optimizer.load_state_dict({"state": share, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse the group, since nothing says which part is to take it.

        Raises:
            ValueError: always.
        """
        raise ValueError("add the group to one of the parts instead: combined.optimizers[i].add_param_group(group)")
