"""The ranks of a run: this process's rank and device, and sums and exchanges over all ranks.

A run with several ranks is started by torchrun, or by anything that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. It uses NCCL where there are GPUs and gloo elsewhere. Without these variables the world has one rank, and
no process group is made.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from muown_train.runtime.hardware import find_device
from muown_train.runtime.heartbeat.connect import connect_heartbeat
from muown_train.runtime.heartbeat.explain import describe_error, explain_lost_rank
from muown_train.runtime.heartbeat.monitor import LATE_AFTER, LOST_AFTER, HeartbeatMonitor, say
from muown_train.runtime.network import log_nccl, remove_nccl_log, translate_error

START_TIMEOUT = timedelta(minutes=10)  # the time for all ranks to start
STRANGER_AFTER = 60.0  # seconds after which whoever has accepted a connection as rank 0, and says nothing, is not it
# a collective waits this much longer for a late rank than the heartbeat, which says which rank is late
_LATE_MARGIN = timedelta(minutes=2)


@dataclass(frozen=True)
class World:
    """This process's rank among `size` ranks, and its device."""

    rank: int
    size: int
    device: torch.device
    heartbeat: HeartbeatMonitor | None = field(default=None, compare=False, repr=False)
    timeout: timedelta | None = None  # the time limit of a collective; None for that of torch

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def record_step(self, step: int) -> None:
        """Note the step that is done, for the message if a rank is lost."""
        if self.heartbeat:
            self.heartbeat.step = step

    def keep_verdict(self, keep: Callable[[str], None] | None) -> None:
        """Call `keep` with the reason, in another thread, before this process ends because of another rank."""
        if self.heartbeat:
            self.heartbeat.on_verdict = keep

    def explain(self, error: BaseException) -> str:
        """Return the reason of an error in one line: the rank that is lost, late or has failed, or the error itself."""
        lost = self.heartbeat.explain(error) if self.heartbeat else explain_lost_rank(error)
        return lost or describe_error(error)

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

    def broadcast(self, value: Any) -> Any:
        """Return the object of the main rank, which may be large, on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]


def group_ranks_by_node(world: World) -> list[list[int]]:
    """Return the ranks of each node; a collective call.

    A node is a host, and a launcher on it, so that two of torchrun's on one host count as two nodes.
    """
    nodes: dict[Any, list[int]] = {}
    for rank, node in enumerate(world.gather((socket.gethostname(), os.environ.get("GROUP_RANK")))):
        nodes.setdefault(node, []).append(rank)
    return list(nodes.values())


def count_collectives() -> int:
    """Return how many collectives this process has launched, in all groups; any thread may ask."""
    groups: list[Any] = list(distributed_c10d._world.pg_map)  # torch has no public way to know them
    return sum(group._get_sequence_number_for_group() for group in groups)


@contextmanager
def _refuse_strangers(rank: int, within: float) -> Iterator[None]:
    """End this process, within the context, if another program answers at the port where rank 0 should.

    Rank 0 ends at once where its port is taken. The others then wait for a stranger's words, in torch without a limit.

    Args:
        within: seconds that rank 0 has to answer a connection that is accepted.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    has_met, has_answered = threading.Event(), threading.Event()

    def ask() -> None:
        with suppress(dist.DistError):
            store: Any = dist.TCPStore  # type: ignore[attr-defined]
            store(host, port, is_master=False, timeout=timedelta(seconds=within), wait_for_workers=False)
            has_answered.set()

    def watch() -> None:
        while not has_met.wait(within):
            try:
                socket.create_connection((host, port), timeout=within).close()
            except OSError:  # rank 0 has not come yet
                continue
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(within)
            if not (has_answered.is_set() or has_met.is_set()):
                say(f"[rank {rank}] error: what answers at {host}:{port} is not rank 0: give another MASTER_PORT")
                os._exit(1)

    if rank > 0:
        threading.Thread(target=watch, name="refuses strangers", daemon=True).start()
    try:
        yield
    finally:
        has_met.set()


def _init_process_group(rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
    """Make the process group, whose ranks may take START_TIMEOUT to start."""
    on_gpu = device.type == "cuda"
    try:
        with _refuse_strangers(rank, STRANGER_AFTER):
            store, _, _ = next(rendezvous("env://", rank, size, timeout=START_TIMEOUT))
    except dist.DistError as error:
        raise ConnectionError(f"the {size} ranks did not meet: {str(error).splitlines()[0]}") from error
    store.set_timeout(timeout)
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if on_gpu else None,  # NCCL connects now, not within the first collective, nor guesses
        )
    except RuntimeError as error:
        if unreachable := translate_error(error):
            raise unreachable from error
        raise


@contextmanager
def join_world(
    lost_after: float = LOST_AFTER, late_after: float = LATE_AFTER, device_name: str = "auto"
) -> Iterator[World]:
    """Join the ranks that the environment describes, and yield the world; the process group ends with the context.

    When one of several ranks is lost, fails or hangs, the others end with the reason (see `heartbeat.monitor`).

    Args:
        lost_after: seconds of silence after which a rank is lost.
        late_after: seconds that the others wait for a rank that is alive.
        device_name: auto, cpu or cuda, see `find_device`.

    Raises:
        ValueError: there is no GPU for this rank, or torch cannot use it.
        ConnectionError: torch reaches no GPU, ranks do not reach one another, or a collective failed because the
            process of another rank, not known which, has gone.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = find_device(device_name, "device=", int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if size > 1 and rank == 0:
            log_nccl()
    timeout = timedelta(seconds=late_after) + _LATE_MARGIN
    world = World(rank, size, device, timeout=timeout)
    if size == 1:
        yield world
        return
    _init_process_group(rank, size, device, timeout)
    limits = lost_after, late_after
    try:
        with connect_heartbeat(rank, world.gather, *limits, count_collectives) or nullcontext() as heartbeat:
            yield replace(world, heartbeat=heartbeat)
    except RuntimeError as error:
        if unreachable := translate_error(error):
            raise unreachable from error
        if explanation := explain_lost_rank(error):
            raise ConnectionError(explanation) from error
        raise
    finally:
        dist.destroy_process_group()
        remove_nccl_log()
