"""Muown: Muon on the directions of the rows, Adam on their magnitudes (paper, section 3, Algorithm 1).

Each matrix is W = Diag(g / r) R, inside the optimizer alone: the model holds W, the state holds g and r, and R is
reconstructed from W.

    W, G (m, n)  weight and its gradient     g, r (m,)  magnitudes, |g_i| = ||W_i||, and row norms of R
    R (m, n)     directions, unnormalised    M (m, n)   momentum of the gradient of R
    O (m, n)     orthogonalised momentum     D (m, n)   = Diag(1/r) R

The paper leaves some choices open. Here g is signed, since Adam may carry it through zero, and |g| stays at or above
1e-12 of its first value, since W is the only store of R. When weight decay refreshes g from the rows of W, g keeps its
sign, or R would flip against its momentum. A row is not decayed below that floor.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .core.base import Group, State, collect_defaults
from .core.checks import check_bool, check_choice, check_number, check_numbers
from .core.layouts import LAYOUT_DEFAULTS, split_local_matrices, split_matrices
from .core.magnitudes import MAGNITUDE_STATE, clamp_away_from_zero, step_magnitudes
from .core.matrix import Extras, MatrixOptimizer, Number, subtract_scaled
from .core.orthogonalize import NS_COEFFICIENTS, NS_EPS, NS_STEPS
from .core.weight_norm import count_zero_rows, row_norms, split_gradient, step_directions
from .row_shards.agreement import sum_over_ranks
from .row_shards.exchange import Matrix
from .row_shards.placement import create_meta_whole, get_local, is_dtensor

FLOOR = 1e-12  # the least |g|, as a fraction of its first value


class Muown(MatrixOptimizer):
    """Muon with implicit weight normalization of the rows.

    Args:
        params: 2-D parameters, pairs of name and parameter, or groups of them. A group may have `blocks` (rows of the
            matrices of a fused parameter), `layout` ("conv" or "experts") and `transposed` (weights stored as (in,
            out)), see `core/layouts.py`, and `reparameterize=False` (plain Muon steps, in the same momentum form).
        lr: learning rate of directions and magnitudes, a number or a one-element tensor (on a GPU the host waits for
            it).
        weight_decay: decoupled: W <- Diag(g/r) R - lr weight_decay W_old (appendix "Experimental Details").
        momentum: M <- momentum M + grad_R, in [0, 1).
        nesterov: orthogonalise momentum M + grad_R rather than M.
        betas, adam_eps: options of Adam on g; signum uses betas[0].
        magnitude: "adam", "signum" or "fixed".
        orthogonalizer: "newton_schulz", "polar_express" (with its own coefficients, best with ns_steps=8 or more),
            "svd" (the exact polar factor), or a function of X (..., m, n) that returns the same shape and only reads
            X.
        ns_coefficients, ns_steps, eps, ns_dtype: options of the Newton-Schulz iteration. ns_dtype=None means bfloat16
            where the device multiplies in it natively, else float32, and float64 for float64 parameters.
        adjust_lr_fn: the factor of lr for R: "match_rms_adamw" is direction_scale sqrt(max(m, n)), "original" is
            sqrt(max(1, m/n)), None is 1.
        direction_scale: the constant in "match_rms_adamw".
        zero_rows: rows of zeros have no direction: "error" refuses them, a number is the magnitude that they start
            with, so that the first step gives them a direction.
        row_norm_schedule: None, or (target, steps, power): after step t the cached r, and with it the length of R, is
            set to r_1 + (target - r_1) min(1, (t - 1) / (steps - 1))^power, where r_1 is its first value. This does not
            change W; the larger r, the less a step turns the rows. (It is not in the paper but in the authors' entry to
            the Track 3 benchmark of github.com/KellerJordan/modded-nanogpt, with (2.496, 3165, 1.2).)
        magnitude_lr_scale: the learning rate of g is this many times lr. (The paper's is 1. A step of lr can move short
            rows, as in narrow models, through zero, which turns them around.)

    State, from the first step on: `momentum_buffer` in the shape and dtype of the parameter (float32 for float16, whose
    range the sum of gradients would leave); `magnitude` (g), `row_norm` (r), `magnitude_floor`, with a schedule
    `row_norm_start` (r_1), and the vectors of the magnitude's rule, (m,), in float32 or, for float64 parameters,
    float64.

    Weights that something else changes (clipping, averaging, loading) keep their new directions. Rows whose norm is no
    longer |g_i|, beyond rounding, get their new norm as g_i, with its sign and its Adam state kept. A row that was set
    to zero stays near zero and grows as Adam moves g; with a number as `zero_rows` it starts again with |g_i|.
    `refresh_row_norms` takes smaller changes too. A step with lr 0 leaves every weight as it is.

    Traffic of a step besides orthogonalisation, for float32: 23 numbers, 92 bytes, per element (split_gradient 9,
    momentum and Nesterov 8, step_directions 4, the last line of Algorithm 1 2), where Muon has 44 bytes. Compiled it is
    32 bytes where a row stays in the cache between two passes over it: W, G, M read and M, X written, then W, O read
    and W written.

    bfloat16 parameters: the step is computed in float32 and rounded once into W. As W is the only store of R, a change
    of R below half a unit in the last place (2^-9 of an element) is lost, and ||W_i|| = |g_i| holds to that accuracy; g
    itself keeps float32's. float32 parameters are the better choice.

    Raises:
        ValueError: naming the invalid parameter or option.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
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
        super().__init__(params, collect_defaults(locals(), reparameterize=True, **LAYOUT_DEFAULTS))

    def get_momentum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return get_sum_dtype(dtype)

    @torch.no_grad()
    def refresh_row_norms(self) -> None:
        """Set g of every row to the row's present norm, with the sign of g.

        Steps do so by themselves for rows whose norm has changed by more than rounding.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if "magnitude" in (state := self.state.get(p, {})):
                    g, floor = get_local(state["magnitude"]), get_local(state["magnitude_floor"])
                    g.copy_(take_norms(list_row_norms(p, group), g, floor, group["zero_rows"] == "error"))

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        group["betas"] = check_numbers("betas", group["betas"], 2, below=1.0)
        check_number("adam_eps", group["adam_eps"], positive=True)
        check_choice("magnitude", group["magnitude"], tuple(MAGNITUDE_STATE))
        check_number("magnitude_lr_scale", group["magnitude_lr_scale"], positive=True)
        if group["row_norm_schedule"] is not None:
            group["row_norm_schedule"] = _check_row_norm_schedule(group["row_norm_schedule"])
        if group["zero_rows"] != "error":
            try:
                check_number("zero_rows", group["zero_rows"], positive=True)
            except ValueError:
                raise ValueError(
                    f'zero_rows must be "error" or a positive number, got {group["zero_rows"]!r}'
                ) from None
        check_bool("reparameterize", group["reparameterize"])

    def check_parameter(self, name: str, W: Tensor, group: Group) -> None:
        super().check_parameter(name, W, group)
        if group["reparameterize"] and group["zero_rows"] == "error":
            check_no_zero_rows(
                name,
                W,
                group,
                "initialise them otherwise, put the parameter into a group with reparameterize=False, or give them "
                "a magnitude to start with, as in zero_rows=0.57 (for the B of LoRA: the learning rate)",
            )

    def init_state(self, W: Tensor, group: Group) -> State:
        state = {"momentum_buffer": torch.zeros_like(W, dtype=self.get_momentum_dtype(W.dtype))}
        if not group["reparameterize"]:
            return state
        g = list_row_norms(W, group)
        if group["zero_rows"] != "error":
            g = torch.where(g > 0, g, float(group["zero_rows"]))
        state |= create_magnitude_state(g)
        if group["row_norm_schedule"] is not None:
            state["row_norm_start"] = g.clone()
        return state | {name: torch.zeros_like(g) for name in MAGNITUDE_STATE[group["magnitude"]]}

    def prepare(self, W: Tensor, G: Tensor, state: State, group: Group) -> tuple[Tensor, ...]:
        M, beta = state["momentum_buffer"], group["momentum"]
        if not group["reparameterize"]:
            M.mul_(beta).add_(G)
            return (G.add(M, alpha=beta) if group["nesterov"] else M,)
        adopt_changed_norms(W, state["magnitude"], state["magnitude_floor"], group["zero_rows"] == "error")
        grad_g, grad_R = split_gradient(W, G, state["magnitude"], state["row_norm"])
        M.mul_(beta).add_(grad_R)
        return grad_R.add_(M, alpha=beta) if group["nesterov"] else M, grad_g

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
        rate, decay = lr * self.get_lr_scale(group, *matrix.shape), group["weight_decay"]
        if not group["reparameterize"]:  # Muon
            W.mul_(1 - lr * decay)
            subtract_scaled(W, O, rate, out=W)
            return
        (grad_g,), g, r, floor = extras, state["magnitude"], state["row_norm"], state["magnitude_floor"]
        V, norms = step_directions(W, O, g, r, rate, in_place=W.dtype == g.dtype and not decay)
        to_R, g_old = r / g, g.clone()  # R = Diag(to_R) V
        r.copy_(torch.where(norms > 0, norms, r))  # a row of zeros stays one, as with zero_rows

        lr_of_g, betas, eps = lr * group["magnitude_lr_scale"], group["betas"], group["adam_eps"]
        g_new = step_magnitudes(group["magnitude"], g, grad_g, state, lr=lr_of_g, step=step, betas=betas, eps=eps)
        g.copy_(clamp_away_from_zero(g_new, g, floor))
        # dividing by a norm computed anew would round rows that have not moved
        stays = (g == g_old) & torch.as_tensor(rate == 0, device=g.device)
        W_new = V.mul_(torch.where(stays, 1.0, to_R * g / r).unsqueeze(-1))
        if group["row_norm_schedule"] is not None:
            r.copy_(_interpolate_row_norm(state["row_norm_start"], step, *group["row_norm_schedule"]))
        if decay:
            W_new = _apply_weight_decay(W_new, W, g, floor, lr * decay)
        if W_new is not W:
            W.copy_(W_new)


def create_magnitude_state(g: Tensor) -> State:
    """Return the first g, r and floor of |g|, (m,), of a matrix whose rows have the norms g."""
    return {"magnitude": g, "row_norm": g.clone(), "magnitude_floor": FLOOR * g}


def check_no_zero_rows(name: str, W: Tensor, group: Group, remedy: str) -> None:
    """Raise ValueError naming parameter W if rows of its matrices are zero; the remedy ends the message.

    The ranks of a DTensor look at their rows and agree; this is a collective call.
    """
    zeros = sum(map(count_zero_rows, split_local_matrices(W, group)))
    if is_dtensor(W) and not W.is_meta:
        zeros = sum_over_ranks(W, f"rows of zeros in {name}", zeros)
    if zeros:
        rows = sum(matrix.shape[0] for matrix in split_matrices(create_meta_whole(W), group))
        raise ValueError(f"{name}: {zeros} of {rows} rows are zero and have no direction: {remedy}")


def list_row_norms(W: Tensor, group: Group) -> Tensor:
    """Return the norms of the rows of all matrices of a parameter, in order: (m,), of a DTensor this rank's rows."""
    return torch.cat([row_norms(matrix) for matrix in split_local_matrices(W, group)])


def adopt_changed_norms(W: Tensor, g: Tensor, floor: Tensor, zeros_too: bool) -> None:
    """Set g (m,) of rows of W (m, n) whose norm is not |g|, beyond rounding, to that norm, with the sign of g.

    Such rows were changed by something else since the last step. For `zeros_too` see `take_norms`.
    """
    norms = row_norms(W)
    rounding = max(torch.finfo(W.dtype).eps, 256 * torch.finfo(g.dtype).eps)
    changed = (norms - g.abs()).abs() > rounding * g.abs()
    g.copy_(torch.where(changed, take_norms(norms, g, floor, zeros_too), g))


def take_norms(norms: Tensor, g: Tensor, floor: Tensor, zeros_too: bool) -> Tensor:
    """Return the norms of rows as magnitudes (m,), with the signs of g.

    Args:
        zeros_too: whether rows shorter than the floor of |g| take the floor; else they keep g, which is what rows of
            zeros start with.
    """
    return torch.where(norms > floor, norms, floor if zeros_too else g.abs()).copysign(g)


def get_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a momentum that is a sum of gradients, for parameters of a dtype."""
    return torch.float32 if dtype == torch.float16 else dtype


def _interpolate_row_norm(start: Tensor, step: Number, target: float, steps: int, power: float) -> Tensor:
    """Return start + (target - start) min(1, (step - 1) / (steps - 1))^power, (m,); step counts from 1."""
    progress = torch.as_tensor((step - 1) / max(1, steps - 1), dtype=torch.float64).clamp(max=1)
    return start + (target - start) * progress**power


def _check_row_norm_schedule(schedule: object) -> tuple[float, ...]:
    """Return the schedule as a tuple; raise ValueError if it is not (target, steps, power) with valid numbers."""
    target, steps, power = check_numbers("row_norm_schedule", schedule, 3)
    if not target > 0 or not power > 0 or steps != int(steps) or steps < 1:
        raise ValueError(
            f"row_norm_schedule must be a target > 0, a whole number of steps and a power > 0, got {schedule!r}"
        )
    return target, steps, power


def _apply_weight_decay(W_new: Tensor, W: Tensor, g: Tensor, floor: Tensor, rate: Number) -> Tensor:
    """Return W_new - rate W, (m, n), except for rows that would fall below the floor; refresh g (m,), sign kept."""
    decayed = subtract_scaled(W_new, W, rate)
    norms = row_norms(decayed)
    kept = norms >= floor
    g.copy_(torch.where(kept, norms.copysign(g), g))
    return torch.where(kept.unsqueeze(-1), decayed, W_new)
