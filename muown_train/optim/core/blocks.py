"""The matrices of parameters as a step sees them: split from fused parameters, and stacked by shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ..row_shards.balance import balance_costs
from ..row_shards.exchange import Matrix, split_rows
from ..row_shards.placement import find_row_shard, get_local
from .base import Group, State, get_local_gradient
from .layouts import get_local_options, split_matrices
from .orthogonalize import count_flops

# The most elements that are orthogonalised together; it bounds the extra memory of a step (4 bytes an element for a
# copy in float32). A CPU is slower on more than its caches hold; many small matrices keep a GPU busy.
MAX_BATCH_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}


class Block(NamedTuple):
    """One matrix as the algorithm sees it: W and G (m, n), its rows of the state, and the options of its group.

    Of a DTensor's matrix these are the rows that this rank has, which may be none.
    """

    W: Tensor
    G: Tensor
    state: State
    group: Group
    matrix: Matrix


def split_parameter(p: Tensor, state: State, group: Group) -> Iterator[Block]:
    """Yield the matrices of a parameter with their rows of the gradient and the state."""
    shard = find_row_shard(p) if group["layout"] != "experts" else None
    W, G = get_local(p.detach()), get_local_gradient(p)
    state = {key: get_local(s) for key, s in state.items()}
    if shard is None:
        yield from _split_local(W, G, state, group)
        return
    ((W, G, state, _, _),) = _split_local(W, G, state, get_local_options(group))
    for matrix, start in split_rows(shard, group["blocks"], W.shape[1]):
        m = matrix.counts[shard.rank]
        rows = {key: s if s.ndim == 0 else s.narrow(0, start, m) for key, s in state.items()}
        yield Block(W.narrow(0, start, m), G.narrow(0, start, m), rows, group, matrix)


def _split_local(p: Tensor, grad: Tensor, state: State, group: Group) -> Iterator[Block]:
    W, G = split_matrices(p, group), split_matrices(grad, group, like=p)
    matrices = {key: split_matrices(s, group, like=p) for key, s in state.items() if s.ndim == p.ndim}
    start = 0
    for i, (A, B) in enumerate(zip(W, G, strict=True)):
        m, n = A.shape
        rows = {
            key: matrices[key][i] if key in matrices else s if s.ndim == 0 else s.narrow(0, start, m)
            for key, s in state.items()
        }
        yield Block(A, B, rows, group, Matrix((m, n)))
        start += m


def batch_blocks(blocks: Iterable[Block]) -> Iterator[tuple[list[Block], list[int] | None]]:
    """Yield the blocks in lists to orthogonalise as one stack, and the rank that does so for each if they are sharded.

    A rank stacks at most about MAX_BATCH_ELEMENTS, or a single block.
    """
    alike: dict[Any, list[Block]] = {}
    sharded: dict[Any, list[Block]] = {}
    for block in blocks:
        W, group, matrix = block.W, block.group, block.matrix
        settings = [group[key] for key in ("orthogonalizer", "ns_steps", "eps", "ns_dtype")]
        axis = None if matrix.shard is None else (matrix.shard.mesh, matrix.shard.axis)
        alike.setdefault((matrix.shape, W.dtype, W.device, axis, *settings, *group["ns_coefficients"]), []).append(
            block
        )
        if axis:
            sharded.setdefault(axis, []).append(block)
    owners: dict[int, int] = {}
    for members in sharded.values():
        costs = [count_flops(*block.matrix.shape, block.group["ns_steps"]) for block in members]
        ranks = balance_costs(costs, len(members[0].matrix.counts), [block.matrix.counts for block in members])
        owners |= {id(block): rank for block, rank in zip(members, ranks, strict=True)}
    for batch in alike.values():
        W, matrix = batch[0].W, batch[0].matrix
        most = MAX_BATCH_ELEMENTS.get(W.device.type, 2**26) // math.prod(matrix.shape)
        size = max(1, most) * max(1, len(matrix.counts))
        for start in range(0, len(batch), size):
            part = batch[start : start + size]
            yield part, [owners[id(block)] for block in part] if matrix.shard else None
