"""Sharding of an optimizer's work over ranks: each rank moves the parameters that it owns and receives the others.

`shard(optimizer)` changes no algorithm and has no step of its own. Hooks around the optimizer's step hide the gradients
of parameters that other ranks own, so that the optimizer passes them over and never creates state for them; then every
owner broadcasts its parameters. This works for every optimizer that moves each parameter by its own gradient alone.

The parameters of one owner lie in one flat buffer for each part of a `Combined`, dtype and device; `p.data` is a view
into it. A step therefore sends one message per owner and part, in place, without copies, and the matrices travel while
the next part still works. Gradients must be the same on all ranks, as DistributedDataParallel leaves them.

Results are those of the unsharded optimizer. They are equal bit for bit where a parameter's step does not depend on
what it is computed together with: elementwise optimizers, exact SVD, an orthogonalizer that takes matrices one by one,
SOAP, torch.optim.Muon. They are equal to rounding where matrices are multiplied in batches, since a rank's batches are
smaller: on CPUs batched Newton-Schulz was bit-equal too for all shapes tried on one thread, and on two threads 1e-15
away for one of them.

Only W travels. This has been run with gloo, on CPUs and with two ranks on one GPU. The same calls are meant for NCCL,
whose `wait` blocks the device's stream and not the host; NCCL has not been tried.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .combined import Combined
from .core.base import Group
from .core.layouts import LAYOUT_DEFAULTS, split_matrices
from .core.loading import SHARE, match_by_name
from .core.names import describe_parameter, list_options
from .core.orthogonalize import count_flops
from .row_shards.balance import balance_costs
from .row_shards.placement import is_dtensor
from .soap import count_flops as count_soap_flops

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

# An estimate: elementwise work moves about 7 times a parameter's bytes (W, the gradient and two moments), and in the
# time of one byte a device does some 100 FLOP of bfloat16 products, fewer on CPUs, more on GPUs.
FLOPS_PER_BYTE = 700
ALIGNMENT = 128  # the starts of parameters are multiples of this many bytes, for vector units and GPU caches


class Assignment(NamedTuple):
    """The owner of each parameter, as a rank in the process group, and the load of each rank in FLOP."""

    owners: dict[Tensor, int]
    loads: tuple[int, ...]

    @property
    def balance(self) -> float:
        """The largest load divided by the mean load; 1 is best."""
        return max(self.loads) * len(self.loads) / max(sum(self.loads), 1)


def shard(optimizer: OptimizerT, process_group: dist.ProcessGroup | None = None) -> OptimizerT:
    """Spread the optimizer's work over the ranks of a group; this is a collective call, and so is each step after it.

    Call it before torch.compile, DistributedDataParallel and CUDA graphs see the model: `p.data` of every parameter
    becomes a view into a flat buffer, and all ranks start from rank 0's values. Register your own step pre-hooks that
    look at gradients before this call, and post-hooks that look at parameters after it.

    `state` and `state_dict()` hold this rank's share and need no communication; `gather_state_dict` returns the whole.
    `load_state_dict` takes the whole, of any number of ranks, and picks what this rank owns.

    Args:
        optimizer: any torch optimizer except LBFGS, or a `Combined`, with the same parameters on all ranks.
        process_group: None for the default group.

    Returns:
        The optimizer that was given.

    Raises:
        ValueError: without a process group; for an optimizer that is sharded already, that cannot be sharded, or that
            differs between ranks; for parameters that share memory. Later `step` raises it for a parameter whose memory
            was replaced, `load_state_dict` for a share of another rank, and `add_param_group`, copying and pickling
            always do.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("shard needs a process group: call torch.distributed.init_process_group first")
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ValueError("this process is not in the process_group given to shard")
    parts = list(_iterate_parts(optimizer))
    _check_shardable(optimizer, parts)
    owners = assign_owners(optimizer, size).owners
    _check_equal_on_all_ranks(parts, owners, process_group)
    sharding = _Sharding(parts, owners, rank, process_group)
    for part in parts:
        for p in _iterate_parameters(part):
            if owners[p] != rank:
                part.state.pop(p, None)
        part.register_step_pre_hook(sharding.before_part_step)
        part.register_step_post_hook(sharding.after_part_step)
        part.register_load_state_dict_pre_hook(sharding.select_own_state)
    if isinstance(optimizer, Combined):
        optimizer.register_step_pre_hook(sharding.before_combined_step)
        optimizer.register_step_post_hook(sharding.after_combined_step)
    everything: set[Optimizer] = {optimizer, *parts}
    for each in everything:
        each.register_state_dict_post_hook(sharding.mark_share)
        each.register_load_state_dict_pre_hook(sharding.check_share, prepend=True)
        vars(each).update(
            _sharding=sharding,
            add_param_group=_create_refusal("a sharded optimizer takes no further parameters: add them before shard()"),
            __reduce_ex__=_create_refusal("a sharded optimizer cannot be copied or pickled: use its state_dict()"),
        )
    return optimizer


def gather_state_dict(optimizer: Optimizer, to: int = 0) -> dict[str, Any] | None:
    """Gather the state dict of a sharded optimizer with the state of all ranks; this is a collective call.

    Args:
        optimizer: an optimizer that was given to `shard`.
        to: the rank, in the group given to `shard`, that receives it.

    Returns:
        On that rank the state dict that the optimizer would have without `shard`, on the CPU; None on the others.

    Raises:
        ValueError: if the optimizer is not sharded.
    """
    sharding: _Sharding | None = vars(optimizer).get("_sharding")
    if sharding is None:
        if any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "the parameters are DTensors, which shard() does not shard: torch.distributed.checkpoint's "
                "get_state_dict with StateDictOptions(full_state_dict=True) gathers their state"
            )
        raise ValueError("the optimizer is not sharded: its state_dict() is the whole")
    own = optimizer.state_dict()
    share = {i: {key: _move_to_cpu(value) for key, value in state.items()} for i, state in own["state"].items()}
    shares: list[Any] | None = None
    if sharding.rank == to:
        shares = [None] * dist.get_world_size(sharding.process_group)
    dist.gather_object(share, shares, group=sharding.process_group, group_dst=to)
    if shares is None:
        return None
    del own[SHARE]
    return own | {"state": dict(sorted(chain.from_iterable(each.items() for each in shares)))}


def _move_to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def assign_owners(optimizer: Optimizer, size: int) -> Assignment:
    """Return the assignment that `shard` makes for this number of ranks.

    This needs neither a process group nor data: parameters may be on the meta device.

    Args:
        size: number of ranks, at least 1.
    """
    costs = {p: estimate_step_cost(p, group) for _, p, group in _iterate_named(optimizer)}
    ranks = balance_costs(list(costs.values()), size)
    loads = [0] * size
    for rank, cost in zip(ranks, costs.values(), strict=True):
        loads[rank] += cost
    return Assignment(dict(zip(costs, ranks, strict=True)), tuple(loads))


def estimate_step_cost(p: Tensor, group: Group) -> int:
    """Return the cost of a step of p in FLOP: matrix products, by the group's options, and a price for its bytes."""
    cost: int = FLOPS_PER_BYTE * p.numel() * p.element_size()
    options = LAYOUT_DEFAULTS | group
    if p.ndim != 2 and options["layout"] is None:
        return cost
    blocks = [tuple(matrix.shape) for matrix in split_matrices(p.detach(), options)]
    if "ns_steps" in group:  # an optimizer that orthogonalises: ours and torch.optim.Muon, which has no such option
        on_gram = group.get("orthogonalizer") == "newton_schulz"
        cost += sum(count_flops(m, n, group["ns_steps"], on_gram) for m, n in blocks)
    if "precondition_frequency" in group:
        cost += sum(count_soap_flops(m, n, group) for m, n in blocks)
    return cost


class _FlatBuffer(NamedTuple):
    """The parameters of one owner, dtype and device in one buffer (N,)."""

    flat: Tensor
    owner: int


class _Sharding:
    """The hooks of a sharded optimizer and their common state."""

    def __init__(
        self, parts: list[Optimizer], owners: dict[Tensor, int], rank: int, process_group: dist.ProcessGroup | None
    ) -> None:
        self.owners, self.rank, self.process_group = owners, rank, process_group
        self.buffers = {part: _flatten_parameters(part, owners) for part in parts}
        self.data_ptrs = {p: p.data_ptr() for p in owners}
        self.hidden: list[tuple[Tensor, Tensor | None]] = []
        self.pending: list[dist.Work] = []  # broadcasts on their way
        self.waits_at_end = False  # true during the step of a Combined
        for buffer in chain.from_iterable(self.buffers.values()):
            dist.broadcast(buffer.flat, group=process_group, group_src=0)

    def before_combined_step(self, combined: Optimizer, args: Any, kwargs: Any) -> None:
        """Let the parts of a Combined send without waiting; the Combined waits for all of them at its end."""
        self.waits_at_end = True

    def before_part_step(self, part: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Leave only the gradients of this rank's parameters, after the closure has run if there is one."""
        for name, p, _ in _iterate_named(part):
            if p.data_ptr() != self.data_ptrs[p]:
                raise ValueError(
                    f"{name} is no longer where shard() put it, so that others would not receive it: "
                    "move or convert the model before shard(), and load weights by copying into them"
                )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.hide_foreign_gradients(part)
            return None

        def evaluate() -> Any:
            loss = closure()
            self.hide_foreign_gradients(part)
            return loss

        return (args[0], evaluate, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}

    def hide_foreign_gradients(self, part: Optimizer) -> None:
        """Take away the gradients of parameters that other ranks own."""
        self.hidden = [(p, p.grad) for p in _iterate_parameters(part) if self.owners[p] != self.rank]
        for p, _ in self.hidden:
            p.grad = None

    def after_part_step(self, part: Optimizer, args: Any, kwargs: Any) -> None:
        """Put the gradients back and start sending the parameters."""
        for p, grad in self.hidden:
            p.grad = grad
        self.hidden = []
        self.pending += [
            dist.broadcast(buffer.flat, group=self.process_group, group_src=buffer.owner, async_op=True)
            for buffer in self.buffers[part]
        ]
        if not self.waits_at_end:
            self.wait()

    def after_combined_step(self, combined: Optimizer, args: Any, kwargs: Any) -> None:
        """Wait for the messages that the parts of a Combined have sent."""
        self.waits_at_end = False
        self.wait()

    def wait(self) -> None:
        """Wait until everything has arrived; over NCCL the device's stream waits, not the host."""
        for work in self.pending:
            work.wait()
        self.pending = []

    def select_own_state(self, part: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict without the state of parameters that other ranks own.

        Raises:
            ValueError: if there is state, but for no parameter of this rank.
        """
        state_dict = match_by_name(part.param_groups, state_dict)
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = {i for i, p in zip(ids, _iterate_parameters(part), strict=True) if self.owners[p] == self.rank}
        state = {i: state for i, state in state_dict["state"].items() if i in own}
        if own and state_dict["state"] and not state:
            raise ValueError(
                f"the saved state has none for the parameters that rank {self.rank} owns: save what gather_state_dict "
                "returns, and load that on every rank"
            )
        return state_dict | {"state": state}

    def mark_share(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict that says of which rank, of how many, it is the share."""
        return state_dict | {SHARE: [self.rank, dist.get_world_size(self.process_group)]}

    def check_share(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict without its mark; refuse the share of another rank, or of another number of ranks.

        Raises:
            ValueError: naming the share.
        """
        own = [self.rank, dist.get_world_size(self.process_group)]
        if (share := state_dict.get(SHARE, own)) != own:
            raise ValueError(
                f"the saved state is the share of rank {share[0]} of {share[1]}, and this is rank {own[0]} of {own[1]}"
                ": save what gather_state_dict returns, and load that on every rank"
            )
        return {key: value for key, value in state_dict.items() if key != SHARE}


@torch.no_grad()
def _flatten_parameters(part: Optimizer, owners: dict[Tensor, int]) -> list[_FlatBuffer]:
    """Move the part's parameters into flat buffers, in an order that is the same on all ranks."""
    members: defaultdict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for p in _iterate_parameters(part):
        members[owners[p], p.dtype, p.device].append(p)
    buffers = []
    for (owner, dtype, device), parameters in members.items():
        step = ALIGNMENT // dtype.itemsize
        starts = [0]
        for p in parameters:
            starts.append(starts[-1] + -(-p.numel() // step) * step)
        flat = torch.zeros(starts.pop(), dtype=dtype, device=device)
        for p, start in zip(parameters, starts, strict=True):
            strides = torch.empty_like(p, device="meta").stride()  # p's own strides if it is dense
            view = flat.as_strided(p.shape, strides, start)
            p.data = view.copy_(p)
        buffers.append(_FlatBuffer(flat, owner))
    return buffers


def _check_shardable(optimizer: Optimizer, parts: list[Optimizer]) -> None:
    """Raise ValueError if this optimizer cannot be sharded."""
    if any("_sharding" in vars(each) for each in (optimizer, *parts)):
        raise ValueError("the optimizer is sharded already: shard() is called once")
    for part in parts:
        if isinstance(part, torch.optim.LBFGS):
            raise ValueError("LBFGS moves all parameters together and cannot be sharded; other optimizers can")
    spans = []
    for name, p, _ in chain.from_iterable(map(_iterate_named, parts)):
        if type(p.detach()) is not Tensor:
            hint = ", which is sharded already and needs no shard()" if is_dtensor(p) else ""
            raise ValueError(f"{name} must be a plain tensor, got {type(p.detach()).__name__}{hint}")
        if p.numel():
            spans.append((str(p.device), p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name))
    for (device, _, end, name), (other_device, start, _, other) in pairwise(sorted(spans)):
        if device == other_device and start < end:
            raise ValueError(f"{name} and {other} share memory: make them one parameter, used twice")


def _check_equal_on_all_ranks(
    parts: list[Optimizer], owners: dict[Tensor, int], process_group: dist.ProcessGroup | None
) -> None:
    """Raise ValueError, on every rank, unless all have the same parameters and the same assignment."""
    described = [
        [(tuple(p.shape), p.dtype, p.device.type, owners[p]) for p in group["params"]] + sorted(list_options(group))
        for part in parts
        for group in part.param_groups
    ]
    digests: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(digests, hashlib.sha256(repr(described).encode()).hexdigest(), group=process_group)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ValueError(f"rank {rank} has other parameters or options in its optimizer than rank 0")


def _iterate_parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers that have a step of their own."""
    if isinstance(optimizer, Combined):
        for part in optimizer.optimizers:
            yield from _iterate_parts(part)
    else:
        yield optimizer


def _iterate_parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _iterate_named(optimizer: Optimizer) -> Iterator[tuple[str, Tensor, Group]]:
    """Yield the words for each parameter in messages, the parameter and its group, in order."""
    for j, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            yield describe_parameter(group, i, j), p, group


def _create_refusal(message: str) -> Callable[..., NoReturn]:
    """Return a function that takes any arguments and raises ValueError with the message."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(message)

    return refuse
