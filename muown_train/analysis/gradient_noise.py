"""Noise of minibatch gradients as the convergence bounds have it (paper, section 4 and appendix "Gradient Noise").

    sigma_W^2 = mean over minibatches of ||mean gradient - minibatch gradient||_S_1^2      zeta_W = sqrt(min(m, n))
    sigma_R, sigma_g the same of the gradients of R (S_1) and of g (l_1)     zeta_R = zeta_W, zeta_g = sqrt(m)

Muon's noise term is zeta_W sigma_W, Muown's zeta_g sigma_g + zeta_R sigma_R. Where there are magnitudes both are given,
at the same weights. Two passes over the first minibatches of the run: as the gradients of g and R are linear in that of
W, the first needs to find no more than the mean of that.

What was summed up is written every so many minibatches, so that a measurement that was cut off goes on, with any number
of ranks; sums are in float64, over blocks of minibatches whose bounds do not depend on where it was cut.
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
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from muown_train.analysis.context import Gradients, Magnitudes, Subject
from muown_train.analysis.matrices import Matrix
from muown_train.analysis.spectral import singular_values
from muown_train.optim.core.weight_norm import split_gradient
from muown_train.optim.param_groups import canonical_name
from muown_train.runtime.atomic_files import write_atomic

MOST = 2**25  # elements of a batch of matrices
Progress = Callable[[str, int, int], None]  # what is done, minibatches, of how many


class Noise:
    """A measurement, begun or to be gone on with; the same calls on every rank.

    Args:
        batches: minibatches, the first of the run, of subject.batch_tokens tokens each.
        scratch: beginning of the names of files for what was summed up, which stay: see `discard`.
        about: what the measurement is of, besides: files of another one do not count.
        save_every: minibatches, over all ranks.
    """

    def __init__(self, subject: Subject, batches: int, scratch: Path, about: str, save_every: int = 50) -> None:
        self.subject, self.batches, self.save_every = subject, batches, save_every
        self.mean_file, self.squares_file = scratch_files(scratch)
        facts = [about, batches, save_every, subject.batch_tokens, subject.seq_len, subject.autocast]
        self.key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        self.names = {p: canonical_name(name) for name, p in subject.model.named_parameters()}

    def measure(self, progress: Progress) -> dict[str, float]:
        """sigma, zeta and noise terms of each matrix by name, and their quartiles over matrices; a collective call."""
        magnitudes = self.subject.magnitudes()
        mean = self._mean_gradient(progress)
        squares = self._squares(mean, magnitudes, progress)  # (matrices, 3)
        found: dict[str, dict[str, float]] = {}
        for matrix, (of_W, of_R, of_g) in zip(
            self.subject.matrices, (squares / self.batches).sqrt().tolist(), strict=True
        ):
            there = matrix.of_parameter in magnitudes
            found[matrix.name] = terms(matrix, of_W, of_R if there else None, of_g if there else None)
        numbers = {f"{name}/{key}": value for name, values in found.items() for key, value in values.items()}
        return numbers | quartiles(list(found.values()))

    def _mean_gradient(self, progress: Progress) -> Gradients:
        """Of all minibatches, in float64."""
        total: Gradients = {}
        for matrix in self.subject.matrices:
            total.setdefault(matrix.parameter, torch.zeros_like(matrix.parameter.detach(), dtype=torch.float64))
        self.subject.rows().load_state_dict({})  # streams begin again
        for done, indices in self._blocks(self._resumed(total)):
            block = {p: torch.zeros_like(tensor) for p, tensor in total.items()}
            for i in indices:
                for p, gradient in self._gradient(i).items():
                    block[p] += gradient
            for p, tensor in block.items():
                total[p] += self.subject.world.sum(tensor)
            if self.subject.world.is_main:
                self._write_mean(total, done)
                progress("mean gradient", done, self.batches)
        return {p: tensor / self.batches for p, tensor in total.items()}

    def _squares(self, mean: Gradients, magnitudes: Mapping[str, Magnitudes], progress: Progress) -> Tensor:
        """Sums of squared norms of deviations from the mean: of W, R and g, (matrices, 3)."""
        total, before = torch.zeros(len(self.subject.matrices), 3, dtype=torch.float64), 0
        saved = self.subject.world.run_on_main(lambda: _read_json(self.squares_file))
        if saved.get("key") == self.key:
            total, before = torch.tensor(saved["squares"], dtype=torch.float64), saved["done"]
        self.subject.rows().load_state_dict({})
        for done, indices in self._blocks(before):
            block = torch.zeros_like(total)
            for i in indices:
                gradients = self._gradient(i)
                deviations = {p: mean[p] - gradient for p, gradient in gradients.items()}
                block += squared_norms(self.subject.matrices, deviations, magnitudes)
            total += self.subject.world.sum(block)
            if self.subject.world.is_main:
                state = {"key": self.key, "done": done, "squares": total.tolist()}
                write_atomic(self.squares_file, json.dumps(state).encode())
                progress("deviations", done, self.batches)
        return total

    def _blocks(self, done: int) -> Iterator[tuple[int, range]]:
        """Of each block that is left: minibatches done after it, and those of it that this rank is to take."""
        world = self.subject.world
        for first in range(done, self.batches, self.save_every):
            end = min(first + self.save_every, self.batches)
            yield end, range(first + world.rank, end, world.size)

    def _gradient(self, i: int) -> Gradients:
        """Mean gradient of minibatch i, by this rank alone."""
        count = self.subject.batch_tokens // self.subject.seq_len
        rows = torch.from_numpy(self.subject.rows().take(range(i * count, (i + 1) * count))).long()
        return self.subject.gradient(rows.to(self.subject.world.device), self.subject.batch_tokens)

    def _resumed(self, total: Gradients) -> int:
        """Load what was summed up of this measurement before; how many minibatches that is."""
        done: int = self.subject.world.run_on_main(self._mean_done)
        if done:
            with safe_open(self.mean_file, "pt") as file:
                for p, tensor in total.items():
                    tensor.copy_(file.get_tensor(self.names[p]))
        return done

    def _mean_done(self) -> int:
        if not self.mean_file.exists():
            return 0
        with safe_open(self.mean_file, "pt") as file:
            facts = file.metadata()
        return int(facts["done"]) if facts["key"] == self.key else 0

    def _write_mean(self, total: Gradients, done: int) -> None:
        tensors = {self.names[p]: tensor.cpu() for p, tensor in total.items()}
        write_atomic(self.mean_file, save(tensors, {"key": self.key, "done": str(done)}))


def scratch_files(scratch: Path) -> tuple[Path, Path]:
    """Of the sum of gradients, and of the sums of squared norms."""
    return scratch.with_name(scratch.name + ".mean.safetensors"), scratch.with_name(scratch.name + ".squares.json")


def discard(scratch: Path) -> None:
    """Remove what a measurement had summed up, when its result is kept."""
    for file in scratch_files(scratch):
        file.unlink(missing_ok=True)


def _read_json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


@torch.no_grad()
def squared_norms(matrices: Sequence[Matrix], deviations: Gradients, magnitudes: Mapping[str, Magnitudes]) -> Tensor:
    """Of each matrix ||d_W||_S_1^2 and, where there are magnitudes, ||d_R||_S_1^2 and ||d_g||_1^2, else 0: (k, 3).

    Args:
        deviations: of the gradient of W from its mean, of which those of R and g are linear functions.
    """
    found = torch.zeros(len(matrices), 3, dtype=torch.float64)
    of_W, of_R = {}, {}
    for i, matrix in enumerate(matrices):
        of_W[i] = d = matrix.of(deviations[matrix.parameter])
        if vectors := magnitudes.get(matrix.of_parameter):
            g, r = (matrix.of(vector).to(d) for vector in vectors)
            d_g, of_R[i] = split_gradient(matrix.of(matrix.parameter.detach()), d, g, r)
            found[i, 2] = d_g.abs().sum()
    for column, tensors in ((0, of_W), (1, of_R)):
        for i, norm in nuclear_norms(tensors).items():
            found[i, column] = norm
    return found.square()


def nuclear_norms(tensors: Mapping[int, Tensor]) -> dict[int, float]:
    """||A||_S_1 of matrices, exact to float32's rounding; those of one shape are decomposed together."""
    of_shape: defaultdict[torch.Size, list[int]] = defaultdict(list)
    for i, tensor in tensors.items():
        of_shape[tensor.shape].append(i)
    found: dict[int, float] = {}
    for shape, members in of_shape.items():
        size = max(1, MOST // shape.numel())
        for part in (members[start : start + size] for start in range(0, len(members), size)):
            values = singular_values(torch.stack([tensors[i] for i in part]), torch.float32)
            found |= zip(part, values.double().sum(-1).tolist(), strict=True)
    return found


def terms(matrix: Matrix, sigma_W: float, sigma_R: float | None, sigma_g: float | None) -> dict[str, float]:
    """What is known of the noise of a matrix (m, n): the sigmas, and the noise terms of Muon and of Muown."""
    m, n = matrix.of(matrix.parameter).shape
    zeta, zeta_g = math.sqrt(min(m, n)), math.sqrt(m)
    found = {"sigma_W": sigma_W, "muon": zeta * sigma_W}
    if sigma_R is not None and sigma_g is not None:
        found |= {"sigma_R": sigma_R, "sigma_g": sigma_g, "muown": zeta_g * sigma_g + zeta * sigma_R}
        found["muon/muown"] = found["muon"] / found["muown"] if found["muown"] else math.nan
    return found


def quartiles(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Lower quartile, median and upper quartile over matrices of the noise terms and their ratio."""
    numbers = {}
    for key in ("muon", "muown", "muon/muown"):
        if values := [of_matrix[key] for of_matrix in found if key in of_matrix]:
            for name, q in (("lower_quartile", 0.25), ("median", 0.5), ("upper_quartile", 0.75)):
                numbers[f"{name}/{key}"] = float(np.quantile(values, q))
    return numbers
