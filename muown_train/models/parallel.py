"""How the ranks of a run train one model: each holds a copy of it (DDP), or they hold the rows of one copy (FSDP2).

    ddp   each rank holds all weights, and gradients are averaged over ranks.
    fsdp  each rank holds a part of the rows of every parameter, of its gradient and of its optimizer state. A block's
          weights are gathered when it runs, and its gradients are averaged into the ranks' rows.
    hsdp  the ranks of a node hold one copy in this way, and each node has its copy.

With bfloat16 autocast a block's weights are gathered in bfloat16, as its products take them. So only what is no factor
of a product is rounded besides what autocast rounds: the gains of norms inside blocks. What lies outside of blocks
(embedding, head, final norm) is gathered in its own dtype. Gradients are added up over ranks in float32, or in bfloat16
where `in_bfloat16` says so; then FSDP2 adds up a rank's micro-batches in bfloat16 too, which DDP does in float32.

Between training steps, and after each forward pass without gradients, every parameter of the model is the DTensor that
holds this rank's rows. With several micro-batches the sum of their gradients is whole on each rank until the last one.
"""

import inspect
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from muown_train.models.language_model import LanguageModel
from muown_train.optim.row_shards.placement import get_local
from muown_train.runtime.distributed import World, group_ranks_by_node

BUCKET_MB = 128  # gradients that DDP reduces together: few messages, and some that travel during the backward pass


class ReplicatedModel:
    """A model that each rank holds whole; DistributedDataParallel averages the gradients of several ranks.

    Attributes:
        module: what a forward pass in training calls.
        parameters: what is trained.
        copies: the ranks that hold one copy together, for each copy.
        keeps_gradients: whether gradients must be zeroed after a step, and never set to None.
        is_sharded: whether forward passes are collective calls, since no rank holds all weights.
    """

    is_sharded = False

    def __init__(self, model: nn.Module, world: World, in_bfloat16: bool = False) -> None:
        self.module: Any = model if world.size == 1 else wrap_in_ddp(model, world.device, in_bfloat16)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.copies = [[rank] for rank in range(world.size)]
        self.keeps_gradients = self.module is not model

    def reduce_gradients(self, now: bool) -> AbstractContextManager[None]:
        """Return a context whose backward pass averages gradients over ranks, or only adds them up on this one."""
        if isinstance(self.module, DistributedDataParallel) and not now:
            return self.module.no_sync()
        return nullcontext()

    def clip_gradients(self, largest: float | None) -> Tensor:
        """Scale the gradients down to a norm of at most `largest`, if given; return their norm before, () float32.

        The norm is the same on every rank, bit for bit.
        """
        return clip_grad_norm_(self.parameters, largest or math.inf)

    def describe(self) -> dict[str, Any]:
        """Return an entry of the run's manifest."""
        return {"kind": "ddp"}


class ShardedModel(ReplicatedModel):
    """A model whose parameters are DTensors of this rank's rows; see the module's docstring.

    Make it after the blocks are compiled and before the optimizer, which is to hold the DTensors. A collective call.

    Args:
        model: with the same weights on every rank, on world.device.
        copies: see `find_copies`.
        autocast: whether forward passes run in bfloat16.
        in_bfloat16: whether ranks exchange gradients in bfloat16.
    """

    is_sharded = True

    def __init__(
        self, model: LanguageModel, world: World, copies: list[list[int]], autocast: bool, in_bfloat16: bool = False
    ) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # this takes a second to import

        self.world, self.copies, self.keeps_gradients = world, copies, False
        mesh = _make_mesh(world, copies)
        reduced = torch.bfloat16 if in_bfloat16 else torch.float32
        own = MixedPrecisionPolicy(reduce_dtype=reduced, cast_forward_inputs=False)
        of_blocks = MixedPrecisionPolicy(torch.bfloat16, reduced, cast_forward_inputs=False) if autocast else own
        for block in model.list_blocks():
            if block is not model:
                fully_shard(block, mesh=mesh, mp_policy=of_blocks)
        for layer in _list_layers_of_other_dtype(model):  # what is gathered together must have one dtype
            fully_shard(layer, mesh=mesh, mp_policy=own)
        self.module = fully_shard(model, mesh=mesh, mp_policy=own)
        model.register_forward_hook(_reshard)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.rounds = ["the gains of norms inside blocks"] if autocast else []
        if in_bfloat16:
            self.rounds.append("the sums over micro-batches")

    def reduce_gradients(self, now: bool) -> AbstractContextManager[None]:
        self.module.set_requires_gradient_sync(now)
        return nullcontext()

    def clip_gradients(self, largest: float | None) -> Tensor:
        own = get_total_norm([get_local(p.grad) for p in self.parameters if p.grad is not None])
        # One sum over all ranks, also where each node has all rows: so no two nodes round the norm differently.
        squared = self.world.sum(own.double().square()) / len(self.copies)
        norm = squared.sqrt().float()
        clip_grads_with_norm_(self.parameters, largest or math.inf, norm)
        return norm

    def describe(self) -> dict[str, Any]:
        kind, copies = "fsdp" if len(self.copies) == 1 else "hsdp", len(self.copies)
        return {"kind": kind, "copies": copies, "parts": len(self.copies[0]), "rounds": self.rounds}


def find_copies(parallel: str, world: World) -> list[list[int]] | None:
    """Return the ranks that share one copy of the model, for each copy; None where each rank has its own.

    A collective call.

    Args:
        parallel: ddp, fsdp or hsdp.

    Raises:
        ValueError: on every rank, where the nodes of hsdp have different numbers of ranks.
    """
    if parallel == "ddp" or world.size == 1:
        return None
    if parallel == "fsdp":
        return [list(range(world.size))]
    nodes = group_ranks_by_node(world)
    sizes = [len(ranks) for ranks in nodes]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"parallel=hsdp needs as many ranks on each node, and the {len(nodes)} nodes have "
            f"{', '.join(map(str, sizes))}: start as many on each, or give parallel=fsdp"
        )
    return nodes


def _make_mesh(world: World, copies: list[list[int]]) -> Any:
    """Return a mesh of torch whose last axis runs over the ranks of a copy, and whose first over copies if several."""
    from torch.distributed.device_mesh import DeviceMesh

    kind = world.device.type
    if len(copies) == 1:
        return DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), kind, mesh_dim_names=("shard",))
    groups = [
        dist.new_subgroups_by_enumeration(ranks, timeout=world.timeout)[0]  # type: ignore[no-untyped-call]
        for ranks in ([list(peers) for peers in zip(*copies, strict=True)], copies)
    ]
    return DeviceMesh.from_group(groups, kind, mesh=torch.tensor(copies), mesh_dim_names=("replicate", "shard"))


def _list_layers_of_other_dtype(model: LanguageModel) -> Iterable[nn.Module]:
    """Return the layers outside of blocks that have parameters of their own in another dtype than float32."""
    inside = {module for block in model.list_blocks() if block is not model for module in block.modules()}
    return [
        module
        for module in model.modules()
        if module not in inside and any(p.dtype != torch.float32 for p in module.parameters(recurse=False))
    ]


def _reshard(model: Any, inputs: object, output: object) -> None:
    """Let the rows that were gathered go after a forward pass that no backward pass follows, which would do it."""
    if not torch.is_grad_enabled():
        model.reshard()


def wrap_in_ddp(model: nn.Module, device: torch.device, in_bfloat16: bool = False) -> nn.Module:
    """Return the model in DistributedDataParallel; its buffers are constants, so DDP does not synchronise them.

    From here on gradients are views of DDP's buckets. To stay so they must be zeroed, and never set to None.

    Args:
        in_bfloat16: round gradients to bfloat16 for the mean over ranks, which halves the bytes to send. The sum over
            a rank's micro-batches before, and the mean after, have the gradients' own dtype.
    """
    names = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"  # until torch 2.12
    devices = [device] if device.type == "cuda" else None
    options: dict[str, Any] = {buffers: False}
    for p in model.parameters():
        if p.requires_grad:  # DDP moves these gradients into its buckets; gradients made later would exist twice
            p.grad = torch.zeros_like(p)
    # torch would split compiled code at DDP's buckets, and counts a parameter in a flat buffer as the whole buffer
    torch._dynamo.config.optimize_ddp = False
    replica = DistributedDataParallel(
        model, device_ids=devices, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True, **options
    )
    if in_bfloat16:
        # the hook is wrapped since DDP refuses the original, by its name, without NCCL, though gloo has bfloat16
        replica.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return replica
