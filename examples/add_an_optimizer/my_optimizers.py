"""An optimizer of your own for the matrices of a run.

The command for the folder of this file, which finds the class by my_configs/optim/mine.yaml, is

    python -m muown_train --config-dir my_configs optim=mine 'trust=[my_optimizers.SignDescent]'
"""

import torch


class SignDescent(torch.optim.Optimizer):
    """W <- (1 - lr weight_decay) W - lr sign(G)."""

    def __init__(self, params, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad.sign(), alpha=group["lr"])
