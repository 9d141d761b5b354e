"""The noise of minibatch gradients in the paper's convergence bounds (section 4 and appendix "Gradient Noise").

    sigma_W^2 = mean over minibatches of ||mean gradient - minibatch gradient||_S_1^2      zeta_W = sqrt(min(m, n))
    sigma_R, sigma_g: likewise for the gradients of R (S_1) and of g (l_1)     zeta_R = zeta_W, zeta_g = sqrt(m)

The noise term of Muon is zeta_W sigma_W, that of Muown zeta_g sigma_g + zeta_R sigma_R. A matrix with magnitudes gets
both, at the same weights. The measurement passes twice over the first minibatches of the run. The gradients of g and R
are linear in the gradient of W, so the first pass needs to find the mean of the latter alone.

The sums so far are written after every block of minibatches, so that an interrupted measurement can continue, on any
number of ranks. Sums are in float64 over blocks whose bounds do not depend on where the measurement was interrupted.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from muown_train.analysis.context import Gradients, Magnitudes, ProbeContext
from muown_train.analysis.matrices import Matrix
from muown_train.analysis.spectral import compute_singular_values
from muown_train.config.stored_files import COUNT, NUMBER, check_entries, list_of
from muown_train.optim.core.weight_norm import split_gradient
from muown_train.runtime.atomic_files import open_regular, try_read_json, write_atomic

MAX_BATCH_ELEMENTS = 2**25  # elements of the matrices that are decomposed together
Progress = Callable[[str, int, int], None]  # takes the name of the pass, minibatches done, and all minibatches


class GradientNoise:
    """A measurement that starts, or continues from its scratch files; every rank makes the same calls.

    Args:
        batches: how many of the run's first minibatches, of context.batch_tokens tokens each, to measure.
        scratch: the beginning of the paths of the scratch files, which hold the sums so far (see `discard_scratch`).
        identity: identifies the checkpoint that is measured; scratch files of another one are not used.
        save_every: minibatches, over all ranks, between two writes of the scratch files.
    """

    def __init__(self, context: ProbeContext, batches: int, scratch: Path, identity: str, save_every: int = 50) -> None:
        self.context, self.batches, self.save_every = context, batches, save_every
        self.mean_file, self.squares_file = get_scratch_files(scratch)
        settings = [identity, batches, save_every, context.batch_tokens, context.seq_len, context.autocast]
        self.key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def measure(self, progress: Progress) -> dict[str, float]:
        """Return the noise of each matrix by name (`compute_noise_terms`) and its quartiles; a collective call."""
        magnitudes = self.context.get_magnitudes()
        mean = self._compute_mean(progress)
        squares = self._sum_squares(mean, magnitudes, progress)  # (matrices, 3)
        terms: dict[str, dict[str, float]] = {}
        for matrix, sigmas in zip(self.context.matrices, (squares / self.batches).sqrt().tolist(), strict=True):
            known = sigmas if matrix.parameter_name in magnitudes else sigmas[:1]
            terms[matrix.name] = compute_noise_terms(matrix, *known)
        numbers = {f"{name}/{key}": value for name, values in terms.items() for key, value in values.items()}
        return numbers | compute_quartiles(list(terms.values()))

    def _compute_mean(self, progress: Progress) -> Gradients:
        """Return the mean gradient over all minibatches, in float64."""
        total: Gradients = {}
        for matrix in self.context.matrices:
            zeros = torch.zeros_like(matrix.parameter.detach(), dtype=torch.float64)
            total.setdefault(matrix.parameter_name, zeros)
        self.context.get_rows().load_state_dict({})  # streams start from their beginning
        for done, indices in self._iterate_blocks(self._load_mean(total)):
            block = {name: torch.zeros_like(tensor) for name, tensor in total.items()}
            for i in indices:
                for name, gradient in self._compute_gradient(i).items():
                    block[name] += gradient
            for name, tensor in block.items():
                total[name] += self.context.world.sum(tensor)
            if self.context.world.is_main:
                self._write_mean(total, done)
                progress("mean gradient", done, self.batches)
        return {name: tensor / self.batches for name, tensor in total.items()}

    def _sum_squares(self, mean: Gradients, magnitudes: Mapping[str, Magnitudes], progress: Progress) -> Tensor:
        """Return the sums of `compute_squared_norms` of the deviations from the mean: (matrices, 3)."""
        total, start = torch.zeros(len(self.context.matrices), 3, dtype=torch.float64), 0
        saved = self.context.world.run_on_main(self._read_squares)
        if saved:
            total, start = torch.tensor(saved["squares"], dtype=torch.float64), saved["done"]
        self.context.get_rows().load_state_dict({})
        for done, indices in self._iterate_blocks(start):
            block = torch.zeros_like(total)
            for i in indices:
                gradients = self._compute_gradient(i)
                deviations = {name: mean[name] - gradient for name, gradient in gradients.items()}
                block += compute_squared_norms(self.context.matrices, deviations, magnitudes)
            total += self.context.world.sum(block)
            if self.context.world.is_main:
                state = {"key": self.key, "done": done, "squares": total.tolist()}
                write_atomic(self.squares_file, json.dumps(state).encode())
                progress("deviations", done, self.batches)
        return total

    def _iterate_blocks(self, done: int) -> Iterator[tuple[int, range]]:
        """Yield for each remaining block the number of minibatches done after it, and its minibatches for this rank."""
        world = self.context.world
        for first in range(done, self.batches, self.save_every):
            end = min(first + self.save_every, self.batches)
            yield end, range(first + world.rank, end, world.size)

    def _compute_gradient(self, i: int) -> Gradients:
        """Return the mean gradient of minibatch i, which this rank computes alone."""
        count = self.context.batch_tokens // self.context.seq_len
        rows = torch.from_numpy(self.context.get_rows().take(range(i * count, (i + 1) * count))).long()
        return self.context.compute_gradient(rows.to(self.context.world.device), self.context.batch_tokens)

    def _load_mean(self, total: Gradients) -> int:
        """Load into `total` the sum that an earlier attempt has written, and return its number of minibatches."""
        done: int = self.context.world.run_on_main(self._read_progress)
        if done:
            with safe_open(self.mean_file, "pt") as file:
                for name, tensor in total.items():
                    tensor.copy_(file.get_tensor(name))
        return done

    def _read_progress(self) -> int:
        """Return the number of minibatches in the scratch file of the mean, 0 without one of this measurement."""
        try:
            open_regular(self.mean_file).close()
            with safe_open(self.mean_file, "pt") as file:
                metadata = file.metadata() or {}
                done = int(metadata["done"]) if metadata.get("key") == self.key else 0
                matrices = self.context.matrices if done else ()
                shapes = [
                    file.get_slice(each.parameter_name).get_shape() == list(each.parameter.shape) for each in matrices
                ]
        except (FileNotFoundError, ValueError, KeyError, SafetensorError):  # there is none, or it is damaged
            return 0
        return done if 0 <= done <= self.batches and all(shapes) else 0

    def _read_squares(self) -> dict[str, Any]:
        """Return the content of the scratch file of the squares; {} without one of this measurement."""
        saved = try_read_json(self.squares_file)
        rows = list_of(list_of(NUMBER, 3), len(self.context.matrices))
        try:
            check_entries(saved, {"done": COUNT, "squares": rows})
        except ValueError:
            return {}
        ours = saved.get("key") == self.key and saved.keys() >= {"done", "squares"} and saved["done"] <= self.batches
        return saved if ours else {}

    def _write_mean(self, total: Gradients, done: int) -> None:
        tensors = {name: tensor.cpu() for name, tensor in total.items()}
        write_atomic(self.mean_file, save(tensors, {"key": self.key, "done": str(done)}))


def get_scratch_files(scratch: Path) -> tuple[Path, Path]:
    """Return the paths of the sum of gradients and of the sums of squared norms."""
    return scratch.with_name(scratch.name + ".mean.safetensors"), scratch.with_name(scratch.name + ".squares.json")


def discard_scratch(scratch: Path) -> None:
    """Remove the scratch files of a measurement whose result has been stored."""
    for file in get_scratch_files(scratch):
        file.unlink(missing_ok=True)


@torch.no_grad()
def compute_squared_norms(
    matrices: Sequence[Matrix], deviations: Gradients, magnitudes: Mapping[str, Magnitudes]
) -> Tensor:
    """Return ||d_W||_S_1^2, ||d_R||_S_1^2 and ||d_g||_1^2 of each matrix: (k, 3).

    The last two are 0 for matrices without magnitudes.

    Args:
        deviations: d_W, the deviation of the gradient of W from its mean; d_R and d_g are linear functions of it.
    """
    norms = torch.zeros(len(matrices), 3, dtype=torch.float64)
    of_W, of_R = {}, {}
    for i, matrix in enumerate(matrices):
        of_W[i] = d = matrix.take_rows(deviations[matrix.parameter_name])
        if vectors := magnitudes.get(matrix.parameter_name):
            g, r = (matrix.take_rows(vector).to(d) for vector in vectors)
            d_g, of_R[i] = split_gradient(matrix.take_rows(matrix.parameter.detach()), d, g, r)
            norms[i, 2] = d_g.abs().sum()
    for column, tensors in ((0, of_W), (1, of_R)):
        for i, norm in compute_nuclear_norms(tensors).items():
            norms[i, column] = norm
    return norms.square()


def compute_nuclear_norms(tensors: Mapping[int, Tensor]) -> dict[int, float]:
    """Return ||A||_S_1 of matrices, exact to float32's rounding; matrices of one shape are decomposed together."""
    by_shape: defaultdict[torch.Size, list[int]] = defaultdict(list)
    for i, tensor in tensors.items():
        by_shape[tensor.shape].append(i)
    norms: dict[int, float] = {}
    for shape, members in by_shape.items():
        size = max(1, MAX_BATCH_ELEMENTS // shape.numel())
        for part in (members[start : start + size] for start in range(0, len(members), size)):
            values = compute_singular_values(torch.stack([tensors[i] for i in part]), torch.float32)
            norms |= zip(part, values.double().sum(-1).tolist(), strict=True)
    return norms


def compute_noise_terms(
    matrix: Matrix, sigma_W: float, sigma_R: float | None = None, sigma_g: float | None = None
) -> dict[str, float]:
    """Return the sigmas of a matrix (m, n) and the noise terms of Muon and, where they are known, of Muown."""
    m, n = matrix.take_rows(matrix.parameter).shape
    zeta, zeta_g = math.sqrt(min(m, n)), math.sqrt(m)
    terms = {"sigma_W": sigma_W, "muon": zeta * sigma_W}
    if sigma_R is not None and sigma_g is not None:
        terms |= {"sigma_R": sigma_R, "sigma_g": sigma_g, "muown": zeta_g * sigma_g + zeta * sigma_R}
        terms["muon/muown"] = terms["muon"] / terms["muown"] if terms["muown"] else math.nan
    return terms


def compute_quartiles(terms: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the lower quartile, median and upper quartile over matrices of the noise terms and their ratio."""
    numbers = {}
    for key in ("muon", "muown", "muon/muown"):
        if values := [each[key] for each in terms if key in each]:
            for name, q in (("lower_quartile", 0.25), ("median", 0.5), ("upper_quartile", 0.75)):
                numbers[f"{name}/{key}"] = float(np.quantile(values, q))
    return numbers
