"""What is measured: a model at a moment of its training, with what its optimizer and its data know of that moment.

A measurement changes nothing, bit for bit: gradients come from `torch.autograd.grad`, which leaves `p.grad` and the
hooks of DDP alone; rows from a source of its own; and no generator of random numbers is used.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muown_train.analysis.matrices import Matrix, matrices
from muown_train.data.loader import Loader
from muown_train.data.rows import RowSource
from muown_train.models.language_model import LanguageModel
from muown_train.optim.param_groups import canonical_name
from muown_train.runtime.distributed import World

T = TypeVar("T")
Gradients = dict[nn.Parameter, Tensor]


class Magnitudes(NamedTuple):
    """What Muown keeps of a parameter (m, n): see `muown_train.optim.core.weight_norm`."""

    g: Tensor  # (m,)
    r: Tensor  # (m,)


@dataclass
class Subject:
    """The same calls on every rank; all that is found is the same on every rank too.

    Args:
        model: not compiled, on world.device.
        magnitudes: of the parameters that Muown reparameterizes, by canonical name; all others are missing.
        rows: rows of the run, by a source that nobody else uses.
        place: the state of the run's loader, from where minibatches go on.
        batch_tokens: of an update, over all ranks; micro_batch: rows per rank and forward.
        autocast: bfloat16 in forward passes.
    """

    model: LanguageModel
    world: World
    magnitudes: Callable[[], Mapping[str, Magnitudes]]
    rows: Callable[[], RowSource]
    place: Callable[[], dict[str, Any]]
    seq_len: int
    batch_tokens: int
    micro_batch: int
    autocast: bool
    matrices: list[Matrix] = field(init=False)

    def __post_init__(self) -> None:
        self.matrices = list(matrices(self.model))

    def forward(self, rows: Tensor) -> Tensor:
        """The summed loss of rows (B, T+1), in the run's precision."""
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(rows[:, :-1], rows[:, 1:])
        return loss

    def batches(self, count: int, rows: int) -> Iterator[Tensor]:
        """This rank's rows (rows / ranks, T+1) of the next minibatches that the run will train on."""
        loader = Loader(self.rows(), rows, self.world.rank, self.world.size, prefetch=0)
        loader.load_state_dict(self.place())
        for _ in range(count):
            yield next(loader).tokens.to(self.world.device)

    def gradient(self, rows: Tensor, targets: int) -> Gradients:
        """Of the loss of rows (B, T+1), summed and divided by `targets`, with regard to parameters with matrices.

        Of this rank's rows alone, and without communication.
        """
        parameters = list(dict.fromkeys(matrix.parameter for matrix in self.matrices))
        total: Gradients = {}
        for part in torch.split(rows, self.micro_batch):
            with torch.enable_grad():
                loss = self.forward(part) / targets
            for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                total[p] = total[p].add_(gradient) if p in total else gradient
        return total

    def minibatch_gradients(self, count: int, tokens: int) -> Iterator[Gradients]:
        """Mean gradients of the next minibatches of so many tokens, over all ranks; a collective call each."""
        for rows in self.batches(count, tokens // self.seq_len):
            gradients = self.gradient(rows, tokens)
            for gradient in gradients.values():
                self.world.sum(gradient)
            yield gradients

    def shared(self, measure: Callable[[Matrix], T]) -> dict[str, T]:
        """A small result for each matrix, by name, the work dealt out to the ranks; a collective call."""
        mine = {matrix.name: measure(matrix) for matrix in self.matrices[self.world.rank :: self.world.size]}
        found = {name: result for part in self.world.gather(mine) for name, result in part.items()}
        return {matrix.name: found[matrix.name] for matrix in self.matrices}

    def check_rows(self, key: str, rows: int) -> None:
        """Refuse a number of rows that the ranks cannot share.

        Raises:
            ValueError: naming the setting.
        """
        if rows % self.world.size:
            raise ValueError(f"{key}: {rows} rows cannot be dealt out to {self.world.size} ranks: take a multiple")


def magnitudes_of(optimizer: Optimizer, model: nn.Module, world: World) -> Callable[[], dict[str, Magnitudes]]:
    """What `Subject` asks of an optimizer in a run, which may be sharded: a collective call."""
    names: dict[Tensor, str] = {p: canonical_name(name) for name, p in model.named_parameters()}

    def gathered() -> dict[str, Magnitudes]:
        own = {
            names[p]: Magnitudes(state["magnitude"].cpu(), state["row_norm"].cpu())
            for p, state in optimizer.state.items()
            if "magnitude" in state
        }
        return {name: found for part in world.gather(own) for name, found in part.items()}

    return gathered
