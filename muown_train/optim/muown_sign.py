"""MuownSign: the version of Muown for which the paper proves convergence (appendix "Deterministic Convergence",
Algorithm "Muown (signSGD version)").

    W, G (m, n)  weight, gradient      g, r (m,)  magnitudes, |g_i| = ||W_i||, and row norms of R
    R, M (m, n)  directions, momentum of the gradient of R      h (m,)  momentum of the gradient of g (the paper's m)

    M <- beta M + grad_R;   R <- R - eta O, O the polar factor of M
    h <- beta h + grad_g;   g <- g - gamma sign(h);   W <- Diag(g / ||R||_row) R
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .core.base import Group, State, collect_defaults
from .core.checks import check_number
from .core.layouts import LAYOUT_DEFAULTS
from .core.magnitudes import clamp_away_from_zero
from .core.matrix import Extras, MatrixOptimizer, Number, subtract_scaled
from .core.orthogonalize import NS_COEFFICIENTS, NS_EPS, NS_STEPS
from .core.weight_norm import direction_to_weight, row_norms, split_gradient, weight_to_direction
from .muown import adopt_changed_norms, check_no_zero_rows, create_magnitude_state, get_sum_dtype, list_row_norms
from .row_shards.exchange import Matrix


class MuownSign(MatrixOptimizer):
    """Muown with sign steps of the magnitudes, as in the paper's theorems.

    It differs from `Muown(magnitude="signum")`: both momenta start as the first gradient (so the first step takes
    (1 + momentum) times it), there is no Nesterov momentum, the polar factor is exact, a step of R has spectral norm lr
    whatever the shape, and g has a step size of its own. Without noise the theorems have momentum 0 and both step sizes
    sqrt(Delta / (L T)).

    Args:
        params: 2-D parameters without rows of zeros, pairs of name and parameter, or groups of them. A group may
            have `blocks` (rows of the matrices of a fused parameter).
        lr: eta, the step size of R, a number or a one-element tensor.
        magnitude_lr: gamma, the step size of g. Schedulers of torch change lr alone.
        momentum: beta, in [0, 1).

    State: `momentum_buffer` (M, (m, n)) in the parameter's dtype; `magnitude` (g), `row_norm` (r), `magnitude_floor`
    and `magnitude_momentum` (h), (m,), in float32 or, for float64 parameters, float64. As in Muown, g and r are taken
    from W once more at the first step, g is signed, and |g| stays at or above 1e-12 of its first value.

    Raises:
        ValueError: naming the invalid parameter or option.
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, magnitude_lr: float = 1e-3, momentum: float = 0.95
    ) -> None:
        defaults = collect_defaults(
            locals(),
            weight_decay=0.0,
            nesterov=False,
            adjust_lr_fn=None,
            orthogonalizer="svd",
            ns_coefficients=NS_COEFFICIENTS,
            ns_steps=NS_STEPS,
            eps=NS_EPS,
            ns_dtype=None,
            **LAYOUT_DEFAULTS,
        )
        super().__init__(params, defaults)

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        check_number("magnitude_lr", group["magnitude_lr"])
        for key in ("weight_decay", "nesterov"):
            if group[key]:
                raise ValueError(f"MuownSign has no {key}, got {group[key]!r}: Muown does")

    def check_parameter(self, name: str, W: Tensor, group: Group) -> None:
        super().check_parameter(name, W, group)
        check_no_zero_rows(name, W, group, "initialise them")

    def get_momentum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return get_sum_dtype(dtype)

    def init_state(self, W: Tensor, group: Group) -> State:
        g = list_row_norms(W, group)
        momentum = torch.zeros_like(W, dtype=self.get_momentum_dtype(W.dtype))
        return {"momentum_buffer": momentum, "magnitude_momentum": torch.zeros_like(g)} | create_magnitude_state(g)

    def prepare(self, W: Tensor, G: Tensor, state: State, group: Group) -> tuple[Tensor, ...]:
        M, h = state["momentum_buffer"], state["magnitude_momentum"]
        adopt_changed_norms(W, state["magnitude"], state["magnitude_floor"], zeros_too=True)
        grad_g, grad_R = split_gradient(W, G, state["magnitude"], state["row_norm"])
        is_first = (state["step"] == 1).to(M.device)  # (), or (m,) for rows of several matrices
        M.copy_(torch.where(is_first.unsqueeze(-1), grad_R, M))
        h.copy_(torch.where(is_first, grad_g, h))
        return M.mul_(group["momentum"]).add_(grad_R), grad_g

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
        (grad_g,), g, r, h = extras, state["magnitude"], state["row_norm"], state["magnitude_momentum"]
        R = subtract_scaled(weight_to_direction(W, g, r), O, lr * self.get_lr_scale(group, *matrix.shape))
        norms = row_norms(R)
        r.copy_(torch.where(norms > 0, norms, r))
        g_old = g.clone()

        h.mul_(group["momentum"]).add_(grad_g)
        g_new = g - float(group["magnitude_lr"]) * h.sign()
        g.copy_(clamp_away_from_zero(g_new, g, state["magnitude_floor"]))
        stays = (g == g_old) & torch.as_tensor(lr == 0, device=g.device)
        W.copy_(torch.where(stays.unsqueeze(-1), W, direction_to_weight(R, g, r)))
