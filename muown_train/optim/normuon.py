"""NorMuon: Muon whose orthogonalised rows are brought to a common size (Li et al. 2025, "NorMuon: making Muon more
efficient and scalable", arXiv 2510.05491, Algorithm 1); and NorMuown, which does the same in Muown.

    O (m, n)  orthogonalised momentum     v (m,)  average of the mean square of O's rows

    v <- beta2 v + (1 - beta2) mean_j O_ij^2;   O^ = Diag(1 / sqrt(v)) O;   O <- O^ ||O||_F / ||O^||_F

As in the authors' code (github.com/zichongli5/NorMuon) the Frobenius norm stays that of O; the paper sets it to
0.2 sqrt(m n), which is the same with `match_rms_adamw` if O is exactly orthogonal. v starts at 0 without bias
correction, which would cancel.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .core.base import Group, State, collect_defaults
from .core.checks import check_number
from .core.layouts import LAYOUT_DEFAULTS, split_matrices
from .core.matrix import Extras, MatrixOptimizer, Number
from .core.orthogonalize import NS_COEFFICIENTS, NS_EPS, NS_STEPS
from .muon import Muon
from .muown import Muown
from .row_shards.exchange import Matrix

_EPS = 1e-10  # the authors' value; it keeps rows of zeros zero


def equalize_rows(O: Tensor, v: Tensor, beta2: float, matrix: Matrix) -> Tensor:  # noqa: E741
    """Average the mean square of each row of O (m, n) into v (m,), in place, and divide the row by its root.

    Args:
        matrix: the whole matrix, of which O may have only some rows; the norms are those of the whole.

    Returns:
        (m, n) in O's dtype, with O's Frobenius norm; computed in v's dtype.
    """
    X = O.to(v.dtype)
    v.lerp_(X.square().mean(-1), 1 - beta2)
    equal = X / (v.sqrt() + _EPS).unsqueeze(-1)
    norms = torch.stack([part.norm() for part in (*matrix.split(X), *matrix.split(equal))])
    norm, norm_of_equal = matrix.combine_norms(norms).chunk(2)
    return equal.mul_(matrix.repeat(norm / (norm_of_equal + _EPS)).unsqueeze(-1)).to(O.dtype)


class _RowEqualizer(MatrixOptimizer):
    """Mixin before Muon or Muown: it equalises the rows of O before O is applied."""

    moves_rows_alone = False  # the norm of a whole matrix stays what it was

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        check_number("beta2", group["beta2"], below=1.0)

    def init_state(self, W: Tensor, group: Group) -> State:
        dtype = W.dtype if W.dtype == torch.float64 else torch.float32
        rows = sum(matrix.shape[0] for matrix in split_matrices(W, group))
        return super().init_state(W, group) | {"row_second_moment": W.new_zeros(rows, dtype=dtype)}

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
        equal = equalize_rows(O, state["row_second_moment"], group["beta2"], matrix)
        super().apply(W, equal, extras, state, group, lr, step, matrix)


class NorMuon(_RowEqualizer, Muon):
    """Muon with rows of a common size.

    Args:
        params: 2-D parameters, pairs of name and parameter, or groups of them. A group may have `blocks`.
        lr: learning rate, a number or a one-element tensor (on a GPU the host waits for it in each step).
        weight_decay: decoupled: W <- (1 - lr weight_decay) W.
        momentum: decay of the average M <- momentum M + (1 - momentum) G, in [0, 1).
        beta2: decay of v, in [0, 1).
        nesterov: orthogonalise momentum M + (1 - momentum) G rather than M.
        adjust_lr_fn: the factor of lr: "match_rms_adamw" is direction_scale sqrt(max(m, n)), "original" or None is the
            authors' sqrt(max(1, m/n)).
        orthogonalizer, ns_coefficients, ns_steps, eps, ns_dtype, direction_scale: as in Muown.

    State: `momentum_buffer` (m, n), in the parameter's dtype; `row_second_moment` (v, (m,)), in float32 or, for
    float64 parameters, float64.

    Raises:
        ValueError: naming the invalid parameter or option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        beta2: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] | None = "match_rms_adamw",
        orthogonalizer: object = "newton_schulz",
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        ns_steps: int = NS_STEPS,
        eps: float = NS_EPS,
        ns_dtype: torch.dtype | str | None = None,
        direction_scale: float = 0.2,
    ) -> None:
        defaults = collect_defaults(locals(), **LAYOUT_DEFAULTS)
        MatrixOptimizer.__init__(self, params, defaults)  # Muon's constructor has other arguments


class NorMuown(_RowEqualizer, Muown):
    """Muown with NorMuon's equal rows of the direction O, as in the authors' github.com/kcc-lion/muown.

    By default that code scales by 0.2 sqrt(max(1, m/n)); here, as in its authors' entry to the Track 3 benchmark, the
    default is Muown's 0.2 sqrt(max(m, n)). (Unlike here, the entry equalises the columns of a wide matrix.)

    Arguments, options of groups and state are Muown's, besides `beta2` and `row_second_moment`, which are NorMuon's.
    """

    # Written out for readers and type checkers; tests/optim/test_normuon.py compares it with Muown's signature.
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        beta2: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        magnitude: Literal["adam", "signum", "fixed"] = "adam",
        orthogonalizer: object = "newton_schulz",
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        ns_steps: int = NS_STEPS,
        eps: float = NS_EPS,
        ns_dtype: torch.dtype | str | None = None,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] | None = "match_rms_adamw",
        direction_scale: float = 0.2,
        zero_rows: float | Literal["error"] = "error",
        row_norm_schedule: tuple[float, int, float] | None = None,
        magnitude_lr_scale: float = 1.0,
    ) -> None:
        defaults = collect_defaults(locals(), reparameterize=True, **LAYOUT_DEFAULTS)
        MatrixOptimizer.__init__(self, params, defaults)  # Muown's constructor lacks beta2
