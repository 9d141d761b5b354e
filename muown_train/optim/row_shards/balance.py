"""Which rank does which work, such that all have about as much to do."""

from __future__ import annotations

from collections.abc import Sequence


def balance_costs(costs: Sequence[int], size: int, held: Sequence[Sequence[int]] | None = None) -> list[int]:
    """Give each cost to a rank in range(size): the largest first, always to the least loaded rank (Graham 1969).

    Args:
        held: for each cost what each rank has of its data; of equally loaded ranks the one with most of it is chosen,
            since the rest has to travel. None chooses the lowest.
    """
    owners = [0] * len(costs)
    loads = [0] * size
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = min(loads)
        ranks = [rank for rank in range(size) if loads[rank] == least]
        owners[i] = ranks[0] if held is None else max(ranks, key=held[i].__getitem__)
        loads[owners[i]] += costs[i]
    return owners
