"""The matrices of parameters as a step sees them: split from fused ones, stacked by shape, joined or cut by rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
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
# The most elements of matrices whose rows are joined: a kernel's work then outweighs its start, and copying them costs
# less than further kernels would.
MAX_JOINED_ELEMENTS = {"cpu": 2**16, "cuda": 2**24}
# The most elements of a part of a matrix: what one kernel writes is then still in a CPU's cache when the next reads it.
MAX_PART_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}


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
        rows = {key: _take_rows(s, start, m) for key, s in state.items()}
        yield Block(W.narrow(0, start, m), G.narrow(0, start, m), rows, group, matrix)


def _split_local(p: Tensor, grad: Tensor, state: State, group: Group) -> Iterator[Block]:
    W, G = split_matrices(p, group), split_matrices(grad, group, like=p)
    matrices = {key: split_matrices(s, group, like=p) for key, s in state.items() if s.ndim == p.ndim}
    start = 0
    for i, (A, B) in enumerate(zip(W, G, strict=True)):
        m, n = A.shape
        rows = {key: matrices[key][i] if key in matrices else _take_rows(s, start, m) for key, s in state.items()}
        yield Block(A, B, rows, group, Matrix((m, n)))
        start += m


def _take_rows(s: Tensor, start: int, m: int) -> Tensor:
    """Return rows of a tensor as a view, all of it where that is all rows, and a scalar as it is."""
    return s if s.ndim == 0 or len(s) == m else s.narrow(0, start, m)


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


def chunk_rows(batch: list[Block], may_cut: bool) -> Iterator[list[Block]]:
    """Yield the rows of a batch, in order, in lists of blocks of one group that are joined, or in parts of blocks.

    Args:
        may_cut: whether rows of one matrix may come in several parts.
    """
    device = batch[0].W.device.type
    most_joined, most = MAX_JOINED_ELEMENTS.get(device, 2**24), MAX_PART_ELEMENTS.get(device, 2**24)
    for _, members in groupby(batch, key=lambda block: id(block.group)):
        blocks = list(members)
        largest = max(block.W.numel() for block in blocks)
        if largest > most and may_cut:
            for block in blocks:
                yield from ([part] for part in _cut(block, most))
            continue
        count = math.ceil(len(blocks) / max(1, most_joined // max(1, largest)))
        size = math.ceil(len(blocks) / count)  # of equal sizes, since compiled code is made for a size
        for start in range(0, len(blocks), size):
            yield blocks[start : start + size]


def _cut(block: Block, most: int) -> Iterator[Block]:
    """Yield the rows of a block in parts of about one size, of at most that many elements or of a single row."""
    m, n = block.W.shape
    parts = math.ceil(m / max(1, most // n))
    size = math.ceil(m / max(1, parts))
    for start in range(0, m, max(1, size)):
        rows = min(size, m - start)
        state = {key: _take_rows(s, start, rows) for key, s in block.state.items()}
        yield block._replace(W=block.W.narrow(0, start, rows), G=block.G.narrow(0, start, rows), state=state)


def join_rows(blocks: list[Block]) -> Block:
    """Return one block with the rows of all blocks, in memory of its own if there are several.

    The number of the step is then that of each row, (m,), unless the host sees that all blocks have the same.
    """
    first = blocks[0]
    if len(blocks) == 1:
        return first
    matrix = first.matrix._replace(joined=tuple(block.W.shape[0] for block in blocks))
    state = {key: torch.cat([block.state[key] for block in blocks]) for key in first.state if key != "step"}
    steps = torch.stack([block.state["step"] for block in blocks])
    is_same = steps.is_cpu and not torch.compiler.is_compiling() and len(set(steps.tolist())) == 1
    state["step"] = first.state["step"] if is_same else matrix.repeat(steps)
    return Block(join_weights(blocks), torch.cat([block.G for block in blocks]), state, first.group, matrix)


def join_weights(blocks: list[Block]) -> Tensor:
    """Return the rows of W of all blocks, (m, n), in memory of their own if there are several blocks."""
    return blocks[0].W if len(blocks) == 1 else torch.cat([block.W for block in blocks])


def write_state(joined: State, blocks: list[Block], ndim: int) -> None:
    """Copy the tensors of that many dimensions in the state of joined blocks back to each block."""
    if len(blocks) > 1:
        for key, s in joined.items():
            if s.ndim == ndim and key != "step":
                write_rows(s, [block.state[key] for block in blocks])


def write_rows(joined: Tensor, parts: list[Tensor]) -> None:
    """Copy rows to the tensors that they were joined from."""
    torch._foreach_copy_(parts, joined.split([len(part) for part in parts]))
