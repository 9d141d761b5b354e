"""The weight matrices that a model declares; a fused matrix counts block by block, even where Muon sees it as one."""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from muown_train.optim.core.layouts import split_matrices
from muown_train.optim.param_groups import canonical_name, parameter_roles
from muown_train.optim.row_shards.placement import is_dtensor


class Matrix(NamedTuple):
    """A weight matrix, or one of those in a parameter that has several: row blocks, experts."""

    name: str  # blocks.0.mlp.out.weight; blocks.0.attention.qkv.weight:1 for the second matrix of a parameter
    parameter: nn.Parameter
    options: dict[str, Any]  # how the parameter is stored, see `split_matrices`
    position: int  # among the parameter's matrices
    rows: slice  # in a vector with a number for each row of the parameter's matrices

    @property
    def parameter_name(self) -> str:
        """The canonical name of the whole parameter."""
        return self.name.split(":")[0]

    def take_rows(self, tensor: Tensor) -> Tensor:
        """Return the matrix's part of a tensor laid out as the parameter, (m, n), or of a vector of all rows, (m,).

        Args:
            tensor: no DTensor, see `gather_whole`.
        """
        if tensor.ndim == 1:
            return tensor[self.rows]
        return split_matrices(tensor, self.options, like=self.parameter)[self.position]


def find_matrices(model: nn.Module) -> Iterator[Matrix]:
    """Yield every parameter in the role of a matrix, in the model's order; embeddings and heads are not among them."""
    roles = parameter_roles(model)
    for full_name, parameter in model.named_parameters():
        name = canonical_name(full_name)
        role = roles[name]
        if role.role != "matrix":
            continue
        options = {"blocks": role.blocks, "layout": role.layout, "transposed": role.transposed}
        matrices = split_matrices(torch.empty(parameter.shape, device="meta"), options)  # it may be a DTensor
        start = 0
        for i, matrix in enumerate(matrices):
            rows = slice(start, start := start + matrix.shape[0])
            yield Matrix(f"{name}:{i}" if len(matrices) > 1 else name, parameter, options, i, rows)


def gather_whole(tensor: Tensor) -> Tensor:
    """Return all of a DTensor on every rank, which is a collective call; return a plain tensor as it is."""
    return cast(Any, tensor).full_tensor() if is_dtensor(tensor) else tensor
