"""Compare the paper's convergence theorems with runs of MuownSign on a small smooth problem.

    F(g, R) = L(Diag(g / ||R||_row) R),   ||grad F||_* = ||grad_g F||_1 + ||grad_R F||_S_1,   Delta >= F_1 - F_*
    deterministic: beta = 0, eta = gamma = sqrt(Delta / (L T)):  mean of ||grad F||_* <= 4 sqrt(L Delta / T)
    stochastic: see `compute_stochastic_rates`

The problem is L(W) = mean of log cosh of W X - Y with Y = W_* X: smooth, not convex in (g, R), and F_* = 0. The
theorems take the smoothness L, which sets the steps, as known, and ask for it along the trajectory alone:
`compare_with_theorem` runs with a guess, measures the smoothness along the steps, and raises the guess until it holds.

The theorems' sigma_g and sigma_R bound the l_1 and S_1 norms of the noise. Here Gaussian noise is added to the
gradient of W; the bounds follow from its deviation in closed form and from g / r along the trajectory.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from muown_train.optim.core.weight_norm import split_gradient, weight_to_direction
from muown_train.optim.muown_sign import MuownSign

GROWTH = 1.2  # the factor by which a guess of L or sigma grows that was too small for a run
F_STAR = 0.0  # the problem's minimum: log cosh is 0 at 0 and positive elsewhere


@dataclass(frozen=True)
class Problem:
    """L(W) = mean over entries of log cosh(W X - Y)."""

    X: Tensor  # (n, N) float64
    Y: Tensor  # (m, N)
    start: Tensor  # (m, n), rows not zero

    def loss(self, W: Tensor) -> Tensor:
        error = W @ self.X - self.Y
        # this form does not overflow; near 0, where it would round to 0, x^2 / 2 takes its place
        smooth = error.abs() + torch.log1p(torch.exp(-2 * error.abs())) - math.log(2)
        return torch.where(error.abs() < 1e-4, error.square() / 2, smooth).mean()

    def gradient(self, W: Tensor) -> Tensor:
        return torch.tanh(W @ self.X - self.Y) @ self.X.T / self.Y.numel()


def make_problem(m: int = 6, n: int = 10, samples: int = 40, seed: int = 0) -> Problem:
    """Return a problem with Gaussian X, W_* and start."""
    generator = torch.Generator().manual_seed(seed)
    X, target, start = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((n, samples), (m, n), (m, n))
    )
    return Problem(X, target @ X, start)


class Rates(NamedTuple):
    """The rates that a theorem prescribes and the bound that it promises for them."""

    step: float  # eta = gamma
    momentum: float  # beta
    bound: float  # bound of the mean over steps of ||grad F||_*


def compute_deterministic_rates(L: float, delta: float, T: int) -> Rates:
    """Return the rates of the theorem "Deterministic Convergence".

    They are beta = 0, step sqrt(Delta / (L T)), and the bound is 4 sqrt(L Delta / T).
    """
    return Rates(math.sqrt(delta / (L * T)), 0.0, 4 * math.sqrt(L * delta / T))


def compute_stochastic_rates(L: float, delta: float, T: int, sigma: float) -> Rates:
    """Return the rates of the theorem "Stochastic Convergence", with sigma = zeta_g sigma_g + zeta_R sigma_R.

    1 - beta = min(1, max(T^(-2/3), sqrt(Delta L / (sigma^2 T)))), step sqrt(Delta (1 - beta) / (L T)), and the bound
    6 sqrt(Delta L / T) + 8 (Delta L sigma^2 / T)^(1/4) + 4 sigma / T^(1/3).
    """
    left = min(1.0, max(T ** (-2 / 3), math.sqrt(delta * L / (sigma**2 * T))))  # 1 - beta
    bound = 6 * math.sqrt(delta * L / T) + 8 * (delta * L * sigma**2 / T) ** 0.25 + 4 * sigma / T ** (1 / 3)
    return Rates(math.sqrt(delta * left / (L * T)), 1 - left, bound)


class Trajectory(NamedTuple):
    """The measurements of a run of MuownSign."""

    mean: float  # mean of ||grad F||_* over steps, for the gradient without noise
    L: float  # largest smoothness constant along the trajectory
    sigma: float  # largest zeta_g sigma_g + zeta_R sigma_R along the trajectory


class _Point(NamedTuple):
    loss: float
    g: Tensor  # (m,)
    R: Tensor  # (m, n)
    grad_g: Tensor
    grad_R: Tensor

    @property
    def dual_norm(self) -> float:
        return _compute_dual_norm(self.grad_g, self.grad_R)


def _compute_dual_norm(grad_g: Tensor, grad_R: Tensor) -> float:
    return float(grad_g.abs().sum() + torch.linalg.matrix_norm(grad_R, "nuc"))


def run_muown_sign(
    problem: Problem,
    T: int,
    rates: Rates,
    deviation: float = 0.0,
    seed: int = 0,
    limits: tuple[float, float] = (math.inf, math.inf),
) -> Trajectory:
    """Take T steps of MuownSign with the rates of a theorem.

    Args:
        deviation: standard deviation of the Gaussian noise that is added to each element of the gradient of W.
        seed: seed of the noise.
        limits: values of L and sigma above which the run stops early.
    """
    generator = torch.Generator().manual_seed(seed)
    W = nn.Parameter(problem.start.clone())
    optimizer = MuownSign([W], lr=rates.step, magnitude_lr=rates.step, momentum=rates.momentum)
    total, L, sigma = 0.0, 0.0, 0.0
    before: _Point | None = None
    with torch.no_grad():
        for t in range(T + 1):
            # the first step creates the state
            state = optimizer.state[W] or optimizer.create_state(W.detach(), optimizer.param_groups[0])
            now = _make_point(problem, W.detach(), state["magnitude"], state["row_norm"])
            if before:
                L = max(L, measure_smoothness(before, now))
            sigma = max(sigma, bound_noise(now.g, state["row_norm"], deviation, problem.X.shape[0]))
            if t == T or limits[0] < L or limits[1] < sigma:
                break
            before, total = now, total + now.dual_norm
            noise = deviation * torch.randn(W.shape, generator=generator, dtype=W.dtype)
            W.grad = problem.gradient(W.detach()) + noise
            optimizer.step()
    return Trajectory(total / T, L, sigma)


def _make_point(problem: Problem, W: Tensor, g: Tensor, r: Tensor) -> _Point:
    grads = split_gradient(W, problem.gradient(W), g, r)
    return _Point(float(problem.loss(W)), g.clone(), weight_to_direction(W, g, r), *grads)


def measure_smoothness(a: _Point, b: _Point) -> float:
    """Return the smallest L for which F satisfies, from a to b, the two inequalities that the proofs need.

    They are ||grad F(b) - grad F(a)||_* <= L d and F(b) - F(a) - <grad F(a), b - a> <= L d^2 / 2, where d is the
    norm of b - a, max(||.||_inf, ||.||_S_inf).
    """
    step_g, step_R = b.g - a.g, b.R - a.R
    d = max(float(step_g.abs().max()), float(torch.linalg.matrix_norm(step_R, 2)))
    if d == 0:
        return 0.0
    inner = float((a.grad_g * step_g).sum() + (a.grad_R * step_R).sum())
    dual_norm = _compute_dual_norm(b.grad_g - a.grad_g, b.grad_R - a.grad_R)
    return max(2 * (b.loss - a.loss - inner) / d**2, dual_norm / d)


def bound_noise(g: Tensor, r: Tensor, deviation: float, n: int) -> float:
    """Return zeta_g sigma_g + zeta_R sigma_R for Gaussian noise N (m, n) of deviation s in the gradient of W.

    The noise of g is m independent normal numbers of deviation s: E ||.||_1^2 = s^2 (m + m (m - 1) 2 / pi). The noise
    of R is Diag(g / r) Proj(N), and E ||.||_S_1^2 <= min(m, n) E ||.||_F^2 = min(m, n) s^2 (n - 1) sum (g / r)^2.
    """
    m, k = len(g), min(len(g), n)
    sigma_g = deviation * math.sqrt(m + m * (m - 1) * 2 / math.pi)
    sigma_R = deviation * math.sqrt(k * (n - 1) * float((g / r).square().sum()))
    return math.sqrt(m) * sigma_g + math.sqrt(k) * sigma_R


class Comparison(NamedTuple):
    """The bound of a theorem beside the measurement that it bounds."""

    T: int
    bound: float
    measured: float
    L: float  # the smoothness that was assumed, at least as large as the measured one
    step: float
    momentum: float


def compare_with_theorem(problem: Problem, T: int, deviation: float = 0.0, seeds: int = 1) -> Comparison:
    """Return the bound for T steps, and the mean over seeds of the measurement in runs with the theorem's rates.

    Args:
        deviation: standard deviation of the noise, see `run_muown_sign`; 0 selects the deterministic theorem.
    """
    delta = float(problem.loss(problem.start)) - F_STAR
    g = torch.linalg.vector_norm(problem.start, dim=1)
    L, sigma = 1e-3, bound_noise(g, g, deviation, problem.start.shape[1])
    seed, total = 0, 0.0
    while True:
        rates = compute_stochastic_rates(L, delta, T, sigma) if deviation else compute_deterministic_rates(L, delta, T)
        trajectory = run_muown_sign(problem, T, rates, deviation, seed, (L, sigma))
        if trajectory.L > L or trajectory.sigma > sigma:
            L, sigma = L * (GROWTH if trajectory.L > L else 1), sigma * (GROWTH if trajectory.sigma > sigma else 1)
            seed, total = 0, 0.0  # all seeds run again with the larger guess
            continue
        seed, total = seed + 1, total + trajectory.mean
        if seed == seeds:
            return Comparison(T, rates.bound, total / seeds, L, rates.step, rates.momentum)
