"""Estimate the memory of a step without training anything: no tensor here has data.

`trace_pass` runs a model's forward and backward pass, of any architecture, on tensors that have a size and nothing
else (torch's `FakeTensorMode`), and adds up the storages that exist after each operation. On a CPU this agrees with
measured peaks to 2.5 % (tests/analysis/cost/test_memory.py).

GPUs have not been measured, and torch makes fake tensors of a GPU only where there is one. The pass therefore runs on
fake CPU tensors that make three choices of a GPU (`_choose_as_on_a_gpu`): RMSNorm is one operation, which keeps its
input and a number per token, where a CPU also keeps the normalised input; attention is FlashAttention, which keeps no
probabilities; and the chunks of the head have a GPU's size. A compiled model is traced as if it were not compiled: it
recomputes cheap operations in the backward pass, and so keeps less (the paper's models, read off once with torch 2.13:
10 to 12 % less).

The optimizer's memory is counted from its state and, per kind of optimizer, from its largest temporary tensors. All
sizes are in bytes.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from muown_train.models.language_model import LanguageModel
from muown_train.models.loss import CHUNK_LOGITS
from muown_train.optim import SOAP, Combined, Lion
from muown_train.optim.core.base import BaseOptimizer, Group
from muown_train.optim.core.blocks import get_limits
from muown_train.optim.core.matrix import MatrixOptimizer
from muown_train.optim.core.skip_step import split_into_chunks
from muown_train.optim.sharding import assign_owners

FLOAT = 4  # bytes of a number in weights, gradients, optimizer state and the residual stream


@dataclass(frozen=True)
class PassSetup:
    """The size, precision ("autocast" is bfloat16) and kind of device ("cpu" or "cuda") of a traced micro-batch."""

    rows: int
    seq_len: int
    autocast: bool
    device: str = "cuda"


@dataclass(frozen=True)
class PassMemory:
    """Bytes that a forward and backward pass takes besides weights and gradients."""

    activations: int  # kept when the forward pass ends, with the bfloat16 copies of the weights
    peak: int  # the most at any time


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one rank; `peak` adds up what is needed at the same time."""

    weights: int
    gradients: int
    state: int  # the optimizer's state
    activations: int  # see `PassMemory`
    temporary: int  # the most that the head, the loss and the backward pass take besides
    step: int  # the most that the optimizer's step takes, when there are no activations

    @property
    def peak(self) -> int:
        lasting = self.weights + self.gradients + self.state
        return lasting + max(self.activations + self.temporary, self.step)


def trace_pass(model: LanguageModel, setup: PassSetup) -> PassMemory:
    """Trace a micro-batch of a model on any device, such as meta, whose gradients already exist."""
    gpu = setup.device != "cpu"
    twin = deepcopy(model)
    with FakeTensorMode(allow_non_fake_inputs=True), _choose_as_on_a_gpu() if gpu else nullcontext():
        for module in twin.modules():  # what `to_empty` would do, which in torch 2.9 leaves parameters on meta
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty_like(p, device="cpu")))
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
        for p in twin.parameters():
            p.grad = torch.empty_like(p)
        tokens = torch.zeros(setup.rows, setup.seq_len, dtype=torch.int64)
        own = [tensor for p in twin.parameters() for tensor in (p, p.grad)]
        # float16 is as wide as bfloat16, in which attention on a CPU keeps probabilities
        dtype = torch.float16 if gpu else torch.bfloat16
        with _LiveStorages([*own, *twin.buffers(), tokens]) as storages, torch.autocast("cpu", dtype, setup.autocast):
            loss = twin(tokens, tokens)
            activations = storages.live
            loss.backward()
    return PassMemory(activations, storages.peak)


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations make, from their creation until they are freed.

    Args:
        ignored: tensors that exist before and do not count.
    """

    def __init__(self, ignored: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.known: dict[int, Any] = {t.untyped_storage()._cdata: None for t in ignored if t is not None}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor):
                self._count(result.untyped_storage())
        self.peak = max(self.peak, self.live)
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def release(_: Any) -> None:
            del self.known[key]
            self.live -= size

        self.known[key] = weakref.ref(storage, release)
        self.live += size


@contextmanager
def _choose_as_on_a_gpu() -> Iterator[None]:
    """Give CPU tensors a GPU's RMSNorm and chunks of the head.

    RMSNorm is replaced by name, since a `TorchFunctionMode` does not see what checkpointed blocks recompute.
    """
    norm, chunk = F.rms_norm, CHUNK_LOGITS["cpu"]
    F.rms_norm, CHUNK_LOGITS["cpu"] = _fused_rms_norm, CHUNK_LOGITS["cuda"]
    try:
        yield
    finally:
        F.rms_norm, CHUNK_LOGITS["cpu"] = norm, chunk


def _fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Allocate the tensors that the fused kernel of a GPU allocates."""
    normalised: Tensor = _FusedNorm.apply(input, weight)  # type: ignore[no-untyped-call]
    return normalised


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def extrapolate_pass(one: PassMemory, rows: int, other: PassMemory, other_rows: int, wanted: int) -> PassMemory:
    """Return the memory of a pass of `wanted` rows, on the line through two traced passes.

    Activations are linear in rows. The peak is as good as linear while the head has several chunks; with fewer rows
    the line is above it, by at most a chunk.
    """
    share = (wanted - rows) / (other_rows - rows)
    return PassMemory(
        round(one.activations + share * (other.activations - one.activations)),
        round(one.peak + share * (other.peak - one.peak)),
    )


def combine_memory(parameters: int, traced: PassMemory, by_rank: Sequence[tuple[int, int]]) -> StepMemory:
    """Return the memory of the rank that needs most.

    Args:
        parameters: number of parameters, which every rank has with their gradients.
        by_rank: the optimizer's memory on each rank, see `estimate_optimizer_memory`.
    """
    weights, temporary = FLOAT * parameters, traced.peak - traced.activations
    each = (StepMemory(weights, weights, state, traced.activations, temporary, step) for state, step in by_rank)
    return max(each, key=lambda memory: memory.peak)


def find_largest_micro_batch(
    estimate: Callable[[int], StepMemory], rows: int, room: int
) -> tuple[int, StepMemory] | None:
    """Return the largest number of rows of a micro-batch that fits, and its memory; None if not even one row fits.

    Args:
        estimate: returns the memory for a number of rows.
        rows: rows of a step on a rank, which micro-batches divide.
        room: bytes that tensors may take.
    """
    for size in sorted((size for size in range(1, rows + 1) if rows % size == 0), reverse=True):
        memory = estimate(size)
        if memory.peak <= room:
            return size, memory
    return None


def estimate_optimizer_memory(optimizer: Combined, ranks: int, device: str, ns_bytes: int) -> list[tuple[int, int]]:
    """Return (state, temporary memory of a step) for each rank that `shard` spreads the optimizer over.

    Args:
        optimizer: may be on the meta device and have no state yet.
        ns_bytes: bytes of a number in the orthogonalisation.
    """
    owners = assign_owners(optimizer, ranks).owners
    state, step = [0] * ranks, [0] * ranks
    for part in optimizer.optimizers:
        per_number = 0.0 if isinstance(part, BaseOptimizer) else _measure_state(part)
        owned: defaultdict[int, list[tuple[Tensor, Group]]] = defaultdict(list)
        for group in part.param_groups:
            for p in group["params"]:
                rank = owners[p]
                owned[rank].append((p, group))
                if isinstance(part, BaseOptimizer):
                    state[rank] += sum(t.nbytes for t in part.create_state(p.detach().to("meta"), group).values())
                else:
                    state[rank] += int(per_number * p.nbytes)
        for rank, parameters in owned.items():
            step[rank] = max(step[rank], _count_temporary(part, parameters, device, ns_bytes))
    return list(zip(state, step, strict=True))


def _measure_state(part: Optimizer) -> float:
    """Return the numbers of state for each number of a parameter, where the first step creates the state."""
    probe = nn.Parameter(torch.zeros(64, 64))
    probe.grad = torch.zeros_like(probe)
    part.add_param_group({"params": [("probe", probe)]})  # the other parameters have no gradient, so they do not change
    part.step()
    numbers = sum(tensor.numel() for tensor in part.state.pop(probe).values())
    part.param_groups.pop()
    return float(round(numbers / probe.numel(), 2))


def _count_temporary(part: Optimizer, parameters: list[tuple[Tensor, Group]], device: str, ns_bytes: int) -> int:
    """Return the bytes that a step on these parameters takes besides weights, gradients and state."""
    if isinstance(part, MatrixOptimizer):
        return max(_count_batches(parameters, device, ns_bytes), default=0)
    if isinstance(part, SOAP):
        return max(_count_refinement(p, group) for p, group in parameters)
    if part.defaults.get("fused"):
        return 0
    if device == "cpu" and not isinstance(part, Lion):
        return 0  # torch's own optimizers update one parameter after the other on a CPU
    by_group: defaultdict[int, list[Tensor]] = defaultdict(list)
    for p, group in parameters:
        by_group[id(group)].append(p)
    if isinstance(part, Lion) and device != "cpu":  # weights and state are also copied, in case the step is skipped
        chunks = (chunk for group in by_group.values() for chunk in split_into_chunks(group))
        return max(3 * sum(p.nbytes for p in chunk) for chunk in chunks)
    return max(sum(p.nbytes for p in group) for group in by_group.values())  # a copy of each parameter


def _count_refinement(p: Tensor, group: Group) -> int:
    """Return the bytes of SOAP's update of eigenvectors: four tensors of a side (k, k), three of the matrix's size."""
    shapes = [(rows, *p.shape[1:]) for rows in group["blocks"] or p.shape[:1]]
    sides: list[int] = [k for shape in shapes for k in shape if p.ndim == 2 and k <= group["max_precondition_dim"]]
    matrix: int = max(math.prod(shape) for shape in shapes)
    return FLOAT * (4 * max(sides, default=0) ** 2 + 3 * matrix)


def _count_batches(parameters: list[tuple[Tensor, Group]], device: str, ns_bytes: int) -> Iterator[int]:
    """Yield the bytes of preparing, orthogonalising and applying each batch of equal matrices (`optim.core.matrix`)."""
    limits = get_limits(device)
    counts: defaultdict[tuple[int, int], int] = defaultdict(int)
    copies, may_skip = 0, device != "cpu"  # copies of the rows that move together, while O is applied to them
    for p, group in parameters:
        # NorMuon's row statistics take one, Muown's weight decay two, and a step that a GPU may skip one
        copies = max(copies, ("beta2" in group) + 2 * bool("magnitude" in group and group["weight_decay"]) + may_skip)
        for rows in group["blocks"] or (p.shape[0],):
            counts[rows, p.shape[1]] += 1
    for (m, n), count in counts.items():
        joined = min(count, limits.joined // (m * n)) * m * n
        k = min(count, max(1, limits.batch // (m * n)))
        rows_together = FLOAT * (joined or min(m * n, limits.part))
        stack, is_joined, is_narrow = ns_bytes * k * m * n, joined > m * n, ns_bytes != FLOAT
        grams = (4 if max(m, n) >= 2 * min(m, n) else 2) * min(m, n) ** 2
        yield max(
            stack + (1 + 3 * is_joined + may_skip) * rows_together,  # X; W, G and the momentum where joined
            2 * stack + ns_bytes * k * grams,
            stack + (is_narrow + is_joined + copies) * rows_together,  # O in float32; W where joined
        )
