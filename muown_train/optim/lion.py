"""Lion: the sign of an average of gradients (Chen et al. 2023, "Symbolic discovery of optimization algorithms").

    C = beta1 M + (1 - beta1) G;   W <- (1 - lr weight_decay) W - lr sign(C);   M <- beta2 M + (1 - beta2) G

(Algorithm 2 there.) Elementwise, for parameters of any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .core.base import EagerOptimizer, Group, State
from .core.matrix import check_number, check_numbers


class Lion(EagerOptimizer):
    """Lion with decoupled weight decay.

    An update has the size lr in every element, larger than Adam's: the paper of Lion advises a learning rate 3 to 10
    times smaller and a weight decay as much larger.

    Args:
        params: parameters of any shape, pairs of name and parameter, or groups of them. `blocks` is ignored.
        lr: learning rate, a number or a tensor of one (which on a GPU is waited for at each step).
        betas: of the update and of the momentum, both in [0, 1).
        weight_decay: decoupled.

    State: `exp_avg`, the shape and dtype of the parameter.

    Raises:
        ValueError: naming the parameter or the option that cannot be.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def check_group(self, group: Group) -> None:
        check_number("lr", group["lr"])
        check_number("weight_decay", group["weight_decay"])
        group["betas"] = check_numbers("betas", group["betas"], 2, below=1.0)

    def init_state(self, W: Tensor, group: Group) -> State:
        return {"exp_avg": torch.zeros_like(W)}

    @property
    def heeds_flag(self) -> bool:
        return True

    def update_group(self, params: list[Tensor], grads: list[Tensor], states: list[State], group: Group) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        M = [state["exp_avg"] for state in states]
        C = torch._foreach_mul(M, beta1)
        torch._foreach_add_(C, grads, alpha=1 - beta1)
        torch._foreach_sign_(C)
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, C, alpha=-lr)
        torch._foreach_mul_(M, beta2)
        torch._foreach_add_(M, grads, alpha=1 - beta2)
