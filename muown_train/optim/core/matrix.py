"""The one `step` of the matrix optimizers: everything about an update that is not its algorithm.

A subclass says which state a matrix has (`init_state`) and how one matrix moves: what is orthogonalised (`prepare`)
and what becomes of the result (`apply`). The base splits fused matrices into their blocks, orthogonalises blocks of one
shape together, keeps the state, compiles the two if asked to, and checks what users pass.

Legend: W (m, n) weight, G (m, n) gradient, M (m, n) momentum, X (m, n) what is orthogonalised, O (m, n) the
result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from numbers import Real
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .base import EagerOptimizer, Group, State
from .orthogonalize import dtype_name, newton_schulz, svd
from .polar_express import polar_express
from .skip_step import unless, unless_many

Kept = Sequence[Tensor]  # what `prepare` leaves for `apply` besides X
Number = float | Tensor  # tensors of one element in compiled code, where a new number would be a new program

# Of matrices orthogonalised together; bounds the extra memory of a step (a copy in float32 takes 4 bytes of each).
# On a CPU more than the caches hold is slower, on a GPU many small matrices keep it busy.
MAX_BATCH_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}


# prepare, apply, and what makes the numbers that apply takes
Functions = tuple[Callable[..., tuple[Tensor, ...]], Callable[..., None], Callable[[Any], Number]]


class _Block(NamedTuple):
    """One matrix as the algorithm sees it: W and G (m, n), these rows of its state, its group's options."""

    W: Tensor
    G: Tensor
    state: State
    group: Group


class MatrixOptimizer(EagerOptimizer):
    """Optimizer of 2-D parameters by orthogonalised updates.

    Options of a group besides the subclass's arguments: `blocks`, the rows of each matrix of a fused
    parameter (`blocks=(768, 768, 768)` for q, k and v in one), or None. A fused parameter moves exactly as
    its blocks would move as parameters of their own.

    All state exists from construction on. `state[p]["step"]` is the number of updates (float32, on the CPU, or where
    `found_inf` was since the first step that heeded it); all other state has the shape of the parameter (m, n) or of
    its rows (m,), so that row blocks of it are views.
    """

    optional_state = frozenset({"step"})  # which torch.optim.Muon does not keep
    _compile_options: dict[str, Any] | None = None

    def new_state(self, W: Tensor, group: Group) -> State:
        """ "step", and what `init_state` of the algorithm gives: tensors (m, n) or (m,)."""
        return {"step": torch.zeros((), dtype=torch.float32, device="cpu"), **self.init_state(W, group)}

    def begin(self, W: Tensor, G: Tensor, state: State, group: Group) -> None:
        """What is done once, before the first `prepare` of a matrix; arguments as there."""

    def prepare(self, W: Tensor, G: Tensor, state: State, group: Group) -> tuple[Tensor, ...]:
        """Bring the momentum up to date; X to be orthogonalised, which is only read, and whatever `apply` needs.

        `state` are views into that of the parameter, to be written to; W and G (m, n) are only read.
        """
        raise NotImplementedError

    def apply(self, W: Tensor, O: Tensor, kept: Kept, state: State, group: Group, lr: Number, step: Number) -> None:  # noqa: E741
        """Move one matrix and the vectors of its state, in place.

        O (m, n) has the dtype of X, `kept` is the rest of what `prepare` returned, lr the group's, and step the number
        of this update, from 1. Everything else in `group` is a constant to compiled code.
        """
        raise NotImplementedError

    def scale(self, group: Group, m: int, n: int) -> float:
        """What the learning rate of an m by n matrix of this group is multiplied by."""
        return adjust_lr(group["adjust_lr_fn"], m, n)

    def scales(self, group: Group) -> list[float]:
        """`scale` of each block of each parameter of the group, in order."""
        return [self.scale(group, m, p.shape[1]) for p in group["params"] for m in _block_rows(p, group)]

    @property
    def heeds_flag(self) -> bool:
        """Exact SVD waits for the device anyhow and refuses what is no number, and so may a user's function."""
        return all(group["orthogonalizer"] in ("newton_schulz", "polar_express") for group in self.param_groups)

    def have_begun(self, moved: list[list[Tensor]]) -> bool:
        steps = (self.state[p]["step"] for params in moved for p in params)
        return all(not step.is_cpu or bool(step > 0) for step in steps)

    def update_groups(self, moved: list[list[Tensor]], skip: Tensor | None) -> None:
        """Update all groups together, since matrices of one shape are orthogonalised at once."""
        for batch in _batches(self._blocks(moved, skip)):
            here = None if skip is None else skip.to(batch[0].W.device)
            vectors = [s for block in batch for s in block.state.values() if s.ndim == 1]
            unless_many(here, partial(self._update_batch, batch, here), vectors)

    def _update_batch(self, batch: list[_Block], skip: Tensor | None) -> None:
        """Update what is orthogonalised as one stack, vectors of state whatever skip is.

        Its temporary memory is free before the next.
        """
        prepare, apply, number = self._functions(batch[0].W, skip)
        prepared = [prepare(skip, *block) for block in batch]
        outputs = orthogonalize([X for X, *_ in prepared], batch[0].group)
        for (W, _, state, group), (_, *kept), O in zip(batch, prepared, outputs, strict=True):  # noqa: E741
            # a number that depends on flags stays on the device
            step = number(state["step"]) if skip is None else state["step"].to(skip.device, torch.float64)
            apply(skip, W, O, kept, state, group, number(group["lr"]), step)

    def _prepare_unless(
        self, skip: Tensor | None, W: Tensor, G: Tensor, state: State, group: Group
    ) -> tuple[Tensor, ...]:
        """`prepare`, without effect on matrices if skip."""
        return unless(skip, lambda: self.prepare(W, G, state, group), [s for s in state.values() if s.ndim == 2])

    def _apply_unless(self, skip: Tensor | None, W: Tensor, *rest: Any) -> None:
        """`apply`, without effect on W if skip."""
        return unless(skip, lambda: self.apply(W, *rest), [W])

    def compile(self, **options: Any) -> None:
        """Fuse what is elementwise with torch.compile from now on; products of matrices stay as they are.

        Results change by rounding. Each shape of matrices is compiled once, at its first step: seconds each. Needs what
        torch.compile needs, a C++ compiler on CPUs. Options of groups other than lr are constants to it: one that moves
        with every step, as a cycled momentum does, is compiled again and again until torch gives up and runs it
        uncompiled. Copies of the optimizer are not compiled.

        Args:
            options: of torch.compile.
        """
        self._compile_options = options
        self._compiled: dict[Any, Functions] = {}

    def _functions(self, W: Tensor, skip: Tensor | None) -> Functions:
        if self._compile_options is None:
            return self._prepare_unless, self._apply_unless, float
        key = W.shape, W.dtype, W.device, skip is None
        if key not in self._compiled:
            options = {"dynamic": False, **self._compile_options}
            prepare, apply = (torch.compile(_copy(f), **options) for f in (self._prepare_unless, self._apply_unless))
            self._compiled[key] = prepare, apply, _as_tensor
        return self._compiled[key]

    def _blocks(self, moved: list[list[Tensor]], skip: Tensor | None) -> list[_Block]:
        """The blocks of the parameters, whose steps it counts up unless skip."""
        blocks = []
        counts = None if skip is None else skip.logical_not()
        for params, group in zip(moved, self.param_groups, strict=True):
            for p in params:
                assert p.grad is not None
                state = self.state[p]
                if counts is None:
                    state["step"] += 1
                else:
                    state["step"] = state["step"].to(counts.device, non_blocking=True).add_(counts)
                first, start = counts is None and bool(state["step"] == 1), 0
                for m in _block_rows(p, group):
                    rows = {k: s if s.ndim == 0 else s.narrow(0, start, m) for k, s in state.items()}
                    blocks.append(_Block(p.narrow(0, start, m), p.grad.narrow(0, start, m), rows, group))
                    if first:
                        self.begin(*blocks[-1])
                    start += m
        return blocks

    def check_group(self, group: Group) -> None:
        """Raise ValueError if an option of the group cannot be, and bring the others into plain form.

        Subclasses add theirs. Sequences become tuples and dtypes names, so that a state dict can be JSON.
        """
        check_number("lr", group["lr"])
        check_number("weight_decay", group["weight_decay"])
        check_number("momentum", group["momentum"], below=1.0)
        check_number("eps", group["eps"], positive=True)
        if not isinstance(group["nesterov"], bool):
            raise ValueError(f"nesterov must be true or false, got {group['nesterov']!r}")
        check_choice("adjust_lr_fn", group["adjust_lr_fn"], ("match_rms_adamw", "original", None))
        if not callable(group["orthogonalizer"]):
            kinds = ("newton_schulz", "polar_express", "svd")
            check_choice("orthogonalizer", group["orthogonalizer"], kinds, "a callable")
        steps = group["ns_steps"]
        if not is_whole(steps) or not 1 <= steps < 100:
            raise ValueError(f"ns_steps must be a whole number from 1 to 99, got {steps!r}")
        group["ns_coefficients"] = check_numbers("ns_coefficients", group["ns_coefficients"], 3, low=-math.inf)
        if is_sequence(group["blocks"]):
            group["blocks"] = tuple(group["blocks"])
        if group["ns_dtype"] is not None:
            try:
                group["ns_dtype"] = dtype_name(group["ns_dtype"])
            except ValueError as error:
                raise ValueError(f"ns_dtype: {error}") from None

    def check_parameter(self, name: str, W: Tensor, group: Group) -> None:
        """Raise ValueError naming W if it cannot be in this group; subclasses add their checks."""
        kind = type(self).__name__
        if W.ndim != 2:
            raise ValueError(f"{name}: {kind} takes 2-D parameters, got {W.ndim}-D; give it to another optimizer")
        if W.numel() == 0:
            raise ValueError(f"{name}: {kind} takes matrices with elements, got shape {tuple(W.shape)}")
        if not W.is_floating_point():
            raise ValueError(f"{name}: {kind} takes real floating-point parameters, got {W.dtype}")
        check_blocks(name, W, group["blocks"])


def adjust_lr(adjust_lr_fn: str | None, m: int, n: int, direction_scale: float = 0.2) -> float:
    """The factor of the learning rate of an m by n matrix.

    "match_rms_adamw": direction_scale sqrt(max(m, n)), of 0.2 the size of Adam's updates (Liu et al. 2025, "Muon is
    scalable").
    "original": sqrt(max(1, m/n)) (Jordan et al. 2024). None: 1.
    """
    if adjust_lr_fn == "match_rms_adamw":
        return float(direction_scale) * math.sqrt(max(m, n))
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, m / n))
    return 1.0


def subtract(W: Tensor, O: Tensor, rate: Number, out: Tensor | None = None) -> Tensor:  # noqa: E741
    """W - rate O, in one pass, compiled or not."""
    return torch.sub(W, O * rate, out=out) if isinstance(rate, Tensor) else torch.sub(W, O, alpha=rate, out=out)


def orthogonalize(X: list[Tensor], group: Group) -> Tensor:
    """k matrices X (m, n), stacked and orthogonalised as the group's options say: (k, m, n) in their dtype.

    Raises:
        ValueError: if the user's own orthogonalizer returns another shape.
    """
    kind = group["orthogonalizer"]
    if kind == "newton_schulz":
        return newton_schulz(X, group["ns_steps"], group["ns_coefficients"], group["eps"], group["ns_dtype"])
    if kind == "polar_express":
        return polar_express(X, group["ns_steps"], group["eps"], group["ns_dtype"])
    if kind == "svd":
        return svd(torch.stack(X))
    stacked = torch.stack(X)
    output: Tensor = kind(stacked)
    if output.shape != stacked.shape:
        raise ValueError(f"the orthogonalizer returned shape {tuple(output.shape)} for {tuple(stacked.shape)}")
    return output


def _batches(blocks: Iterable[_Block]) -> Iterable[list[_Block]]:
    """The blocks in lists to orthogonalise as one stack, of at most MAX_BATCH_ELEMENTS unless alone."""
    alike: dict[Any, list[_Block]] = {}
    for block in blocks:
        W, group = block.W, block.group
        settings = [group[key] for key in ("orthogonalizer", "ns_steps", "eps", "ns_dtype")]
        key = (W.shape, W.dtype, W.device, *settings, *group["ns_coefficients"])
        alike.setdefault(key, []).append(block)
    for batch in alike.values():
        W = batch[0].W
        size = max(1, MAX_BATCH_ELEMENTS.get(W.device.type, 2**26) // W.numel())
        for start in range(0, len(batch), size):
            yield batch[start : start + size]


def _copy(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method with code of its own: compiled programs are kept, and limited in number, by the code object."""
    function = cast(Any, method).__func__
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return MethodType(copy, cast(Any, method).__self__)


def _as_tensor(number: Number) -> Tensor:
    return torch.as_tensor(number, dtype=torch.float64, device="cpu")


def _block_rows(p: Tensor, group: Group) -> Iterable[int]:
    return group["blocks"] or (p.shape[0],)


def is_sequence(value: object) -> bool:
    """Whether value is a list, a tuple or alike, and no string."""
    return isinstance(value, Iterable) and hasattr(value, "__len__") and not isinstance(value, str | dict | Set)


def is_whole(value: object) -> bool:
    """Whether value is a whole number, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_blocks(name: str, W: Tensor, blocks: Any) -> None:
    """Raise ValueError naming W unless its rows are those of the blocks, or blocks is None."""
    if blocks is None:
        return
    whole = is_sequence(blocks) and all(is_whole(rows) and rows > 0 for rows in blocks)
    if not whole or sum(blocks) != W.shape[0]:
        raise ValueError(
            f"{name}: blocks must be positive whole numbers that sum to its {W.shape[0]} rows, got {blocks!r}"
        )


def check_number(key: str, value: object, *, low: float = 0.0, below: float = math.inf, positive: bool = False) -> None:
    """Raise ValueError unless value is a finite number (or a tensor of one) with low <= value < below."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, Real) and not isinstance(number, bool):
        number = float(number)
        if math.isfinite(number) and low <= number < below and not (positive and number == 0):
            return
    bounds = ["> 0"] if positive else [f">= {low:g}"] if low > -math.inf else []
    bounds += [f"< {below:g}"] if below < math.inf else []
    raise ValueError(f"{key} must be a finite number {' and '.join(bounds)}".rstrip() + f", got {value!r}")


def check_numbers(key: str, value: Any, count: int, *, low: float = 0.0, below: float = math.inf) -> tuple[float, ...]:
    """The numbers in value as a tuple; ValueError unless they are `count`, in [low, below)."""
    if not is_sequence(value) or len(value) != count:
        raise ValueError(f"{key} must be {count} numbers, got {value!r}")
    for number in value:
        check_number(key, number, low=low, below=below)
    return tuple(float(number) for number in value)


def check_choice(key: str, value: object, choices: tuple[str | None, ...], other: str = "") -> None:
    """Raise ValueError unless value is one of the choices; `other` names what else is right."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{key} must be one of {allowed}{' or ' + other if other else ''}, got {value!r}")
