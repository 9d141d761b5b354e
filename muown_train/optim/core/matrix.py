"""The shared `step` of the matrix optimizers: everything about a step that is not its algorithm.

A subclass defines the state of a matrix (`init_state`) and how one matrix moves: what is orthogonalised (`prepare`)
and how the result is applied (`apply`). The base class splits fused matrices into their blocks, orthogonalises blocks
of one shape together, keeps the state, compiles `prepare` and `apply` on request, and checks what users pass.

Legend: W (m, n) weight, G (m, n) gradient, M (m, n) momentum, X (m, n) input of the orthogonalisation, O (m, n) its
output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..row_shards.agreement import agree, raise_together
from ..row_shards.exchange import Matrix, map_whole, run_in_pipeline
from ..row_shards.placement import create_meta_whole, is_dtensor
from .base import BaseOptimizer, Group, State
from .blocks import (
    Block,
    batch_blocks,
    chunk_rows,
    join_rows,
    join_weights,
    split_parameter,
    write_rows,
    write_state,
)
from .checks import check_bool, check_choice, check_number, check_numbers, is_whole_number
from .layouts import check_layout, check_layout_options, split_matrices
from .names import describe_parameter, list_options
from .orthogonalize import apply_quintics, choose_dtype, get_dtype_name, list_polar_express_quintics, svd
from .skip_step import remember, run_or_restore

Extras = Sequence[Tensor]  # the tensors that `prepare` returns for `apply` besides X
Number = float | Tensor  # a one-element tensor in compiled code, which would be compiled again for each new float


class _StepFunctions(NamedTuple):
    """`prepare` and `apply`, compiled or not, and the conversion of the numbers that `apply` takes."""

    prepare: Callable[..., tuple[Tensor, ...]]
    apply: Callable[..., None]
    convert: Callable[[Any], Number]


class MatrixOptimizer(BaseOptimizer):
    """Optimizer of 2-D parameters by orthogonalised steps.

    A group has more options than the subclass has arguments: `blocks`, the rows of each matrix of a fused parameter
    (`blocks=(768, 768, 768)` for q, k and v in one), `layout` and `transposed`, see `core/layouts.py`. The matrices of
    a parameter move exactly as they would move as parameters of their own.

    `state[p]["step"]` is the number of steps taken (float32; on the CPU, or on the device of `found_inf` after the
    first step that obeyed it). All other state has the shape of the parameter, or one number for each row of its
    matrices (m,), in their order, so that the rows of a matrix are views into it.
    """

    optional_state = frozenset({"step"})  # torch.optim.Muon does not keep it
    moves_rows_alone = True  # whether `prepare` and `apply` of some rows of a matrix need nothing of the others
    _compile_options: dict[str, Any] | None = None

    def create_state(self, W: Tensor, group: Group) -> State:
        """Return "step" and the tensors that `init_state` gives, in the parameter's shape or one number a row."""
        return {"step": torch.zeros((), dtype=torch.float32, device="cpu"), **self.init_state(W, group)}

    def _is_in_place(self, p: Tensor, momentum: Tensor) -> bool:
        # the strides of a convolution's weight give the order of its columns
        return super()._is_in_place(p, momentum) and (p.ndim < 3 or momentum.stride() == p.stride())

    def prepare(self, W: Tensor, G: Tensor, state: State, group: Group) -> tuple[Tensor, ...]:
        """Add the gradient to the momentum; return X, which is only read, and the extras that `apply` needs.

        `state` holds views into the state of the parameter, to be written to; W and G (m, n) are only read.

        This works row by row, since a rank may have only some rows of a DTensor's matrix, or none; so does `apply`.
        """
        raise NotImplementedError

    def apply(
        self,
        W: Tensor,
        O: Tensor,  # noqa: E741
        extras: Extras,
        state: State,
        group: Group,
        lr: Number,
        step: Number,
        matrix: Matrix,
    ) -> None:
        """Move one matrix and the vectors of its state in place.

        Args:
            O: (m, n), in the dtype of X.
            extras: the tensors that `prepare` returned besides X.
            state: the scalars and vectors of the state.
            group: everything in it but lr is a constant to compiled code.
            lr: the group's learning rate.
            step: the number of this step, counted from 1.
            matrix: the whole matrix, with its shape and what combines numbers of all its rows.
        """
        raise NotImplementedError

    def get_lr_scale(self, group: Group, m: int, n: int) -> float:
        """Return the factor of the learning rate of an m by n matrix in this group."""
        return compute_lr_scale(group["adjust_lr_fn"], m, n, group.get("direction_scale", 0.2))

    def get_lr_scales(self, group: Group) -> list[float]:
        """Return `get_lr_scale` of each matrix of each parameter of the group, in order."""
        matrices = (W for p in group["params"] for W in split_matrices(create_meta_whole(p), group))
        return [self.get_lr_scale(group, *W.shape) for W in matrices]

    @property
    def can_skip_on_device(self) -> bool:
        """True unless a group uses exact SVD, which waits for the device and fails on NaN, or a user's function."""
        return all(group["orthogonalizer"] in ("newton_schulz", "polar_express") for group in self.param_groups)

    def step_groups(self, params: list[list[Tensor]], skip: Tensor | None) -> None:
        """Move all groups together, since matrices of one shape are orthogonalised at once."""
        sharded = []
        for batch, owners in batch_blocks(self._collect_blocks(params, skip)):
            if owners is None:
                X, finish = self._prepare_batch(batch, skip)
                O = orthogonalize(X.view(len(batch), *batch[0].W.shape), batch[0].group).reshape(X.shape)  # noqa: E741
                del X  # this memory is free before copies of O are made, and that of O before the next batch
                finish(O)
                del O, finish
            else:
                sharded.append(self._step_shards(batch, owners, skip))
        run_in_pipeline(sharded)

    def _step_shards(self, batch: list[Block], owners: list[int], skip: Tensor | None) -> Generator[None, None, None]:
        """Move rows of DTensors' matrices, each of which one rank orthogonalises; this yields while rows travel.

        Exact SVD and a user's function may fail. The rank then sends back what it was given, and all ranks learn of it.
        """
        X, finish = self._prepare_batch(batch, skip)
        group, matrices = batch[0].group, [block.matrix for block in batch]
        may_fail, error = not self.can_skip_on_device, None

        def apply_to_whole(whole: list[Tensor]) -> Iterable[Tensor]:
            nonlocal error
            try:
                return orthogonalize(torch.stack(whole), group)
            except Exception as raised:
                if not may_fail:
                    raise
                error = raised
                return whole

        rows = X.split([len(block.W) for block in batch])
        outputs = yield from map_whole(apply_to_whole, rows, matrices, owners)
        if may_fail and matrices[0].shard is not None:
            raise_together(matrices[0].shard.mesh, error)
        finish(torch.cat(outputs))

    def _prepare_batch(self, batch: list[Block], skip: Tensor | None) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Return X of blocks that are orthogonalised together, and the function that moves them by O.

        X and O have the rows of all blocks, one block below the other, in the dtype of the iteration if it is narrower
        than that of the momentum.
        """
        skip = None if skip is None else skip.to(batch[0].W.device)
        # compiled code reads large matrices once, whether they come in parts or not
        may_cut = self.moves_rows_alone and self._compile_options is None and not torch.compiler.is_compiling()
        group, stacked = batch[0].group, None
        moves, sizes, start = [], [], 0
        for blocks in chunk_rows(batch, may_cut):
            X, move = self._prepare_rows(blocks, skip)
            if stacked is None:
                rows = sum(len(block.W) for block in batch)
                stacked = X.new_empty((rows, X.shape[1]), dtype=choose_stack_dtype(X, group))
            stacked[start : start + len(X)] = X
            start += len(X)
            moves.append(move)
            sizes.append(len(X))
            del X  # this memory is free before the next rows

        def finish(O: Tensor) -> None:  # noqa: E741
            for move, rows in zip(moves, O.split(sizes), strict=True):
                move(rows)

        return cast(Tensor, stacked), finish

    def _prepare_rows(self, blocks: list[Block], skip: Tensor | None) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Do the same for blocks of one group, whose rows move together as those of one tall matrix."""
        W, G, state, group, matrix = join_rows(blocks)
        prepare, apply, convert = self._get_step_functions(W, matrix, skip)
        restore = remember(skip, [s for key, s in state.items() if s.ndim == 1 and key != "step"])
        X, *extras = prepare(skip, W, G, state, group)
        write_state(state, blocks, 2)
        state = {key: s for key, s in state.items() if s.ndim < 2}  # matrices are not kept until the results are there
        dtype = X.dtype

        def move(O: Tensor) -> None:  # noqa: E741
            W, step = join_weights(blocks), state["step"]
            # a step number that depends on skip flags stays on the device
            number = convert(step) if skip is None and step.ndim == 0 else step.to(W.device, torch.float64)
            apply(skip, W, O.to(dtype), extras, state, group, convert(group["lr"]), number, matrix)
            restore()
            if len(blocks) > 1:
                write_rows(W, [block.W for block in blocks])
            write_state(state, blocks, 1)

        return X, move

    def _prepare_or_restore(
        self, skip: Tensor | None, W: Tensor, G: Tensor, state: State, group: Group
    ) -> tuple[Tensor, ...]:
        """Call `prepare`; the matrices of the state stay as they are if skip is true."""
        matrices = [s for s in state.values() if s.ndim == 2]
        return run_or_restore(skip, lambda: self.prepare(W, G, state, group), matrices)

    def _apply_or_restore(self, skip: Tensor | None, W: Tensor, *rest: Any) -> None:
        """Call `apply`; W stays as it is if skip is true."""
        return run_or_restore(skip, lambda: self.apply(W, *rest), [W])

    def compile(self, **options: Any) -> None:
        """Fuse the elementwise work of later steps with torch.compile; products of matrices stay as they are.

        Results change by rounding. Each shape of matrices is compiled once, at its first step, which takes seconds.
        This needs what torch.compile needs, on CPUs a C++ compiler. Options of groups other than lr are constants to
        the compiled code: one that changes with every step, such as a cycled momentum, is compiled again and again
        until torch gives up and runs uncompiled code. Copies of the optimizer are not compiled.

        Args:
            options: passed on to torch.compile.
        """
        self._compile_options = options
        self._compiled: dict[Any, _StepFunctions] = {}

    def _get_step_functions(self, W: Tensor, matrix: Matrix, skip: Tensor | None) -> _StepFunctions:
        """Return the functions for rows like these, compiled if `compile` was called."""
        if self._compile_options is None:
            # a user who compiles the whole step has numbers that change with each step as tensors
            convert = _to_float64_tensor if torch.compiler.is_compiling() else float
            return _StepFunctions(self._prepare_or_restore, self._apply_or_restore, convert)
        is_sharded = matrix.shard is not None
        # a rank has few or many rows of a sharded matrix, for which one program serves
        key = W.shape[is_sharded:], W.stride(), W.dtype, W.device, skip is None, is_sharded
        if key not in self._compiled:
            options = {"dynamic": None if is_sharded else False, **self._compile_options}
            methods = (self._prepare_or_restore, self._apply_or_restore)
            prepare, apply = (torch.compile(_copy_method(method), **options) for method in methods)
            self._compiled[key] = _StepFunctions(prepare, apply, _to_float64_tensor)
        return self._compiled[key]

    def _collect_blocks(self, params: list[list[Tensor]], skip: Tensor | None) -> list[Block]:
        """Return the matrices of the parameters, and count the step in their state unless skip is true."""
        blocks: list[Block] = []
        steps: list[Tensor] = []
        increment = None if skip is None else skip.logical_not()
        for group_params, group in zip(params, self.param_groups, strict=True):
            for p in group_params:
                state = self.state[p]
                if increment is not None:
                    state["step"] = state["step"].to(increment.device, non_blocking=True).add_(increment)
                steps.append(state["step"])
                blocks.extend(split_parameter(p, state, group))
        if skip is None and steps:
            torch._foreach_add_(steps, 1)
        return blocks

    def _collect_params(self) -> list[list[Tensor]]:
        """Return the parameters of each group that have a gradient.

        Raises:
            ValueError: for a sparse gradient; on all ranks, where those of DTensors have gradients of different ones.
        """
        params = super()._collect_params()

        def describe(p: Tensor) -> str:
            return "no gradient" if p.grad is None else f"a gradient and {'' if self.state.get(p) else 'no '}state"

        facts: dict[Any, list[str]] = {}
        for j, group in enumerate(self.param_groups):
            for mesh, own in _list_facts(group, j, describe).items():
                facts.setdefault(mesh, []).extend(own)
        for mesh, everything in facts.items():
            agree(mesh, everything)
        return params

    def agree_on_group(self, group: Group, j: int) -> None:
        for mesh, own in _list_facts(group, j, lambda p: f"shape {tuple(p.shape)} and {p.dtype}").items():
            agree(mesh, own)

    def check_group(self, group: Group) -> None:
        """Raise ValueError if an option of the group is invalid, and bring the others into plain form.

        Sequences become tuples and dtypes become names, so that a state dict can be stored as JSON.
        """
        super().check_group(group)
        check_number("momentum", group["momentum"], below=1.0)
        check_number("eps", group["eps"], positive=True)
        check_bool("nesterov", group["nesterov"])
        check_choice("adjust_lr_fn", group["adjust_lr_fn"], ("match_rms_adamw", "original", None))
        if "direction_scale" in group:
            check_number("direction_scale", group["direction_scale"], positive=True)
        if not callable(group["orthogonalizer"]):
            kinds = ("newton_schulz", "polar_express", "svd")
            check_choice("orthogonalizer", group["orthogonalizer"], kinds, "a callable")
        steps = group["ns_steps"]
        if not is_whole_number(steps) or not 1 <= steps < 100:
            raise ValueError(f"ns_steps must be a whole number from 1 to 99, got {steps!r}")
        group["ns_coefficients"] = check_numbers("ns_coefficients", group["ns_coefficients"], 3, low=-math.inf)
        check_layout_options(group)
        if group["ns_dtype"] is not None:
            try:
                group["ns_dtype"] = get_dtype_name(group["ns_dtype"])
            except ValueError as error:
                raise ValueError(f"ns_dtype: {error}") from None

    def check_parameter(self, name: str, W: Tensor, group: Group) -> None:
        super().check_parameter(name, W, group)
        check_layout(name, W, group, type(self).__name__)


def compute_lr_scale(adjust_lr_fn: str | None, m: int, n: int, direction_scale: float) -> float:
    """Return the factor of the learning rate of an m by n matrix.

    "match_rms_adamw" gives direction_scale sqrt(max(m, n)), which for 0.2 is the size of Adam's steps (Liu et al. 2025,
    "Muon is scalable"); "original" gives sqrt(max(1, m/n)) (Jordan et al. 2024); None gives 1.
    """
    if adjust_lr_fn == "match_rms_adamw":
        return float(direction_scale) * math.sqrt(max(m, n))
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, m / n))
    return 1.0


def subtract_scaled(W: Tensor, O: Tensor, rate: Number, out: Tensor | None = None) -> Tensor:  # noqa: E741
    """Return W - rate O, computed in one pass, compiled or not."""
    return torch.sub(W, O * rate, out=out) if isinstance(rate, Tensor) else torch.sub(W, O, alpha=rate, out=out)


def orthogonalize(X: Tensor, group: Group) -> Tensor:
    """Orthogonalise k matrices X (k, m, n) as the group's options say; this may overwrite X.

    Raises:
        ValueError: if the user's own orthogonalizer returns another shape.
    """
    kind = group["orthogonalizer"]
    if kind == "newton_schulz":
        quintics = [group["ns_coefficients"]] * group["ns_steps"]
        return apply_quintics(X, quintics, group["eps"], group["ns_dtype"], overwrite=True)
    if kind == "polar_express":
        quintics = list_polar_express_quintics(group["ns_steps"])
        return apply_quintics(X, quintics, group["eps"], group["ns_dtype"], on_gram=False, overwrite=True)
    if kind == "svd":
        return svd(X)
    output: Tensor = kind(X)
    if output.shape != X.shape:
        raise ValueError(f"the orthogonalizer returned shape {tuple(output.shape)} for {tuple(X.shape)}")
    return output


def choose_stack_dtype(X: Tensor, group: Group) -> torch.dtype:
    """Return the dtype in which X is stacked, or travels: that of the iteration, if it is narrower than X's own."""
    if group["orthogonalizer"] not in ("newton_schulz", "polar_express"):
        return X.dtype
    used = choose_dtype(X.device, X.dtype, group["ns_dtype"])
    return used if used.itemsize < X.dtype.itemsize else X.dtype


def _list_facts(group: Group, j: int, describe: Callable[[Tensor], str]) -> dict[Any, list[str]]:
    """Return, for each mesh of a group's DTensors, what its ranks must agree on: the options, and words on each."""
    facts: dict[Any, list[str]] = {}
    for i, p in enumerate(group["params"]):
        if is_dtensor(p):
            fact = f"{describe_parameter(group, i, j)}, number {i}, with {describe(p)}"
            facts.setdefault(cast(Any, p).device_mesh, []).append(fact)
    options = [f"{key}={value} in group {j}" for key, value in sorted(list_options(group))] if facts else []
    return {mesh: own + options for mesh, own in facts.items()}


def _copy_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with a code object of its own.

    torch keeps compiled programs, and limits their number, for each code object.
    """
    function = cast(Any, method).__func__
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return MethodType(copy, cast(Any, method).__self__)


def _to_float64_tensor(number: Number) -> Tensor:
    return torch.as_tensor(number, dtype=torch.float64, device="cpu")
