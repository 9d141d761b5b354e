"""The rows of matrices that ranks share: sent to the rank that works on the whole matrix, and back.

    X (m_r, n)  the rows of a matrix that rank r has, m_0 + m_1 + ... = m      O (m, n)  what is computed of the whole

Only X and O travel, each once, in the dtype of the computation. With all matrices of one shape a rank sends one message
to each other rank, and these messages travel while others compute.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .placement import RowShard


class Matrix(NamedTuple):
    """A whole matrix (m, n), of which this rank may have only some rows."""

    shape: tuple[int, int]
    shard: RowShard | None = None  # None: this rank has all rows
    counts: tuple[int, ...] = ()  # rows of the matrix on each rank of the shard's axis
    joined: tuple[int, ...] = ()  # this rank's rows of each of several such matrices, which lie below one another

    def split(self, X: Tensor) -> Sequence[Tensor]:
        """Return the rows of each matrix."""
        return X.split(self.joined) if self.joined else [X]

    def repeat(self, values: Tensor) -> Tensor:
        """Return one value for each row, (m,), given one for each matrix, (k,), or for the only one."""
        if not self.joined:
            return values
        return torch.cat([value.expand(m) for value, m in zip(values.split(1), self.joined, strict=True)])

    def combine_norms(self, norms: Tensor) -> Tensor:
        """Return Frobenius norms of the whole, any shape, given those of this rank's rows; a collective call."""
        if self.shard is None or self.shard.axis is None:
            return norms
        return _sum_over_ranks(norms.square(), self.shard).sqrt()


@torch._disable_dynamo  # type: ignore[attr-defined]  # torch.compiler.disable would import the compiler at once
def _sum_over_ranks(values: Tensor, shard: RowShard) -> Tensor:
    dist.all_reduce(values, group=shard.mesh.get_group(shard.axis))
    return values


def split_rows(shard: RowShard, blocks: Sequence[int] | None, n: int) -> Iterator[tuple[Matrix, int]]:
    """Yield the matrices (m, n) whose rows lie one below the other in a parameter, and where this rank's rows begin.

    Args:
        blocks: the rows of each matrix; None for a single one.

    Returns:
        Pairs of the matrix and the index, in this rank's part of the parameter, of the first row that it has of it.
    """
    rows = shard.bounds[-1][1]
    lo, hi = shard.own
    for stop, m in zip(accumulate(blocks or (rows,)), blocks or (rows,), strict=True):
        start = stop - m
        counts = tuple(max(0, min(b, stop) - max(a, start)) for a, b in shard.bounds)
        yield Matrix((m, n), shard, counts), min(max(start, lo), hi) - lo


def map_whole(
    function: Callable[[list[Tensor]], Iterable[Tensor]],
    X: Sequence[Tensor],
    matrices: Sequence[Matrix],
    owners: Sequence[int],
) -> Generator[None, None, list[Tensor]]:
    """Call a function with whole matrices of one shape, and return this rank's rows of each result.

    This is a collective call of the ranks along the shard's axis. It yields twice, while messages are on their way, so
    that the caller can do something else; its value is the list of results, in the dtype of X.

    Args:
        function: maps matrices (m, n) to as many results of that shape and dtype; called if this rank owns any.
        X: this rank's rows of each matrix, (m_r, n), also where it has none.
        owners: the rank along the axis that works on each matrix.
    """
    shard, n = matrices[0].shard, matrices[0].shape[1]
    if shard is None or shard.axis is None:
        return list(function(list(X)))
    size, rank = len(shard.bounds), shard.rank
    order = sorted(range(len(X)), key=owners.__getitem__)  # what goes to one rank lies together
    own = [i for i in order if owners[i] == rank]
    away = [n * sum(matrices[i].counts[rank] for i in order if owners[i] == r) for r in range(size)]
    home = [n * sum(matrices[i].counts[r] for i in own) for r in range(size)]

    there = _Message(torch.cat([X[i].flatten() for i in order]), away, home, shard)
    yield
    parts = [part.split([n * matrices[i].counts[r] for i in own]) for r, part in enumerate(there.receive().split(home))]
    whole = [torch.cat(rows).view(-1, n) for rows in zip(*parts, strict=True)]
    results = list(function(whole)) if own else []
    rows = [O.split(matrices[i].counts) for i, O in zip(own, results, strict=True)]  # noqa: E741
    pieces = [part[r].flatten() for r in range(size) for part in rows]
    back = _Message(torch.cat(pieces) if own else there.received, home, away, shard)
    del there, parts, whole, results, rows, pieces  # this memory is not held while the message travels
    yield
    received = back.receive().split([n * matrices[i].counts[rank] for i in order])
    own_rows = {i: piece.view(-1, n) for i, piece in zip(order, received, strict=True)}
    return [own_rows[i] for i in range(len(X))]


class _Message:
    """Numbers that every rank along an axis sends to every other one, on their way.

    Args:
        sent: (N,), what goes to each rank, one after the other.
        away, home: how many numbers go to each rank, and come from each rank.
    """

    def __init__(self, sent: Tensor, away: list[int], home: list[int], shard: RowShard) -> None:
        self.sent, self.received = sent, sent.new_empty(sum(home))
        group = shard.mesh.get_group(shard.axis)
        self.work = dist.all_to_all_single(self.received, sent, home, away, group=group, async_op=True)

    def receive(self) -> Tensor:
        """Return what has come from the ranks, one after the other; a device's stream waits for it, not the host."""
        self.work.wait()
        return self.received


def run_in_pipeline(tasks: Iterable[Generator[None, None, None]]) -> None:
    """Run generators side by side: each goes on to its next `yield` once a later one has started."""
    running: list[Generator[None, None, None]] = []
    for task in tasks:
        running = [each for each in (task, *running) if _advance(each)]
    while running:
        running = [each for each in running if _advance(each)]


def _advance(task: Generator[None, None, None]) -> bool:
    """Run a generator to its next `yield`; return False if it has ended."""
    try:
        next(task)
    except StopIteration:
        return False
    return True
