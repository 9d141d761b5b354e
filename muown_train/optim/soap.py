"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, "SOAP: improving and stabilizing
Shampoo using Adam", Algorithm 3).

    W, G (m, n)  weight, gradient      L, R (m, m), (n, n)  averages of G G^T and G^T G      A  a block of W's rows
    M, V (m, n)  Adam's averages of the rotated gradient Q_L^T G Q_R     Q_L, Q_R  approximate eigenvectors of L, R

Where the authors' code differs from the paper, this follows the code: the first gradient only initialises L, R and
their eigenvectors and does not move W, so that no gradient is used in a basis made from it; L and R are averaged with
betas[1]; weight decay comes after the step. M is kept rotated and is rotated again when the basis changes; V is only
reordered.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .core.base import BaseOptimizer, Group, State, collect_defaults
from .core.checks import check_bool, check_no_dtensor, check_number, check_numbers, is_whole_number
from .core.layouts import LAYOUT_DEFAULTS, check_layout, check_layout_options, split_matrices

# The rate of products divided by that of a QR decomposition of 8/3 k^3 operations (factoring, and forming Q), as the
# steps of SOAP on an H200 tell (docs/performance.md): 28 and 1.8 TFLOP/s.
QR_SLOWDOWN = 16


class _Side(NamedTuple):
    """One preconditioned side of a matrix, that of its rows (axis 0) or of its columns (axis 1)."""

    axis: int
    gram: Tensor  # (k, k), L or R
    basis: Tensor  # (k, k), the eigenvectors of gram in its columns, largest eigenvalue first


class SOAP(BaseOptimizer):
    """SOAP for matrices, Adam for everything else.

    Args:
        params: parameters of any shape, pairs of name and parameter, or groups of them. A group of matrices may have
            `blocks`, `layout` and `transposed` (see `core/layouts.py`); each matrix is preconditioned on its own.
        lr: learning rate, a number or a one-element tensor (on a GPU the host waits for it in each step).
        betas: the decay of M, and that of V, L and R.
        eps: added to sqrt(V).
        weight_decay: decoupled: W <- (1 - lr weight_decay) W, after the step.
        precondition_frequency: steps between two refinements of the eigenvectors, each one power iteration and a QR
            decomposition.
        max_precondition_dim: a side that is longer is not preconditioned; a matrix with two such sides takes Adam.
        correct_bias: whether to correct the bias of M and V, as Adam does.

    State, in float32 or, for float64 parameters, float64: `exp_avg` (M) and `exp_avg_sq` (V) in the shape of the
    parameter; `left_i`, `left_basis_i` (m, m) and `right_i`, `right_basis_i` (n, n) of block i, of which an unfused
    matrix has only one; `step`, the number of gradients seen, one more than the number of times W has moved.

    Raises:
        ValueError: naming the invalid parameter or option.
    """

    momentum_key = "exp_avg"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10000,
        correct_bias: bool = True,
    ) -> None:
        super().__init__(params, collect_defaults(locals(), **LAYOUT_DEFAULTS))

    def get_momentum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype == torch.float64 else torch.float32

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        check_number("eps", group["eps"], positive=True)
        group["betas"] = check_numbers("betas", group["betas"], 2, below=1.0)
        for key, least in (("precondition_frequency", 1), ("max_precondition_dim", 0)):
            if not is_whole_number(group[key]) or group[key] < least:
                raise ValueError(f"{key} must be a whole number of at least {least}, got {group[key]!r}")
        check_bool("correct_bias", group["correct_bias"])
        check_layout_options(group)

    def check_parameter(self, name: str, W: Tensor, group: Group) -> None:
        check_no_dtensor(name, W, type(self).__name__)
        super().check_parameter(name, W, group)
        if W.ndim == 2 or group["layout"]:
            check_layout(name, W, group, type(self).__name__)
        elif group["blocks"] is not None:
            raise ValueError(f"{name}: only matrices have blocks, got {W.ndim} dimensions")

    def init_state(self, W: Tensor, group: Group) -> State:
        dtype = self.get_momentum_dtype(W.dtype)
        state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
        state |= {key: torch.zeros_like(W, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
        for i, A in enumerate(_split_blocks(W, W, group)):
            for side, size in zip(("left", "right"), A.shape, strict=False):
                if A.ndim == 2 and size <= group["max_precondition_dim"]:
                    state[f"{side}_{i}"] = W.new_zeros(size, size, dtype=dtype)
                    state[f"{side}_basis_{i}"] = torch.eye(size, dtype=dtype, device=W.device)
        return state

    def step_group(self, params: list[Tensor], grads: list[Tensor], states: list[State], group: Group) -> None:
        for W, grad, state in zip(params, grads, states, strict=True):
            state["step"] += 1
            parts = (_split_blocks(X, W, group) for X in (W, grad, state["exp_avg"], state["exp_avg_sq"]))
            for i, (A, G, M, V) in enumerate(zip(*parts, strict=True)):
                _step_block(A, G.to(M.dtype), M, V, _get_sides(state, i), int(state["step"]) - 1, group)


def count_flops(m: int, n: int, group: Group) -> int:
    """Return the floating-point operations of a step of one matrix (m, n), the mean over many steps.

    Those of QR count QR_SLOWDOWN times, since a device takes so much longer for them than for those of products.
    """
    flops, refining = 0, 0
    for k, other in ((m, n), (n, m)):
        if k <= group["max_precondition_dim"]:
            flops += 3 * 2 * k * k * other  # rotations of G and of the step, and the Gram matrix
            refining += 2 * 2 * k * k * other + 2 * k**3 + QR_SLOWDOWN * 8 * k**3 // 3  # of M, the Gram matrix's, QR
    return flops + refining // int(group["precondition_frequency"])


def _step_block(W: Tensor, G: Tensor, M: Tensor, V: Tensor, sides: list[_Side], step: int, group: Group) -> None:
    """Take step number `step` with a matrix W (m, n) or a parameter of another shape; number 0 only initialises."""
    beta1, beta2 = group["betas"]
    if step > 0:
        lr = float(group["lr"])
        rotated = _rotate(G, sides)
        M.lerp_(rotated, 1 - beta1)
        V.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        corrected = lr
        if group["correct_bias"]:
            corrected *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
        W.sub_(_rotate_back(M / V.sqrt().add_(group["eps"]), sides), alpha=corrected)
        W.mul_(1 - lr * group["weight_decay"])
    for side in sides:
        side.gram.lerp_(G @ G.mT if side.axis == 0 else G.mT @ G, 1 - beta2)
    if step == 0:
        for side in sides:
            side.basis.copy_(_compute_eigenvectors(side.gram))
    elif step % group["precondition_frequency"] == 0:
        _refine(M, V, sides)


def _refine(M: Tensor, V: Tensor, sides: list[_Side]) -> None:
    """Refine the eigenvectors by one step of orthogonal iteration, and bring M and V into the new basis."""
    M_back = _rotate_back(M, sides)
    for side in sides:
        turned = side.gram @ side.basis
        order = (side.basis * turned).sum(0).argsort(descending=True)  # the order of the estimated eigenvalues
        side.basis.copy_(torch.linalg.qr(turned[:, order]).Q)
        V.copy_(V.index_select(side.axis, order))
    M.copy_(_rotate(M_back, sides))


def _compute_eigenvectors(gram: Tensor) -> Tensor:
    """Return the eigenvectors of gram (k, k), symmetric, in columns, largest eigenvalue first."""
    try:
        vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # float64 can converge where float32 does not
        vectors = torch.linalg.eigh(gram.double()).eigenvectors.to(gram.dtype)
    return vectors.flip(-1)


def _rotate(X: Tensor, sides: list[_Side]) -> Tensor:
    for side in sides:
        X = side.basis.mT @ X if side.axis == 0 else X @ side.basis
    return X


def _rotate_back(X: Tensor, sides: list[_Side]) -> Tensor:
    for side in sides:
        X = side.basis @ X if side.axis == 0 else X @ side.basis.mT
    return X


def _get_sides(state: State, i: int) -> list[_Side]:
    names = [(axis, f"{side}_{i}", f"{side}_basis_{i}") for axis, side in enumerate(("left", "right"))]
    return [_Side(axis, state[gram], state[basis]) for axis, gram, basis in names if gram in state]


def _split_blocks(X: Tensor, like: Tensor, group: Group) -> list[Tensor]:
    """Return the matrices of a parameter, or the parameter itself if it is none."""
    return split_matrices(X, group, like) if X.ndim == 2 or group["layout"] else [X]
