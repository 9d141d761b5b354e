"""Lion: the sign of an average of gradients (Chen et al. 2023, "Symbolic discovery of optimization algorithms").

    C = beta1 M + (1 - beta1) G;   W <- (1 - lr weight_decay) W - lr sign(C);   M <- beta2 M + (1 - beta2) G

This is Algorithm 2 of the paper. It works elementwise, on parameters of any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .core.base import BaseOptimizer, Group, State, collect_defaults
from .core.checks import check_numbers


class Lion(BaseOptimizer):
    """Lion with decoupled weight decay.

    A step has the size lr in every element, which is larger than Adam's: the paper of Lion advises a learning rate 3 to
    10 times smaller and a weight decay larger by the same factor.

    Args:
        params: parameters of any shape, pairs of name and parameter, or groups of them. `blocks` is ignored.
        lr: learning rate, a number or a one-element tensor (on a GPU the host waits for it in each step).
        betas: decay of the averages in the step and in the momentum, both in [0, 1).
        weight_decay: decoupled: W <- (1 - lr weight_decay) W.

    State: `exp_avg`, in the shape and dtype of the parameter.

    Raises:
        ValueError: naming the invalid parameter or option.
    """

    momentum_key = "exp_avg"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, collect_defaults(locals()))

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        group["betas"] = check_numbers("betas", group["betas"], 2, below=1.0)

    def init_state(self, W: Tensor, group: Group) -> State:
        return {"exp_avg": torch.zeros_like(W)}

    @property
    def can_skip_on_device(self) -> bool:
        return True

    def step_group(self, params: list[Tensor], grads: list[Tensor], states: list[State], group: Group) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        M = [state["exp_avg"] for state in states]
        grads = [G.to(m.dtype) for G, m in zip(grads, M, strict=True)]
        C = torch._foreach_mul(M, beta1)
        torch._foreach_add_(C, grads, alpha=1 - beta1)
        torch._foreach_sign_(C)
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, C, alpha=-lr)
        torch._foreach_mul_(M, beta2)
        torch._foreach_add_(M, grads, alpha=1 - beta2)
