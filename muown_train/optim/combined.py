"""Several optimizers as one, for schedulers, gradient scalers and checkpoints that take a single one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .core.matrix import MatrixOptimizer
from .core.skip_step import heeds_flag, step_unless


class Combined(torch.optim.Optimizer):
    """One torch optimizer made of parts: `Combined(Muown(matrix), AdamW(rest))`.

    `param_groups` are the parts' own groups in a row, so that what a scheduler writes reaches the part;
    `state` is that of all parts; the state dict is one in torch's format, with parameters numbered over all
    groups. `optimizers` are the parts.

    Raises:
        ValueError: without parts, and for a parameter that two groups own.
    """

    found_inf: Tensor | None = None

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        if not optimizers:
            raise ValueError("Combined needs at least one optimizer")
        owned: set[Tensor] = set()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for i, p in enumerate(group["params"]):
                    if p in owned:
                        names = group.get("param_names")
                        name = repr(names[i]) if names else f"of shape {tuple(p.shape)}"
                        raise ValueError(f"parameter {name} is in two groups: one optimizer must own it")
                    owned.add(p)
        # Not Optimizer.__init__, which would make groups and state of its own; this sets up all the rest.
        self.__setstate__({"defaults": {}, "optimizers": optimizers})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all parts, in order: a new list of the same dicts."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The state of all parts by parameter: a new dict of the same entries."""
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

        A flag in `found_inf` goes to each part, see `gate.step_unless`.
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
                step_unless(flag, optimizer)
        return loss

    @property
    def heeds_flag(self) -> bool:
        """Whether all parts leave an update out on the device."""
        return all(map(heeds_flag, self.optimizers))

    def compile(self, **options: Any) -> None:
        """Compile the parts that can be, see `MatrixOptimizer.compile`."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, MatrixOptimizer):
                optimizer.compile(**options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand each part its share of a state dict of such a combination.

        Raises:
            ValueError: if the groups do not match; no part has been changed then.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved = state_dict["param_groups"]
        sizes, saved_sizes = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved))
        if sizes != saved_sizes:
            raise ValueError(f"the saved optimizer has groups of {saved_sizes} parameters, this one of {sizes}")
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
        """Not here: which part would take it cannot be known.

        Raises:
            ValueError: always.
        """
        raise ValueError("add the group to one of the parts instead: combined.optimizers[i].add_param_group(group)")
