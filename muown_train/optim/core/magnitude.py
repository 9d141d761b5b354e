"""Update rules of the row magnitudes g: Adam (the paper's choice), signum (its analysis), and none.

Each rule takes g (m,), its gradient (m,), the state of the parameter, and the hyper-parameters, updates its
own vectors in the state in place, and returns the new g. `names` are the state vectors that a rule keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from .matrix import Number


class Rule(Protocol):
    """What an update rule of the magnitudes looks like."""

    def __call__(
        self,
        g: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor],
        *,
        lr: Number,
        step: Number,
        betas: tuple[float, float],
        eps: float,
    ) -> Tensor: ...


def adam(
    g: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Number,
    step: Number,
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """g - lr m^ / (sqrt(v^) + eps), with bias correction by step (Kingma and Ba, Algorithm 1)."""
    beta1, beta2 = betas
    m = state["magnitude_exp_avg"].lerp_(grad, 1 - beta1)
    v = state["magnitude_exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (v / (1 - beta2**step)).sqrt_().add_(eps)
    return g - lr / (1 - beta1**step) * (m / denominator)


def signum(
    g: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Number,
    step: Number,
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """g - lr sign(m), m an average of gradients with decay betas[0] (paper, section 4: the proxy of Adam)."""
    m = state["magnitude_exp_avg"].lerp_(grad, 1 - betas[0])
    return g - lr * m.sign()


def fixed(
    g: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Number,
    step: Number,
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """g as it is: rows keep their norm and only turn."""
    return g


class Magnitude(NamedTuple):
    """An update rule and the names of the (m,) vectors of state that it keeps, zero at first."""

    update: Rule
    names: tuple[str, ...]


MAGNITUDES = {
    "adam": Magnitude(adam, ("magnitude_exp_avg", "magnitude_exp_avg_sq")),
    "signum": Magnitude(signum, ("magnitude_exp_avg",)),
    "fixed": Magnitude(fixed, ()),
}
