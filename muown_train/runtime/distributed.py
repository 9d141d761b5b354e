"""The ranks of a run: this process's rank and device, and sums and exchanges over all ranks.

A run with several ranks is started by torchrun, or by anything that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. It uses NCCL where there are GPUs and gloo elsewhere. Without these variables the world has one rank, and
no process group is made.
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

from muown_train.runtime.heartbeat import LOST_AFTER, HeartbeatMonitor, connect_heartbeat, explain_lost_rank

START_TIMEOUT = timedelta(minutes=10)  # the time for all ranks to start
# the time limit of a collective; a rank that is alive may be this late, for example while it waits for data
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This process's rank among `size` ranks, and its device."""

    rank: int
    size: int
    device: torch.device
    heartbeat: HeartbeatMonitor | None = field(default=None, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def record_step(self, step: int) -> None:
        """Note the step that is done, for the message if a rank is lost."""
        if self.heartbeat:
            self.heartbeat.step = step

    def run_on_main(self, action: Callable[[], Any]) -> Any:
        """Run an action on the main rank and return its result on every rank; an error is raised on every rank too."""
        result: tuple[Any, Exception | None] = (None, None)
        if self.is_main:
            try:
                result = action(), None
            except Exception as raised:  # the other ranks get it, so that none waits for a rank that failed
                result = None, raised
        value, error = self.gather(result)[0]
        if error:
            raise error
        return value

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values`, on any device, over all ranks in place, and return them."""
        if self.size > 1:
            on_device = values.to(self.device)
            dist.all_reduce(on_device)
            values.copy_(on_device)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the small objects of all ranks, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


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
    replica = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, **options)
    if in_bfloat16:
        # the hook is wrapped since DDP refuses the original, by its name, without NCCL, though gloo has bfloat16
        replica.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return replica


def _init_process_group(rank: int, size: int, backend: str) -> None:
    """Make the process group, whose ranks may take START_TIMEOUT to start."""
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=START_TIMEOUT))
    except dist.DistError as error:
        raise ConnectionError(f"the {size} ranks did not meet: {str(error).splitlines()[0]}") from error
    store.set_timeout(COLLECTIVE_TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)


@contextmanager
def join_world(lost_after: float = LOST_AFTER) -> Iterator[World]:
    """Join the ranks that the environment describes, and yield the world; the process group ends with the context.

    When one of several ranks is lost, the others end with the reason (see `heartbeat`).

    Args:
        lost_after: seconds of silence after which a rank is lost.

    Raises:
        ValueError: there is no GPU for this rank.
        ConnectionError: a collective failed because the process of another rank, not known which, has gone.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(f"LOCAL_RANK={local} has no GPU: this machine shows {gpus}, so start at most {gpus} ranks")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    world = World(rank, size, device)
    if size == 1:
        yield world
        return
    _init_process_group(rank, size, "nccl" if device.type == "cuda" else "gloo")
    try:
        with connect_heartbeat(rank, world.gather, lost_after) or nullcontext() as heartbeat:
            yield replace(world, heartbeat=heartbeat)
    except RuntimeError as error:
        if explanation := explain_lost_rank(error):
            raise ConnectionError(explanation) from error
        raise
    finally:
        dist.destroy_process_group()
