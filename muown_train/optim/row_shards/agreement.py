"""Checks that the ranks of a mesh do the same, before they communicate as if they did."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .placement import find_row_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The groups that were made to talk through CPUs, by ranks, for each default group, since programs may make it anew.
_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def agree(mesh: DeviceMesh, facts: Sequence[str], value: int = 0) -> list[int]:
    """Return the values of all ranks of a mesh, in order; a collective call, through the CPUs.

    Every agreement has the same form on the network. So ranks whose programs have gone different ways find it out here,
    and none waits for another.

    Args:
        facts: what this rank is about to do, as short sentences, which must be the same on all ranks.

    Raises:
        ValueError: on every rank, if the facts differ; the message has the first that does.
    """
    group = _get_cpu_group(mesh)
    digest = int.from_bytes(hashlib.sha256(repr(list(facts)).encode()).digest()[:7])
    digests, values = zip(*(each.tolist() for each in _gather(group, torch.tensor([digest, value]))), strict=True)
    if len(set(digests)) > 1:
        rank = next(rank for rank, other in enumerate(digests) if other != digests[0])
        everyones = [json.loads(text) for text in _gather_texts(group, json.dumps(list(facts)))]
        pairs = zip_longest(everyones[0], everyones[rank], fillvalue="nothing")
        first, other = next((a, b) for a, b in pairs if a != b)
        raise ValueError(
            f"the ranks differ in what they give to the optimizer: {first} on rank 0, {other} on rank {rank}"
        )
    return list(values)


def _gather(group: Any, own: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks of a group, which have one shape."""
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([gathered], [own]).wait()
    return gathered


def raise_together(mesh: DeviceMesh, error: Exception | None) -> None:
    """Raise an error on every rank of a mesh if any rank has one; a collective call.

    Raises:
        Exception: this rank's error; RuntimeError with the words of another rank's.
    """
    texts = _gather_texts(_get_cpu_group(mesh), "" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise RuntimeError(f"the step failed on rank {rank}: {text}")


def _gather_texts(group: Any, own: str) -> list[str]:
    """Return the texts of all ranks of a group."""
    content = own.encode()
    length = max(int(each) for each in _gather(group, torch.tensor([len(content)])))
    texts = _gather(group, torch.tensor(list(content.ljust(length)), dtype=torch.uint8))
    return [bytes(text.tolist()).decode().rstrip() for text in texts]


def sum_over_ranks(tensor: Tensor, fact: str, value: int) -> int:
    """Return the sum of a value over the ranks that share the rows of a DTensor, which `agree` on the fact."""
    shard = find_row_shard(tensor)
    assert shard is not None
    values = agree(shard.mesh, [fact], value)
    replicas = len(values) // len(shard.bounds)
    return sum(values) // replicas


def _get_cpu_group(mesh: DeviceMesh) -> Any:
    """Return a group of the ranks of a mesh that sends what lies in host memory; a collective call at first.

    It is made here, and not by `torch.distributed.new_group`, since ranks outside of the mesh do not take part, and
    torch numbers the groups that only some ranks make by how many each of these has made before.
    """
    world = dist.group.WORLD
    assert world is not None
    ranks = tuple(mesh.mesh.flatten().tolist())
    if len(ranks) == world.size() and torch.device("cpu") in world._device_types:
        return world
    known = _groups.setdefault(world, {})
    if ranks not in known:
        name = f"muown_train/{world.group_name}/{','.join(map(str, ranks))}/"
        c10d: Any = dist.distributed_c10d
        store = c10d.PrefixStore(name, c10d._get_default_store())
        known[ranks] = dist.ProcessGroupGloo(store, ranks.index(world.rank()), len(ranks), c10d.default_pg_timeout)
    return known[ranks]
