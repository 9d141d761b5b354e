"""One process among many: who it is, on which device, and sums over all of them.

Started by torchrun (or anything that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT): NCCL where there
are GPUs, gloo elsewhere. Without these variables it is a world of one, and nothing is initialised.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from muown_train.runtime.heartbeat import LOST_AFTER, Liveness, explained_loss, watch

MEETING = timedelta(minutes=10)  # for all ranks to start


@dataclass(frozen=True)
class World:
    """This process's place: rank of size, and its device."""

    rank: int
    size: int
    device: torch.device
    liveness: Liveness | None = field(default=None, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def record_step(self, update: int) -> None:
        """Note how many updates are done, for the message if a rank is lost."""
        if self.liveness:
            self.liveness.update = update

    def run_on_main(self, action: Callable[[], Any]) -> Any:
        """The result of an action of the main rank, on every rank; what it raises as well."""
        result: tuple[Any, Exception | None] = (None, None)
        if self.is_main:
            try:
                result = action(), None
            except Exception as raised:  # no rank waits for one that failed
                result = None, raised
        value, error = self.gather(result)[0]
        if error:
            raise error
        return value

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place; values on any device."""
        if self.size > 1:
            moved = values.to(self.device)
            dist.all_reduce(moved)
            values.copy_(moved)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The small object of every rank, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def wrap_in_ddp(model: nn.Module, device: torch.device, in_bfloat16: bool = False) -> nn.Module:
    """The model under DDP; its buffers are constants and need no synchronisation.

    Gradients are parts of DDP's buckets from here on: to stay so they are to be zeroed, and never set to None.

    Args:
        in_bfloat16: gradients are rounded to bfloat16 for the mean over ranks, half the bytes to send. What a rank
            adds up before, over its micro-batches, and what it gets back stay in the gradients' own dtype.
    """
    names = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"  # since, before 2.13
    devices = [device] if device.type == "cuda" else None
    options: dict[str, Any] = {buffers: False}
    for p in model.parameters():
        if p.requires_grad:  # DDP takes these gradients into its buckets; made later they would exist twice
            p.grad = torch.zeros_like(p)
    replica = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, **options)
    if in_bfloat16:
        # by the hook's own name DDP refuses it without NCCL, though gloo has bfloat16
        replica.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return replica


def _meet(rank: int, size: int, backend: str, timeout: timedelta) -> None:
    """Make the process group; a rank that never comes is not waited for as long as one that is late later."""
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=MEETING))
    except dist.DistError as error:
        raise ConnectionError(f"the {size} ranks did not meet: {str(error).splitlines()[0]}") from error
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


@contextmanager
def join_world(timeout: timedelta = timedelta(minutes=30), lost_after: float = LOST_AFTER) -> Iterator[World]:
    """The world that the environment describes; the process group lives as long as the context.

    With several ranks, one that is lost ends the others with the reason (see `liveness`).

    Args:
        timeout: of a collective. A rank that is alive may be this late, waiting for its data for example.
        lost_after: seconds of silence after which a rank is lost.

    Raises:
        ConnectionError: a collective failed because another rank's process went, and it is not known which.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    here = World(rank, size, device)
    if size == 1:
        yield here
        return
    _meet(rank, size, "nccl" if device.type == "cuda" else "gloo", timeout)
    try:
        with watch(rank, here.gather, lost_after) or nullcontext() as watching:
            yield replace(here, liveness=watching)
    except RuntimeError as error:
        if explanation := explained_loss(error):
            raise ConnectionError(explanation) from error
        raise
    finally:
        dist.destroy_process_group()
