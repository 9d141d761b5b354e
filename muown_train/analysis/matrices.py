"""The weight matrices that a model declares; a fused matrix counts block by block, even where Muon sees it as one."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from muown_train.optim.param_groups import canonical_name, parameter_roles


class Matrix(NamedTuple):
    """A weight matrix, or one row block of a fused one."""

    name: str  # blocks.0.mlp.out.weight; blocks.0.attention.qkv.weight:1 for the second block of a fused matrix
    parameter: nn.Parameter
    rows: slice

    @property
    def parameter_name(self) -> str:
        """The canonical name of the whole parameter."""
        return self.name.split(":")[0]

    def take_rows(self, tensor: Tensor) -> Tensor:
        """Return the matrix's rows of a tensor laid out as the parameter: weights, gradient (m, n), magnitudes (m,)."""
        return tensor[self.rows]


def find_matrices(model: nn.Module) -> Iterator[Matrix]:
    """Yield every parameter in the role of a matrix, in the model's order; embeddings and heads are not among them."""
    roles = parameter_roles(model)
    for full_name, parameter in model.named_parameters():
        name = canonical_name(full_name)
        role, blocks = roles[name]
        if role != "matrix":
            continue
        if blocks is None:
            yield Matrix(name, parameter, slice(None))
            continue
        start = 0
        for i, rows in enumerate(blocks):
            yield Matrix(f"{name}:{i}", parameter, slice(start, start + rows))
            start += rows
