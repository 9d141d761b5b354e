"""The paper's convergence theorems against measured runs of MuownSign on a small smooth problem.

    F(g, R) = L(Diag(g / ||R||_row) R),   ||grad F||_* = ||grad_g F||_1 + ||grad_R F||_S_1,   Delta >= F_1 - F_*
    deterministic: beta = 0, eta = gamma = sqrt(Delta / (L T)):  mean of ||grad F||_* <= 4 sqrt(L Delta / T)
    stochastic: see `stochastic_bound`

The problem is L(W) = mean of log cosh of W X - Y with Y = W_* X: smooth, not convex in (g, R), and F_* = 0. The
theorems take L, which sets the steps, as known, and ask for smoothness along the trajectory alone: `covered` runs with
a guess, measures what the steps needed, and raises the guess until it was enough.

What the theorems call sigma_g and sigma_R bounds the l_1 and S_1 norms of the noise; noise here is Gaussian and added
to the gradient of W, and the bounds follow from its deviation in closed form and from g / r along the trajectory.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from muown_train.optim.core.weight_norm import direction, split_gradient
from muown_train.optim.muown_sign import MuownSign

F_STAR = 0.0  # of the problem: log cosh is 0 at 0 and positive elsewhere


@dataclass(frozen=True)
class Problem:
    """L(W) = mean over entries of log cosh(W X - Y)."""

    X: Tensor  # (n, N) float64
    Y: Tensor  # (m, N)
    start: Tensor  # (m, n), rows not zero

    def loss(self, W: Tensor) -> Tensor:
        error = W @ self.X - self.Y
        # without overflow, and exact near 0
        smooth = error.abs() + torch.log1p(torch.exp(-2 * error.abs())) - math.log(2)
        return torch.where(error.abs() < 1e-4, error.square() / 2, smooth).mean()

    def gradient(self, W: Tensor) -> Tensor:
        return torch.tanh(W @ self.X - self.Y) @ self.X.T / self.Y.numel()


def problem(m: int = 6, n: int = 10, samples: int = 40, seed: int = 0) -> Problem:
    """A problem of Gaussian X, W_* and start."""
    generator = torch.Generator().manual_seed(seed)
    X, target, start = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((n, samples), (m, n), (m, n))
    )
    return Problem(X, target @ X, start)


class Rates(NamedTuple):
    """What a theorem prescribes and promises."""

    step: float  # eta = gamma
    momentum: float  # beta
    bound: float  # of the mean over updates of ||grad F||_*


def deterministic_bound(L: float, delta: float, T: int) -> Rates:
    """Theorem "Deterministic Convergence": beta = 0, step sqrt(Delta / (L T)), bound 4 sqrt(L Delta / T)."""
    return Rates(math.sqrt(delta / (L * T)), 0.0, 4 * math.sqrt(L * delta / T))


def stochastic_bound(L: float, delta: float, T: int, sigma: float) -> Rates:
    """Theorem "Stochastic Convergence", sigma = zeta_g sigma_g + zeta_R sigma_R.

    1 - beta = min(1, max(T^(-2/3), sqrt(Delta L / (sigma^2 T)))), step sqrt(Delta (1 - beta) / (L T)), and the bound
    6 sqrt(Delta L / T) + 8 (Delta L sigma^2 / T)^(1/4) + 4 sigma / T^(1/3).
    """
    left = min(1.0, max(T ** (-2 / 3), math.sqrt(delta * L / (sigma**2 * T))))  # 1 - beta
    bound = 6 * math.sqrt(delta * L / T) + 8 * (delta * L * sigma**2 / T) ** 0.25 + 4 * sigma / T ** (1 / 3)
    return Rates(math.sqrt(delta * left / (L * T)), 1 - left, bound)


class Measured(NamedTuple):
    """A run of MuownSign."""

    mean: float  # over updates of ||grad F||_*, of the gradient without noise
    L: float  # that smoothness took along the trajectory
    sigma: float  # zeta_g sigma_g + zeta_R sigma_R, at most along the trajectory


class _Point(NamedTuple):
    loss: float
    g: Tensor  # (m,)
    R: Tensor  # (m, n)
    grad_g: Tensor
    grad_R: Tensor

    @property
    def dual_norm(self) -> float:
        return _dual(self.grad_g, self.grad_R)


def _dual(of_g: Tensor, of_R: Tensor) -> float:
    return float(of_g.abs().sum() + torch.linalg.matrix_norm(of_R, "nuc"))


def run(
    of: Problem,
    T: int,
    rates: Rates,
    deviation: float = 0.0,
    seed: int = 0,
    most: tuple[float, float] = (math.inf, math.inf),
) -> Measured:
    """T updates of MuownSign with the rates of a theorem.

    Args:
        deviation: of the Gaussian noise that is added to each element of the gradient of W.
        seed: of the noise.
        most: L and sigma with which to stop early.
    """
    generator = torch.Generator().manual_seed(seed)
    W = nn.Parameter(of.start.clone())
    optimizer = MuownSign([W], lr=rates.step, magnitude_lr=rates.step, momentum=rates.momentum)
    state = optimizer.state[W]
    total, L, sigma = 0.0, 0.0, 0.0
    before: _Point | None = None
    with torch.no_grad():
        for t in range(T + 1):
            now = _point(of, W.detach(), state["magnitude"], state["row_norm"])
            if before:
                L = max(L, smoothness(before, now))
            sigma = max(sigma, noise_bound(now.g, state["row_norm"], deviation, of.X.shape[0]))
            if t == T or most[0] < L or most[1] < sigma:
                break
            before, total = now, total + now.dual_norm
            noise = deviation * torch.randn(W.shape, generator=generator, dtype=W.dtype)
            W.grad = of.gradient(W.detach()) + noise
            optimizer.step()
    return Measured(total / T, L, sigma)


def _point(of: Problem, W: Tensor, g: Tensor, r: Tensor) -> _Point:
    return _Point(float(of.loss(W)), g.clone(), direction(W, g, r), *split_gradient(W, of.gradient(W), g, r))


def smoothness(a: _Point, b: _Point) -> float:
    """The least L with which F from a to b is as the proofs need it.

    ||grad F(b) - grad F(a)||_* <= L d and F(b) - F(a) - <grad F(a), b - a> <= L d^2 / 2, where d is the norm of b - a,
    max(||.||_inf, ||.||_S_inf).
    """
    of_g, of_R = b.g - a.g, b.R - a.R
    d = max(float(of_g.abs().max()), float(torch.linalg.matrix_norm(of_R, 2)))
    if d == 0:
        return 0.0
    inner = float((a.grad_g * of_g).sum() + (a.grad_R * of_R).sum())
    return max(2 * (b.loss - a.loss - inner) / d**2, _dual(b.grad_g - a.grad_g, b.grad_R - a.grad_R) / d)


def noise_bound(g: Tensor, r: Tensor, deviation: float, n: int) -> float:
    """zeta_g sigma_g + zeta_R sigma_R of Gaussian noise N (m, n) of this deviation s in the gradient of W.

    That of g is m independent normal numbers of deviation s: E ||.||_1^2 = s^2 (m + m (m - 1) 2 / pi). That of R is
    Diag(g / r) Proj(N), and E ||.||_S_1^2 <= min(m, n) E ||.||_F^2 = min(m, n) s^2 (n - 1) sum (g / r)^2.
    """
    m, k = len(g), min(len(g), n)
    sigma_g = deviation * math.sqrt(m + m * (m - 1) * 2 / math.pi)
    sigma_R = deviation * math.sqrt(k * (n - 1) * float((g / r).square().sum()))
    return math.sqrt(m) * sigma_g + math.sqrt(k) * sigma_R


class Comparison(NamedTuple):
    """A theorem and the run that it is about."""

    T: int
    bound: float
    measured: float
    L: float  # assumed, at least what was needed
    step: float
    momentum: float


def covered(of: Problem, T: int, deviation: float = 0.0, seeds: int = 1, growth: float = 1.2) -> Comparison:
    """The bound for T updates, and the mean over seeds of what runs with its rates measure.

    Args:
        deviation: of the noise, see `run`; 0 is the deterministic theorem.
        growth: of a guess of L or sigma that was not enough; runs with it stop where that shows.
    """
    delta = float(of.loss(of.start)) - F_STAR
    g = torch.linalg.vector_norm(of.start, dim=1)
    L, sigma = 1e-3, noise_bound(g, g, deviation, of.start.shape[1])
    seed, total = 0, 0.0
    while True:
        rates = stochastic_bound(L, delta, T, sigma) if deviation else deterministic_bound(L, delta, T)
        found = run(of, T, rates, deviation, seed, (L, sigma))
        if found.L > L or found.sigma > sigma:
            L, sigma = L * (growth if found.L > L else 1), sigma * (growth if found.sigma > sigma else 1)
            seed, total = 0, 0.0  # from the first on
            continue
        seed, total = seed + 1, total + found.mean
        if seed == seeds:
            return Comparison(T, rates.bound, total / seeds, L, rates.step, rates.momentum)
