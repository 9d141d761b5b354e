"""Spread an optimizer's work over ranks: each updates the parameters that it owns and receives the others.

`shard(optimizer)` changes no update rule and has no step of its own. Around the optimizer's step, in hooks, the
gradients of parameters that others own are put aside, so that they are skipped and never get state; then every owner's
parameters are sent to all. It serves every optimizer that moves each parameter by its own gradient alone.

Every owner's parameters lie in one flat buffer for each part of a `Combined`, dtype and device; `p.data` is a view into
it. So a step sends one message per owner and part, in place, without copies, and the matrices travel while the part
after them still works. Gradients must be the same on all ranks, as DistributedDataParallel leaves them.

Results are those of the unsharded optimizer. Bit for bit where a parameter's update does not depend on what it is
computed together with: elementwise optimizers, exact SVD, an orthogonalizer that takes matrices one by one, SOAP,
torch.optim.Muon. To rounding where matrices are multiplied in batches, since a rank's batches are smaller: on CPUs
batched Newton-Schulz was bit-equal too for all shapes tried on one thread, on two threads 1e-15 away for one of them.

Only W travels. Run with gloo on CPUs. The same calls are meant for NCCL, whose `wait` holds up the device's stream and
not the host; neither NCCL nor a GPU has been tried.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .combined import Combined

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
Group = dict[str, Any]

# An estimate: elementwise work moves about 7 times a parameter's bytes (of W, the gradient and two moments), and in the
# time of one byte a device does some 100 FLOP of bfloat16 products, fewer on CPUs, more on GPUs.
FLOPS_PER_BYTE = 700
ALIGNMENT = 128  # bytes between the starts of parameters, what vector units and GPU caches like


class Assignment(NamedTuple):
    """Who updates what: the owner of each parameter, a rank in the group, and the load of each rank in FLOP."""

    owners: dict[Tensor, int]
    loads: tuple[int, ...]

    @property
    def balance(self) -> float:
        """Largest over mean load; 1 is best."""
        return max(self.loads) * len(self.loads) / max(sum(self.loads), 1)


def shard(optimizer: OptimizerT, process_group: dist.ProcessGroup | None = None) -> OptimizerT:
    """Spread the optimizer's work over the ranks of a group; a collective call, and so is each step after it.

    Call it before torch.compile, DistributedDataParallel and CUDA graphs see the model: `p.data` of every parameter
    becomes a view into a flat buffer, and all ranks start from rank 0's values. Step pre-hooks of your own that look at
    gradients are to be registered before this call, post-hooks that look at parameters after it.

    `state` and `state_dict()` hold what this rank owns and need no communication; the union of all ranks' `state` is
    the whole. `load_state_dict` takes the union, of any number of ranks, and picks what this rank owns.

    Args:
        optimizer: any torch optimizer or `Combined` but LBFGS, with the same parameters on all ranks.
        process_group: the default group if None.

    Returns:
        The optimizer that was given.

    Raises:
        ValueError: no process group, an optimizer that is sharded already, that cannot be, or that differs between
            ranks, parameters that share memory. Later, from `step`: a parameter whose memory was replaced; from
            `add_param_group`, copies and pickling: always.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("shard needs a process group: call torch.distributed.init_process_group first")
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ValueError("this process is not in the process_group given to shard")
    parts = list(_parts(optimizer))
    _check(optimizer, parts)
    owners = assign(optimizer, size).owners
    _check_alike(parts, owners, process_group)
    sharding = _Sharding(parts, owners, rank, process_group)
    for part in parts:
        for p in _parameters(part):
            if owners[p] != rank:
                part.state.pop(p, None)
        part.register_step_pre_hook(sharding.before_part)
        part.register_step_post_hook(sharding.after_part)
        part.register_load_state_dict_pre_hook(sharding.only_owned)
    if isinstance(optimizer, Combined):
        optimizer.register_step_pre_hook(sharding.before_all)
        optimizer.register_step_post_hook(sharding.after_all)
    for each in {optimizer, *parts}:
        vars(each).update(
            _sharding=sharding,
            add_param_group=_refuse("a sharded optimizer takes no further parameters: add them before shard()"),
            __reduce_ex__=_refuse("a sharded optimizer cannot be copied or pickled: use its state_dict()"),
        )
    return optimizer


def assign(optimizer: Optimizer, size: int) -> Assignment:
    """The assignment that `shard` makes for this number of ranks; needs no process group, nor data (meta device).

    Args:
        size: number of ranks, at least 1.
    """
    costs = {p: update_cost(p, group) for _, p, group in _named(optimizer)}
    owner_of = balanced(list(costs.values()), size)
    loads = [0] * size
    for owner, cost in zip(owner_of, costs.values(), strict=True):
        loads[owner] += cost
    return Assignment(dict(zip(costs, owner_of, strict=True)), tuple(loads))


def update_cost(p: Tensor, group: Group) -> int:
    """What an update of p costs, in FLOP: products of matrices, by the group's options, and a price for its bytes."""
    cost: int = FLOPS_PER_BYTE * p.numel() * p.element_size()
    if p.ndim != 2:
        return cost
    blocks = [(rows, p.shape[1]) for rows in group.get("blocks") or (p.shape[0],)]
    if "ns_steps" in group:  # orthogonalises: of our own and torch.optim.Muon
        cost += group["ns_steps"] * sum(4 * min(b) ** 2 * max(b) + 2 * min(b) ** 3 for b in blocks)
    if "precondition_frequency" in group:  # SOAP
        sides = [(k, other) for m, n in blocks for k, other in ((m, n), (n, m)) if k <= group["max_precondition_dim"]]
        # into and out of the basis and the average of G G^T; at times k^3 for a product and a QR decomposition
        cost += sum(6 * k**2 * other + 8 * k**3 // group["precondition_frequency"] for k, other in sides)
    return cost


def balanced(costs: Sequence[int], size: int) -> list[int]:
    """An owner in range(size) for each cost: the largest first, always to the least loaded (Graham 1969)."""
    owners = [0] * len(costs)
    loads = [(0, rank) for rank in range(size)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        owners[i] = rank
        heapq.heapreplace(loads, (load + costs[i], rank))
    return owners


class _Region(NamedTuple):
    """The parameters that one rank owns, in one buffer (N,)."""

    flat: Tensor
    owner: int


class _Sharding:
    """The hooks of a sharded optimizer and what they share."""

    def __init__(
        self, parts: list[Optimizer], owners: dict[Tensor, int], rank: int, process_group: dist.ProcessGroup | None
    ) -> None:
        self.owners, self.rank, self.process_group = owners, rank, process_group
        self.regions = {part: _make_regions(part, owners) for part in parts}
        self.places = {p: p.data_ptr() for p in owners}
        self.aside: list[tuple[Tensor, Tensor | None]] = []
        self.sent: list[dist.Work] = []
        self.waits_for_all = False  # inside the step of a Combined
        for region in chain.from_iterable(self.regions.values()):
            dist.broadcast(region.flat, group=process_group, group_src=0)

    def before_all(self, combined: Optimizer, args: Any, kwargs: Any) -> None:
        """A Combined's step begins: its parts send, and it waits for all at its end."""
        self.waits_for_all = True

    def before_part(self, part: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Leave the optimizer the gradients of what this rank owns, after its closure if it has one."""
        for name, p, _ in _named(part):
            if p.data_ptr() != self.places[p]:
                raise ValueError(
                    f"parameter {name} is no longer where shard() put it, so that others would not receive it: "
                    "move or convert the model before shard(), and load weights by copying into them"
                )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.put_aside(part)
            return None

        def evaluate() -> Any:
            loss = closure()
            self.put_aside(part)
            return loss

        return (args[0], evaluate, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}

    def put_aside(self, part: Optimizer) -> None:
        """Hide the gradients of parameters that others own."""
        self.aside = [(p, p.grad) for p in _parameters(part) if self.owners[p] != self.rank]
        for p, _ in self.aside:
            p.grad = None

    def after_part(self, part: Optimizer, args: Any, kwargs: Any) -> None:
        """Put gradients back and send what was updated."""
        for p, grad in self.aside:
            p.grad = grad
        self.aside = []
        self.sent += [
            dist.broadcast(region.flat, group=self.process_group, group_src=region.owner, async_op=True)
            for region in self.regions[part]
        ]
        if not self.waits_for_all:
            self.wait()

    def after_all(self, combined: Optimizer, args: Any, kwargs: Any) -> None:
        """A Combined's step ends."""
        self.waits_for_all = False
        self.wait()

    def wait(self) -> None:
        """Until everything has arrived; over NCCL the device's stream waits, not the host."""
        for work in self.sent:
            work.wait()
        self.sent = []

    def only_owned(self, part: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state dict without the state of what others own."""
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        # where groups do not fit this one the optimizer says so, after this
        others = {i for i, p in zip(ids, _parameters(part), strict=False) if self.owners[p] != self.rank}
        return state_dict | {"state": {i: state for i, state in state_dict["state"].items() if i not in others}}


@torch.no_grad()
def _make_regions(part: Optimizer, owners: dict[Tensor, int]) -> list[_Region]:
    """Move the part's parameters into flat buffers, in an order that is the same on all ranks."""
    members: defaultdict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for p in _parameters(part):
        members[owners[p], p.dtype, p.device].append(p)
    regions = []
    for (owner, dtype, device), parameters in members.items():
        step = ALIGNMENT // dtype.itemsize
        starts = [0]
        for p in parameters:
            starts.append(starts[-1] + -(-p.numel() // step) * step)
        flat = torch.zeros(starts.pop(), dtype=dtype, device=device)
        for p, start in zip(parameters, starts, strict=True):
            strides = torch.empty_like(p, device="meta").stride()  # p's own if it is dense
            view = flat.as_strided(p.shape, strides, start)
            p.data = view.copy_(p)
        regions.append(_Region(flat, owner))
    return regions


def _check(optimizer: Optimizer, parts: list[Optimizer]) -> None:
    """Raise ValueError if this optimizer cannot be sharded."""
    if any("_sharding" in vars(each) for each in (optimizer, *parts)):
        raise ValueError("the optimizer is sharded already: shard() is called once")
    for part in parts:
        if isinstance(part, torch.optim.LBFGS):
            raise ValueError("LBFGS moves all parameters together and cannot be sharded; other optimizers can")
    spans = []
    for name, p, _ in chain.from_iterable(map(_named, parts)):
        if type(p.detach()) is not Tensor:
            raise ValueError(f"parameter {name} must be a plain tensor, got {type(p.detach()).__name__}")
        if p.numel():
            spans.append((str(p.device), p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name))
    for (device, _, end, name), (other_device, start, _, other) in pairwise(sorted(spans)):
        if device == other_device and start < end:
            raise ValueError(f"parameters {name} and {other} share memory: make them one parameter, used twice")


def _check_alike(parts: list[Optimizer], owners: dict[Tensor, int], process_group: dist.ProcessGroup | None) -> None:
    """Raise ValueError, on every rank, unless all have the same parameters and the same assignment."""
    described = [
        [(tuple(p.shape), p.dtype, p.device.type, owners[p]) for p in group["params"]] + sorted(_options(group))
        for part in parts
        for group in part.param_groups
    ]
    digests: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(digests, hashlib.sha256(repr(described).encode()).hexdigest(), group=process_group)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ValueError(f"rank {rank} has other parameters or options in its optimizer than rank 0")


def _options(group: Group) -> Iterator[tuple[str, str]]:
    """Options of a group as text that is the same on all ranks; of functions, which have addresses, the name."""
    for key, value in group.items():
        if key != "params":
            yield key, getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


def _parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizers that have a step of their own."""
    if isinstance(optimizer, Combined):
        for part in optimizer.optimizers:
            yield from _parts(part)
    else:
        yield optimizer


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _named(optimizer: Optimizer) -> Iterator[tuple[str, Tensor, Group]]:
    """(how messages call it, parameter, its group), in order."""
    for j, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            names = group.get("param_names")
            yield repr(names[i]) if names else f"{i} of group {j}, of shape {tuple(p.shape)},", p, group


def _refuse(message: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(message)

    return refuse
