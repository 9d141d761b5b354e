"""The input of a measurement: a model at one moment of its training, the state of its optimizer, and its next data.

A measurement does not change training, bit for bit: gradients come from `torch.autograd.grad`, which leaves `p.grad`
and the hooks of DDP alone, or where ranks hold rows of the model from FSDP2's hooks, and go before the next step; rows
come from a source of its own; and it uses no random number generator.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muown_train.analysis.matrices import Matrix, find_matrices, gather_whole
from muown_train.analysis.validation import sum_losses
from muown_train.data.loader import Loader
from muown_train.data.rows import RowSource
from muown_train.models.language_model import LanguageModel
from muown_train.optim.muown import list_row_norms
from muown_train.optim.param_groups import canonical_name
from muown_train.optim.row_shards.placement import is_dtensor
from muown_train.runtime.distributed import World

T = TypeVar("T")
Gradients = dict[str, Tensor]  # by the canonical name of the parameter


class Magnitudes(NamedTuple):
    """The vectors that Muown keeps for a parameter (m, n): see `muown_train.optim.core.weight_norm`."""

    g: Tensor  # (m,)
    r: Tensor  # (m,)


@dataclass
class ProbeContext:
    """The model, optimizer state and data that probes read; every rank makes the same calls and gets the same results.

    Args:
        model: the model on world.device, whose blocks are not run as compiled ones.
        get_magnitudes: returns, by canonical name, the magnitudes of the parameters that Muown reparameterizes.
        get_rows: returns the rows of the run, from a source that nothing else reads.
        get_loader_state: returns the state of the run's loader, from which the next minibatches follow.
        get_valid: returns the token ids (N,) of the validation text.
        batch_tokens: tokens per step over all ranks.
        micro_batch: rows per rank and forward pass.
        autocast: whether forward passes run in bfloat16.
        check_stop: is called between minibatches and matrices, equally often on every rank; it raises to end a probe.
    """

    model: LanguageModel
    world: World
    get_magnitudes: Callable[[], Mapping[str, Magnitudes]]
    get_rows: Callable[[], RowSource]
    get_loader_state: Callable[[], dict[str, Any]]
    get_valid: Callable[[], np.ndarray]
    seq_len: int
    batch_tokens: int
    micro_batch: int
    autocast: bool
    check_stop: Callable[[], None] = lambda: None
    matrices: list[Matrix] = field(init=False)

    def __post_init__(self) -> None:
        self.matrices = list(find_matrices(self.model))

    def compute_loss(self, rows: Tensor) -> Tensor:
        """Return the summed loss of rows (B, T+1), in the run's precision."""
        return self._compute_loss(rows[:, :-1], rows[:, 1:])

    def _compute_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(inputs, targets)
        return loss

    def measure_losses(self, rows: Tensor, spans: Sequence[slice]) -> list[float]:
        """Return the mean loss in nats of the targets in each span of a row; NaN where there are none.

        This is a collective call; see `sum_losses`.
        """
        sums = sum_losses(self._compute_loss, rows, spans, self.micro_batch, self.world, self.check_stop)
        return [loss / count if count else math.nan for loss, count in sums]

    def iterate_batches(self, count: int, rows: int) -> Iterator[Tensor]:
        """Yield this rank's rows (rows / ranks, T+1) of the next `count` minibatches that the run will train on."""
        loader = Loader(self.get_rows(), rows, self.world.rank, self.world.size, prefetch=0)
        loader.load_state_dict(self.get_loader_state())
        for _ in range(count):
            self.check_stop()
            yield next(loader).tokens.to(self.world.device)

    def compute_gradient(self, rows: Tensor, targets: int) -> Gradients:
        """Return the gradient of the summed loss of rows (B, T+1) divided by `targets`, for parameters with matrices.

        Only this rank's rows count; there is no communication.
        """
        parameters = {matrix.parameter_name: matrix.parameter for matrix in self.matrices}
        total: Gradients = {}
        for part in torch.split(rows, self.micro_batch):
            with torch.enable_grad():
                loss = self.compute_loss(part) / targets
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            for name, gradient in zip(parameters, gradients, strict=True):
                total[name] = total[name].add_(gradient) if name in total else gradient
        return total

    def compute_minibatch_gradients(self, count: int, tokens: int) -> Iterator[Gradients]:
        """Yield the mean gradient of each of the next minibatches of `tokens` tokens; each is a collective call.

        It is a DTensor where its parameter is one.
        """
        for rows in self.iterate_batches(count, tokens // self.seq_len):
            if any(is_dtensor(matrix.parameter) for matrix in self.matrices):
                yield self._compute_sharded_gradient(rows, tokens)
                continue
            gradients = self.compute_gradient(rows, tokens)
            for gradient in gradients.values():
                self.world.sum(gradient)
            yield gradients

    def _compute_sharded_gradient(self, rows: Tensor, targets: int) -> Gradients:
        """Return the gradient of all ranks' rows as FSDP2 leaves it between steps, when no parameter has one."""
        for part in torch.split(rows, self.micro_batch):
            with torch.enable_grad():
                loss = self.compute_loss(part) * (self.world.size / targets)  # FSDP2 takes the mean over ranks
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = {matrix.parameter_name: matrix.parameter.grad for matrix in self.matrices}
        self.model.zero_grad(set_to_none=True)
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def measure_matrices(self, measure: Callable[..., T], gradients: Gradients | None = None) -> dict[str, T]:
        """Return a small result for each matrix by name; the ranks share the work, so this is a collective call.

        Args:
            measure: takes a matrix, its W (m, n), and where there are gradients its gradient (m, n).
        """
        own: dict[str, T] = {}
        for start in range(0, len(self.matrices), self.world.size):
            self.check_stop()
            mine: tuple[Matrix, list[Tensor]] | None = None
            for rank, matrix in enumerate(self.matrices[start : start + self.world.size]):
                tensors = [matrix.parameter.detach()]
                if gradients is not None:
                    tensors.append(gradients[matrix.parameter_name])
                wholes = [gather_whole(tensor) for tensor in tensors]  # all ranks take part, and one keeps the result
                if rank == self.world.rank:
                    mine = matrix, [matrix.take_rows(whole) for whole in wholes]
            if mine:
                own[mine[0].name] = measure(mine[0], *mine[1])
        results = {name: result for part in self.world.gather(own) for name, result in part.items()}
        return {matrix.name: results[matrix.name] for matrix in self.matrices}

    def check_rows(self, key: str, rows: int) -> None:
        """Refuse a number of rows that the ranks cannot share equally.

        Raises:
            ValueError: naming the setting.
        """
        if rows % self.world.size:
            raise ValueError(f"{key}: {rows} rows cannot be shared equally by {self.world.size} ranks: give a multiple")


def make_magnitude_reader(optimizer: Optimizer, model: nn.Module, world: World) -> Callable[[], dict[str, Magnitudes]]:
    """Return `ProbeContext.get_magnitudes` for a run's optimizer, which may be sharded: calling it is collective."""
    names: dict[Tensor, str] = {p: canonical_name(name) for name, p in model.named_parameters()}

    def gather_magnitudes() -> dict[str, Magnitudes]:
        # before its first step a parameter has no state: g and r are then the norms of its rows
        magnitudes, own = {}, {}
        for group in optimizer.param_groups:
            if "magnitude" not in group or not group.get("reparameterize", True):
                continue
            for p in group["params"]:
                norms = list_row_norms(gather_whole(p.detach()), group).cpu()
                magnitudes[names[p]] = Magnitudes(norms, norms)
                if "magnitude" in (state := optimizer.state.get(p, {})):
                    own[names[p]] = Magnitudes(*(gather_whole(state[key]).cpu() for key in ("magnitude", "row_norm")))
        for part in world.gather(own):
            magnitudes.update(part)
        return magnitudes

    return gather_magnitudes
