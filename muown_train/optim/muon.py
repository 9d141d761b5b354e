"""Muon: orthogonalised momentum (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

Arguments, defaults and results are torch.optim.Muon's. This class adds row blocks of fused matrices and a choice of the
iteration's dtype, and it orthogonalises matrices of one shape together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .core.base import Group, State, collect_defaults
from .core.layouts import LAYOUT_DEFAULTS
from .core.matrix import Extras, MatrixOptimizer, Number, compute_lr_scale, subtract_scaled
from .core.orthogonalize import NS_COEFFICIENTS, NS_EPS, NS_STEPS
from .row_shards.exchange import Matrix


class Muon(MatrixOptimizer):
    """Drop-in for torch.optim.Muon.

    Args:
        params: 2-D parameters, pairs of name and parameter, or groups of them. A group may have `blocks`, `layout` and
            `transposed`, see `core/layouts.py`.
        lr: learning rate, a number or a one-element tensor (on a GPU the host waits for it in each step).
        weight_decay: decoupled: W <- (1 - lr weight_decay) W.
        momentum: decay of the average M <- momentum M + (1 - momentum) G, in [0, 1).
        nesterov: orthogonalise momentum M + (1 - momentum) G rather than M.
        ns_coefficients, ns_steps, eps: options of the Newton-Schulz iteration.
        adjust_lr_fn: the factor of lr: "original" or None is sqrt(max(1, m/n)), "match_rms_adamw" is direction_scale
            sqrt(max(m, n)).
        ns_dtype: the dtype to iterate in, or its name. torch.optim.Muon always uses bfloat16; None means bfloat16 where
            the device multiplies in it natively, else float32, and float64 for float64 parameters.
        direction_scale: the constant in "match_rms_adamw"; 0.2 in torch.optim.Muon.

    State: `momentum_buffer` (m, n), in the parameter's dtype.

    Raises:
        ValueError: naming the invalid parameter or option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        eps: float = NS_EPS,
        ns_steps: int = NS_STEPS,
        adjust_lr_fn: str | None = None,
        ns_dtype: torch.dtype | str | None = None,
        direction_scale: float = 0.2,
    ) -> None:
        super().__init__(params, collect_defaults(locals(), orthogonalizer="newton_schulz", **LAYOUT_DEFAULTS))

    def get_lr_scale(self, group: Group, m: int, n: int) -> float:
        """Return the base class's factor, except that None means "original", as in torch.optim.Muon."""
        return compute_lr_scale(group["adjust_lr_fn"] or "original", m, n, group["direction_scale"])

    def init_state(self, W: Tensor, group: Group) -> State:
        return {"momentum_buffer": torch.zeros_like(W)}

    def prepare(self, W: Tensor, G: Tensor, state: State, group: Group) -> tuple[Tensor, ...]:
        M, beta = state["momentum_buffer"], group["momentum"]
        G = G.to(M.dtype)
        M.lerp_(G, 1 - beta)
        return (G.lerp(M, beta) if group["nesterov"] else M,)

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
        W.mul_(1 - lr * group["weight_decay"])
        subtract_scaled(W, O, lr * self.get_lr_scale(group, *matrix.shape), out=W)
