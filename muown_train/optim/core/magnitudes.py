"""The rules that step the row magnitudes g of Muown: Adam (the paper's choice), signum (its analysis), and none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# The vectors of state, (m,) and zero at first, that each rule for the step of g keeps.
MAGNITUDE_STATE: dict[str, tuple[str, ...]] = {
    "adam": ("magnitude_exp_avg", "magnitude_exp_avg_sq"),
    "signum": ("magnitude_exp_avg",),
    "fixed": (),
}


def step_magnitudes(
    rule: str,
    g: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: float | Tensor,
    step: float | Tensor,
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """Return the magnitudes g (m,) after a step along their gradient (m,); update the rule's vectors in place.

    With m an average of the gradients that decays by betas[0]:
        "adam"    g - lr m^ / (sqrt(v^) + eps), with bias correction by step (Kingma and Ba, Algorithm 1)
        "signum"  g - lr sign(m) (paper, section 4: the proxy of Adam)
        "fixed"   g as it is: rows keep their norm and only turn
    """
    if rule == "fixed":
        return g
    beta1, beta2 = betas
    m = state["magnitude_exp_avg"].lerp_(grad, 1 - beta1)
    if rule == "signum":
        return g - lr * m.sign()
    v = state["magnitude_exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    corrections = [1 - beta1**step, 1 - beta2**step]
    if isinstance(step, Tensor) and step.ndim:  # numbers of rows would bring the state to their dtype
        corrections = [correction.to(v.dtype) for correction in corrections]
    denominator = (v / corrections[1]).sqrt_().add_(eps)
    return g - lr / corrections[0] * (m / denominator)


def clamp_away_from_zero(g: Tensor, g_old: Tensor, floor: Tensor) -> Tensor:
    """Return g with |g| >= floor and its sign kept; exact zeros take the sign of g_old. All are (m,)."""
    sign = torch.where(g == 0, g_old, g)
    return torch.where(g.abs() < floor, floor.copysign(sign), g)
