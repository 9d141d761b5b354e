"""Where the rows of a DTensor lie: FSDP2 and HSDP cut parameters along their first dimension, as torch.chunk does.

A plain tensor counts as one that has all its rows on this rank. Nothing here communicates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Size, Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class RowShard(NamedTuple):
    """The rows of a DTensor, in terms of its first dimension, on the ranks of one axis of its mesh."""

    mesh: DeviceMesh
    axis: int | None  # of the mesh; None if every rank has all rows
    rank: int  # this rank's place along the axis
    bounds: tuple[tuple[int, int], ...]  # first row of each rank, and the one after its last

    @property
    def own(self) -> tuple[int, int]:
        """This rank's first row and the one after its last."""
        return self.bounds[self.rank]


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor. This does not import torch.distributed.tensor, which takes a second."""
    return hasattr(tensor, "device_mesh")


def get_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing memory with it; return a plain tensor as it is."""
    return cast("DTensor", tensor).to_local() if is_dtensor(tensor) else tensor


def release_gathered(model: nn.Module) -> None:
    """Let FSDP2's modules have their DTensors again: after a forward pass alone some keep whole parameters."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()


def check_placements(name: str, tensor: Tensor) -> None:
    """Raise ValueError naming the tensor, on every rank, unless at most one axis of its mesh shards it, by rows."""
    if not is_dtensor(tensor):
        return
    placements = tuple(cast("DTensor", tensor).placements)
    shown = f"got placements {placements} on a mesh of shape {tuple(cast('DTensor', tensor).device_mesh.shape)}"
    for placement in placements:
        # _StridedShard, of rows that tensor parallelism has sharded before FSDP, is no Shard
        if not (placement.is_replicate() or (type(placement).__name__ == "Shard" and cast(Any, placement).dim == 0)):
            raise ValueError(
                f"{name}: a DTensor must be sharded by rows, as FSDP2 does without tensor parallelism, {shown}"
            )
    if len(_list_sharded_axes(tensor)) > 1:
        raise ValueError(f"{name}: the rows of a DTensor must be sharded over one axis of its mesh, {shown}")


def find_row_shard(tensor: Tensor) -> RowShard | None:
    """Return where the rows of a DTensor lie, None for a plain tensor.

    Args:
        tensor: a tensor that `check_placements` accepts.
    """
    if not is_dtensor(tensor):
        return None
    mesh, rows = cast("DTensor", tensor).device_mesh, tensor.shape[0]
    axes = _list_sharded_axes(tensor)
    if not axes:
        return RowShard(mesh, None, 0, ((0, rows),))
    size, chunk = mesh.size(axes[0]), -(-rows // mesh.size(axes[0]))
    bounds = tuple((min(r * chunk, rows), min((r + 1) * chunk, rows)) for r in range(size))
    return RowShard(mesh, axes[0], mesh.get_local_rank(axes[0]), bounds)


def create_meta_whole(tensor: Tensor) -> Tensor:
    """Return a plain tensor on the meta device with the shape, strides and dtype of a tensor."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def wrap_local(local: Tensor, like: Tensor, shape: Size) -> Tensor:
    """Return a DTensor of a shape, with the mesh and placements of `like`, whose part on this rank is `local`.

    Args:
        shape: of the whole; its first dimension is that of `like`.
    """
    from torch.distributed.tensor import DTensor

    strides = local.new_empty(shape, device="meta").stride()
    given = cast("DTensor", like)
    return DTensor.from_local(local, given.device_mesh, given.placements, run_check=False, shape=shape, stride=strides)


def get_local_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a tensor as it would have it with the mesh and placements of `like`.

    A tensor with other placements, such as a gradient that has not been summed, is brought to them: a collective call.

    Args:
        tensor: of the shape of `like`; plain, which is the whole, or a DTensor.
    """
    if not is_dtensor(like):
        return cast("DTensor", tensor).full_tensor() if is_dtensor(tensor) else tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = cast("DTensor", like).device_mesh, cast("DTensor", like).placements
    if not isinstance(tensor, DTensor):
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None).to_local()
    if tensor.device_mesh != mesh:
        return get_local_like(tensor.full_tensor(), like)
    return tensor.redistribute(placements=placements).to_local()


def take_own_rows(whole: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a plain tensor that this rank has of `like`, a tensor of as many rows, as a view."""
    shard = find_row_shard(like)
    return whole if shard is None else whole[slice(*shard.own)]


def _list_sharded_axes(tensor: Tensor) -> list[int]:
    """Return the axes of a DTensor's mesh that shard it; an axis of one rank shards nothing."""
    given = cast("DTensor", tensor)
    return [i for i, p in enumerate(given.placements) if not p.is_replicate() and given.device_mesh.size(i) > 1]
