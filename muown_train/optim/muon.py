"""Muon: momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

Arguments, defaults and results are torch.optim.Muon's. It differs in what is added: row blocks of fused
matrices, the dtype of the iteration, and that matrices of one shape are orthogonalised together.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .core.base import Group, State
from .core.matrix import Kept, MatrixOptimizer, Number, adjust_lr, check_number, subtract
from .core.orthogonalize import NS_COEFFICIENTS, NS_EPS, NS_STEPS


class Muon(MatrixOptimizer):
    """Drop-in for torch.optim.Muon.

    Args:
        params: 2-D parameters, pairs of name and parameter, or groups of them. A group may have `blocks`.
        lr: learning rate, a number or a tensor of one (which on a GPU is waited for at each step).
        weight_decay: decoupled: W <- (1 - lr weight_decay) W.
        momentum: decay of the average M <- momentum M + (1 - momentum) G, in [0, 1).
        nesterov: orthogonalise momentum M + (1 - momentum) G rather than M.
        ns_coefficients, ns_steps, eps: of the Newton-Schulz iteration.
        adjust_lr_fn: factor of lr: "original" or None: sqrt(max(1, m/n)); "match_rms_adamw": direction_scale
            sqrt(max(m, n)).
        ns_dtype: to iterate in, a dtype or its name. torch.optim.Muon always uses bfloat16; None means
            bfloat16 where the device multiplies in it natively, else float32, and float64 for float64
            parameters.
        direction_scale: of "match_rms_adamw"; 0.2 in torch.optim.Muon.

    State: `momentum_buffer` (m, n), in the parameter's dtype.

    Raises:
        ValueError: naming the parameter or the option that cannot be.
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
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "direction_scale": direction_scale,
            "ns_dtype": ns_dtype,
            "orthogonalizer": "newton_schulz",
            "blocks": None,
        }
        super().__init__(params, defaults)

    def scale(self, group: Group, m: int, n: int) -> float:
        """As the base, but None means "original", as in torch.optim.Muon."""
        return adjust_lr(group["adjust_lr_fn"] or "original", m, n, group["direction_scale"])

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        check_number("direction_scale", group["direction_scale"], positive=True)

    def init_state(self, W: Tensor, group: Group) -> State:
        return {"momentum_buffer": torch.zeros_like(W)}

    def prepare(self, W: Tensor, G: Tensor, state: State, group: Group) -> tuple[Tensor, ...]:
        M, beta = state["momentum_buffer"], group["momentum"]
        M.lerp_(G, 1 - beta)
        return (G.lerp(M, beta) if group["nesterov"] else M,)

    def apply(self, W: Tensor, O: Tensor, kept: Kept, state: State, group: Group, lr: Number, step: Number) -> None:  # noqa: E741
        W.mul_(1 - lr * group["weight_decay"])
        subtract(W, O, lr * self.scale(group, *W.shape), out=W)
