"""Measurements that a run makes of itself every `probe_every` updates, and scripts/analyze.py of checkpoints.

A probe is made with a `Subject` and the settings of its section in configs/probes/; called, it gives numbers by name.
"""

import time
from collections.abc import Callable, Mapping

import torch

from muown_train.analysis.attention_logits import largest_logits
from muown_train.analysis.context import Gradients, Magnitudes, Subject
from muown_train.analysis.effective_rank import normalised_effective_rank
from muown_train.analysis.matrices import Matrix
from muown_train.analysis.spectral import factors, singular_values, spectral_by_power_iteration
from muown_train.config.checks import check_int
from muown_train.optim.core.weight_norm import split_gradient

Numbers = dict[str, float]


class Probes:
    """Several probes as one: their numbers as NAME/…, and the seconds that all of them took."""

    def __init__(self, probes: Mapping[str, Callable[[], Numbers]]) -> None:
        self.probes = probes

    def __call__(self) -> Numbers:
        """A collective call, after which all is as before."""
        started = time.perf_counter()
        numbers = {f"{name}/{key}": value for name, probe in self.probes.items() for key, value in probe().items()}
        return numbers | {"probe/seconds": time.perf_counter() - started}


class Spectral:
    """Of every matrix and row block ||W||_S_inf, max_i ||W_i|| and lambda_max(P C P): paper, Proposition 1.

    Of those that Muown reparameterizes also `negative`: the share of its magnitudes g that are below 0, where Adam's
    steps have turned a row around.

    Args:
        iterations: of power iteration, which then also gives the `error` of the spectral norm; None: exact.
        quantiles: so many of the singular values, evenly spaced from the smallest (0) to the largest (1).

    Raises:
        ValueError: a setting that cannot be.
    """

    def __init__(self, subject: Subject, iterations: int | None = None, quantiles: int = 0) -> None:
        self.subject = subject
        self.iterations = None if iterations is None else check_int("spectral: iterations", iterations, 1)
        self.quantiles = check_int("spectral: quantiles", quantiles, 0)
        if self.quantiles == 1 or (self.quantiles and self.iterations):
            raise ValueError(f"spectral: quantiles={quantiles} must be 0, or 2 or more without iterations")

    def __call__(self) -> Numbers:
        magnitudes = self.subject.magnitudes()
        found = self.subject.shared(lambda matrix: self._of(matrix) | negative(matrix, magnitudes))
        return {f"{name}/{key}": value for name, numbers in found.items() for key, value in numbers.items()}

    @torch.no_grad()
    def _of(self, matrix: Matrix) -> Numbers:
        W = matrix.of(matrix.parameter)
        numbers = {}
        if self.iterations:
            parts, error = spectral_by_power_iteration(W, self.iterations)
            numbers["error"] = float(error)
        else:
            values = singular_values(W)
            parts = factors(values[0], W)
            if self.quantiles:
                at = torch.linspace(0, 1, self.quantiles, dtype=values.dtype, device=values.device)
                numbers = {
                    f"singular_value/{q:.4g}": value
                    for q, value in zip(at.tolist(), torch.quantile(values, at).tolist(), strict=True)
                }
        return {key: float(value) for key, value in parts._asdict().items()} | numbers


def negative(matrix: Matrix, magnitudes: Mapping[str, Magnitudes]) -> Numbers:
    """The share of a matrix's magnitudes that are below 0, if it has any."""
    found = magnitudes.get(matrix.of_parameter)
    return {} if found is None else {"negative": float((matrix.of(found.g) < 0).double().mean())}


class EffectiveRank:
    """Normalised effective rank of minibatch gradients, of R where Muown reparameterizes, else of W; a mean over some.

    Minibatches are those that the run will train on next. (The paper's section 5 takes 8 gradients; of how many tokens
    it does not say: by default those of an update.)

    Args:
        gradients: how many; tokens: of each, over all ranks; None: batch_tokens.

    Raises:
        ValueError: a setting that cannot be.
    """

    def __init__(self, subject: Subject, gradients: int = 8, tokens: int | None = None) -> None:
        self.subject, self.gradients = subject, check_int("effective_rank: gradients", gradients, 1)
        self.tokens = subject.batch_tokens if tokens is None else check_int("effective_rank: tokens", tokens, 1)
        if self.tokens % subject.seq_len:
            raise ValueError(f"effective_rank: tokens={tokens} must be a multiple of seq_len={subject.seq_len}")
        subject.check_rows(f"effective_rank: tokens={tokens}", self.tokens // subject.seq_len)

    def __call__(self) -> Numbers:
        magnitudes = self.subject.magnitudes()
        ranks: list[Numbers] = []
        for gradients in self.subject.minibatch_gradients(self.gradients, self.tokens):
            ranks.append(self.subject.shared(lambda matrix, gradients=gradients: rank(matrix, gradients, magnitudes)))  # type: ignore[misc]
        return {name: sum(found[name] for found in ranks) / len(ranks) for name in ranks[0]}


@torch.no_grad()
def rank(matrix: Matrix, gradients: Gradients, magnitudes: Mapping[str, Magnitudes]) -> float:
    """Normalised effective rank of a gradient, of R where there are magnitudes; NaN of a zero one."""
    return float(normalised_effective_rank(of_direction(matrix, gradients, magnitudes)))


def of_direction(matrix: Matrix, gradients: Gradients, magnitudes: Mapping[str, Magnitudes]) -> torch.Tensor:
    """The gradient of R (m, n) where there are magnitudes, else that of W."""
    G = matrix.of(gradients[matrix.parameter])
    found = magnitudes.get(matrix.of_parameter)
    if found is None:
        return G
    g, r = (matrix.of(vector).to(G.device) for vector in found)
    return split_gradient(matrix.of(matrix.parameter.detach()), G, g, r)[1]


class AttentionLogits:
    """The largest attention logit of each layer over the rows that the run will train on next.

    Args:
        rows: how many, over all ranks.

    Raises:
        ValueError: a setting that cannot be, or a model whose attention cannot be seen.
    """

    def __init__(self, subject: Subject, rows: int = 8) -> None:
        self.subject, self.rows = subject, check_int("attention_logits: rows", rows, 1)
        subject.check_rows("attention_logits", self.rows)
        largest_logits(subject, torch.zeros(1, 2, dtype=torch.int64, device=subject.world.device))  # or an error now

    def __call__(self) -> Numbers:
        (rows,) = self.subject.batches(1, self.rows)
        own = torch.stack(largest_logits(self.subject, rows)).tolist()
        of_ranks = torch.tensor(self.subject.world.gather(own))  # (ranks, layers)
        return {str(layer): value for layer, value in enumerate(of_ranks.amax(0).tolist())}  # NaN goes on
