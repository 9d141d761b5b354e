"""Measurements that a run makes of itself every `probe_every` steps, and `muown-train analyze` makes of checkpoints.

A probe is constructed with a `ProbeContext` and the settings of its section in configs/probes/; a call returns numbers
by name.
"""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from muown_train.analysis.attention_logits import find_largest_logits
from muown_train.analysis.context import Magnitudes, ProbeContext
from muown_train.analysis.matrices import Matrix
from muown_train.analysis.spectral import (
    compute_normalised_effective_rank,
    compute_singular_values,
    derive_factors,
    estimate_spectral_factors,
)
from muown_train.analysis.validation import cut_valid_rows
from muown_train.config.checks import check_int
from muown_train.optim.core.weight_norm import split_gradient

Numbers = dict[str, float]


class Probes:
    """Several probes as one, whose numbers are called NAME/…, and the seconds that all of them took."""

    def __init__(self, probes: Mapping[str, Callable[[], Numbers]]) -> None:
        self.probes = probes

    def __call__(self) -> Numbers:
        """Measure without changing anything; a collective call."""
        started = time.perf_counter()
        with torch.compiler.set_stance("force_eager"):  # compiled blocks call no observer
            numbers = {f"{name}/{key}": value for name, probe in self.probes.items() for key, value in probe().items()}
        return numbers | {"probe/seconds": time.perf_counter() - started}


class Spectral:
    """Measures ||W||_S_inf, max_i ||W_i|| and lambda_max(P C P) (paper, Proposition 1) of every matrix and row block.

    For matrices that Muown reparameterizes it adds `negative`, the share of the magnitudes g that are below 0: their
    rows were turned around by Adam's steps.

    Args:
        iterations: the number of power iterations, which also give the `error` of the spectral norm; None: exact.
        quantiles: how many singular values to report, evenly spaced from the smallest (0) to the largest (1).

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, context: ProbeContext, iterations: int | None = None, quantiles: int = 0) -> None:
        self.context = context
        self.iterations = None if iterations is None else check_int("spectral: iterations", iterations, 1)
        self.quantiles = check_int("spectral: quantiles", quantiles, 0)
        if self.quantiles == 1 or (self.quantiles and self.iterations):
            raise ValueError(f"spectral: quantiles={quantiles} must be 0, or 2 or more without iterations")

    def __call__(self) -> Numbers:
        magnitudes = self.context.get_magnitudes()
        results = self.context.measure_matrices(
            lambda matrix, W: self._measure(W) | measure_negative_share(matrix, magnitudes)
        )
        return {f"{name}/{key}": value for name, numbers in results.items() for key, value in numbers.items()}

    @torch.no_grad()
    def _measure(self, W: Tensor) -> Numbers:
        numbers = {}
        if self.iterations:
            factors, error = estimate_spectral_factors(W, self.iterations)
            numbers["error"] = float(error)
        else:
            values = compute_singular_values(W)
            factors = derive_factors(values[0], W)
            if self.quantiles:
                at = torch.linspace(0, 1, self.quantiles, dtype=values.dtype, device=values.device)
                numbers = {
                    f"singular_value/{q:.4g}": value
                    for q, value in zip(at.tolist(), torch.quantile(values, at).tolist(), strict=True)
                }
        return {key: float(value) for key, value in factors._asdict().items()} | numbers


def measure_negative_share(matrix: Matrix, magnitudes: Mapping[str, Magnitudes]) -> Numbers:
    """Return the share of a matrix's magnitudes that are below 0 as `negative`; {} for a matrix without magnitudes."""
    vectors = magnitudes.get(matrix.parameter_name)
    return {} if vectors is None else {"negative": float((matrix.take_rows(vectors.g) < 0).double().mean())}


class EffectiveRank:
    """Measures the normalised effective rank of minibatch gradients, as a mean over several gradients.

    The gradient is that of R where Muown reparameterizes and that of W elsewhere. The minibatches are those that the
    run will train on next. (The paper's section 5 takes 8 gradients and does not say of how many tokens; the default is
    the tokens of a step.)

    Args:
        gradients: how many gradients to measure.
        tokens: tokens per gradient over all ranks; None: batch_tokens.

    Raises:
        ValueError: a setting is out of range, or the ranks cannot share the rows.
    """

    def __init__(self, context: ProbeContext, gradients: int = 8, tokens: int | None = None) -> None:
        self.context, self.gradients = context, check_int("effective_rank: gradients", gradients, 1)
        self.tokens = context.batch_tokens if tokens is None else check_int("effective_rank: tokens", tokens, 1)
        if self.tokens % context.seq_len:
            raise ValueError(f"effective_rank: tokens={tokens} must be a multiple of seq_len={context.seq_len}")
        context.check_rows(f"effective_rank: tokens={tokens}", self.tokens // context.seq_len)

    def __call__(self) -> Numbers:
        magnitudes = self.context.get_magnitudes()
        ranks: list[Numbers] = [
            self.context.measure_matrices(
                lambda matrix, W, G: measure_effective_rank(matrix, W, G, magnitudes), gradients
            )
            for gradients in self.context.compute_minibatch_gradients(self.gradients, self.tokens)
        ]
        return {name: sum(numbers[name] for numbers in ranks) / len(ranks) for name in ranks[0]}


@torch.no_grad()
def measure_effective_rank(matrix: Matrix, W: Tensor, G: Tensor, magnitudes: Mapping[str, Magnitudes]) -> float:
    """Return the normalised effective rank of `select_gradient`'s matrix; NaN if it is zero."""
    return float(compute_normalised_effective_rank(select_gradient(matrix, W, G, magnitudes)))


def select_gradient(matrix: Matrix, W: Tensor, G: Tensor, magnitudes: Mapping[str, Magnitudes]) -> Tensor:
    """Return the gradient of R (m, n) for a matrix with magnitudes, else that of W, which is G (m, n)."""
    vectors = magnitudes.get(matrix.parameter_name)
    if vectors is None:
        return G
    g, r = (matrix.take_rows(vector).to(G.device) for vector in vectors)
    return split_gradient(W, G, g, r)[1]


class AttentionLogits:
    """Measures the largest attention logit of each layer over the rows that the run will train on next.

    Args:
        rows: how many rows, over all ranks.

    Raises:
        ValueError: a setting is out of range, or the model's attention cannot be observed.
    """

    def __init__(self, context: ProbeContext, rows: int = 8) -> None:
        self.context, self.rows = context, check_int("attention_logits: rows", rows, 1)
        context.check_rows("attention_logits", self.rows)
        # this raises the error for a model that cannot be observed now, and not in the middle of a run
        find_largest_logits(context, torch.zeros(1, 2, dtype=torch.int64, device=context.world.device))

    def __call__(self) -> Numbers:
        (rows,) = self.context.iterate_batches(1, self.rows)
        own = torch.stack(find_largest_logits(self.context, rows)).tolist()
        by_rank = torch.tensor(self.context.world.gather(own))  # (ranks, layers)
        return {str(layer): value for layer, value in enumerate(by_rank.amax(0).tolist())}  # amax keeps a NaN


class Copying:
    """Measures whether the model copies from its context, by induction (Olsson et al. 2022, arXiv 2209.11895).

    On rows of random tokens that come twice, `first_half` and `second_half` are the mean losses of the same targets at
    their first and their second occurrence. The tokens are the same in every run. Nothing but copying can make the
    second loss smaller, so that `second_minus_first` is about 0 or above until a model has learned it. On rows of the
    validation text, `early` and `late` are the mean losses of the first and the last quarter of the positions.

    Args:
        rows: how many rows of random tokens.
        tokens: how many tokens of the validation text, from its start.

    Raises:
        ValueError: a setting is out of range, or rows are too short.
    """

    def __init__(self, context: ProbeContext, rows: int = 64, tokens: int = 65_536) -> None:
        self.context = context
        self.rows, self.tokens = check_int("copying: rows", rows, 1), check_int("copying: tokens", tokens, 1)
        if context.seq_len < 4:
            raise ValueError(f"copying: seq_len={context.seq_len} must be 4 or more, for two halves and four quarters")

    def __call__(self) -> Numbers:
        seq_len = self.context.seq_len
        random = make_repeated_rows(self.rows, seq_len // 2, self.context.model.vocab_size)
        half = random.shape[1] // 2
        # nothing announces the first token of the second half, which is target half - 1
        first, second = self.context.measure_losses(random, [slice(0, half - 1), slice(half, 2 * half - 1)])
        text = cut_valid_rows(self.context.get_valid(), self.tokens, seq_len)
        early, late = self.context.measure_losses(
            text, [slice(0, seq_len // 4), slice(seq_len - seq_len // 4, seq_len)]
        )
        return {
            "first_half": first,
            "second_half": second,
            "second_minus_first": second - first,
            "early": early,
            "late": late,
            "late_minus_early": late - early,
        }


def make_repeated_rows(rows: int, half: int, vocab_size: int) -> Tensor:
    """Return rows (rows, 2 n) int64 of n different random tokens and the same once more; n is `half` or vocab_size."""
    generator = torch.Generator().manual_seed(0)  # the generator of training is left alone
    first = torch.stack([torch.randperm(vocab_size, generator=generator)[:half] for _ in range(rows)])  # (rows, n)
    return torch.cat((first, first), 1)
