"""Estimate what a run costs before it starts: parameters, steps, memory of each GPU, hours on a given device.

Nothing is trained or downloaded, and no GPU is needed. Memory comes from `analysis.cost.memory`; time is estimated by
`analysis.cost.step_time`, or follows from an MFU that is known.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from muown_train.analysis.cost.memory import (
    PassMemory,
    PassSetup,
    StepMemory,
    combine_memory,
    estimate_optimizer_memory,
    extrapolate_pass,
    find_largest_micro_batch,
    trace_pass,
)
from muown_train.analysis.cost.sharded_model import count_parts, estimate_sharded_time, shard_memory
from muown_train.analysis.cost.step_time import LINK, MFU, OPTIMIZER_MFU, StepTime, estimate_step_time
from muown_train.config.budget import compute_batch_rows
from muown_train.config.checks import check_positive
from muown_train.config.compose import load_config
from muown_train.config.schema import RunConfig
from muown_train.models.language_model import LanguageModel, build_model
from muown_train.optim import Combined, parameter_roles
from muown_train.runtime.formatting import format_gib
from muown_train.runtime.hardware import Gpu, find_gpu
from muown_train.training.optimizers import build_optimizer
from muown_train.training.schedule import build_schedule

# RESERVED bytes are not for tensors: CUDA's context and kernels, workspaces of cuBLAS and NCCL. A FRAGMENTED part of
# the rest lies in pieces between tensors that the allocator cannot use. Both are assumed, not measured.
RESERVED, FRAGMENTED = 2 * 2**30, 0.05


@dataclass
class Plan:
    """A run and the machine that it is planned for."""

    config: RunConfig
    model: LanguageModel  # on the meta device
    optimizer: Combined
    steps: int
    rows: int  # rows of a step on each rank
    gpu: Gpu
    device: str
    ranks: int

    @property
    def autocast(self) -> bool:
        return self.config.precision != "float32"

    @property
    def accumulation(self) -> int:
        """The number of micro-batches of a step on each rank."""
        return self.rows // self.config.micro_batch

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks hold rows of the model, and not the whole."""
        return self.config.parallel != "ddp" and self.ranks > 1

    @property
    def owners(self) -> int:
        """The number of ranks that the optimizer is spread over; where rows are held, those of one copy."""
        in_node = min(self.ranks, self.gpu.gpus_per_node)
        if self.is_sharded:
            return {"fsdp": self.ranks, "hsdp": in_node}[self.config.parallel]
        return {"none": 1, "node": in_node, "all": self.ranks}[self.config.shard_optimizer]

    @property
    def room(self) -> int:
        """The bytes of a GPU that tensors may take."""
        return int((self.gpu.memory - RESERVED) * (1 - FRAGMENTED))

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def optimizer_memory(self) -> list[tuple[int, int]]:
        """The memory of the optimizer on each rank, see `estimate_optimizer_memory`."""
        return estimate_optimizer_memory(self.optimizer, self.owners, "cuda", 2 if self.autocast else 4)

    def trace(self, rows: int) -> PassMemory:
        """Return the memory of a micro-batch of this many rows."""
        setup = PassSetup(rows, self.config.seq_len, self.autocast)
        return _trace(json.dumps(self.config.model, sort_keys=True), tuple(self.config.trust), setup)

    @cached_property
    def memory(self) -> StepMemory:
        """The memory of the rank that needs most."""
        return self._combine_memory(self.trace(self.config.micro_batch), self.accumulation)

    def _combine_memory(self, traced: PassMemory, accumulation: int) -> StepMemory:
        if not self.is_sharded:
            return combine_memory(self.parameters, traced, self.optimizer_memory)
        return shard_memory(count_parts(self.model), traced, self.optimizer_memory, self.autocast, accumulation)

    def find_largest_micro_batch(self) -> tuple[int, StepMemory] | None:
        """Return the largest micro_batch that fits and its memory; None if not even one row fits."""
        rows = self.config.micro_batch
        traced, doubled = self.trace(rows), self.trace(2 * rows)

        def estimate(wanted: int) -> StepMemory:
            extrapolated = extrapolate_pass(traced, rows, doubled, 2 * rows, wanted)
            return self._combine_memory(extrapolated, self.rows // wanted)

        return find_largest_micro_batch(estimate, self.rows, self.room)

    @cached_property
    def step_time(self) -> StepTime:
        """The seconds of a step by the default MFU."""
        estimate = estimate_sharded_time if self.is_sharded else estimate_step_time
        return estimate(
            self.model,
            self.optimizer,
            self.gpu,
            self.config.batch_tokens,
            self.autocast,
            self.config.compile,
            self.ranks,
            self.owners,
            gradient_bytes=2 if self.config.reduce_dtype == "bfloat16" else 4,
            accumulation=self.accumulation,
        )

    def estimate_seconds(self, mfu: float | None) -> float:
        """Return the seconds of a step: by an MFU that is known for whole steps, or else by `step_time`."""
        if mfu is None:
            return self.step_time.total
        return self.model.flops_per_token() * self.config.batch_tokens / (mfu * self.gpu.flops * self.ranks)

    def estimate_hours(self, mfu: float | None) -> tuple[float, float]:
        """Return the hours of training and of evaluations; times `ranks` they are GPU hours."""
        seconds = self.estimate_seconds(mfu)
        share = self.config.valid_tokens / self.config.batch_tokens / 3  # a forward pass is a third of a step
        return self.steps * seconds / 3600, self.count_evaluations() * share * seconds / 3600

    def count_evaluations(self) -> int:
        """Return the number of evaluations: before the first step, after every `eval_every` steps, and at the end."""
        return 1 + -(-self.steps // self.config.eval_every)


@cache
def _trace(model_settings: str, trust: tuple[str, ...], setup: PassSetup) -> PassMemory:
    """Trace a model of these settings, once for all plans that share it."""
    with torch.device("meta"):
        model = build_model(json.loads(model_settings), setup.seq_len, trust)
    return trace_pass(model, setup)


def make_plan(overrides: list[str], device: str, ranks: int, network: float | None = None) -> Plan:
    """Return the plan of a configuration, which is checked as `build_run` checks it.

    Args:
        network: GB/s of a GPU's way to other nodes; None for the device's usual one.

    Raises:
        ValueError: a setting is wrong, or the device is unknown.
    """
    if ranks < 1:
        raise ValueError(f"--ranks {ranks} must be 1 or more")
    gpu = find_gpu(device)
    if network is not None:
        gpu = replace(gpu, network_bandwidth=1e9 * check_positive("network", network, " of GB/s"))
    config = load_config(overrides)
    batch_rows = compute_batch_rows(config.batch_tokens, config.seq_len, config.micro_batch, ranks)
    with torch.device("meta"):
        model = build_model(config.model, config.seq_len, config.trust)
    steps, _ = build_schedule(config, sum(p.numel() for p in model.parameters()))
    optimizer = build_optimizer(config.optim, model, config.trust)
    return Plan(config, model, optimizer, steps, batch_rows // ranks, gpu, device, ranks)


def describe_parameters(plan: Plan) -> Iterator[str]:
    """Yield lines on the parameters by role, the steps, and how a GPU computes one."""
    counts: dict[str, int] = {}
    roles = parameter_roles(plan.model)
    for name, parameter in plan.model.named_parameters():
        counts[roles[name].role] = counts.get(roles[name].role, 0) + parameter.numel()
    parts = ", ".join(f"{role} {count:,}" for role, count in counts.items())
    yield f"{sum(counts.values()):,} parameters: {parts}"
    config = plan.config
    tokens = plan.steps * config.batch_tokens
    plural = "es" * (plan.accumulation > 1)
    micro = f"{plan.accumulation} micro-batch{plural} of {config.micro_batch} x {config.seq_len} tokens"
    yield f"{tokens:,} tokens: {plan.steps:,} steps of {config.batch_tokens:,}, on each of {plan.ranks} GPUs {micro}"
    yield f"{'bfloat16 autocast' if plan.autocast else 'float32'}, {'' if config.compile else 'not '}compiled"
    if plan.is_sharded:
        copies = plan.ranks // plan.owners
        yield f"parallel={config.parallel}: {copies} cop{'ies' if copies > 1 else 'y'}, each on {plan.owners} GPUs"


def describe_memory(plan: Plan) -> Iterator[str]:
    """Yield lines on the memory of the rank that needs most, and on the largest micro-batch that fits."""
    memory = plan.memory
    yield f"\nmemory of a {plan.device}, GiB"
    yield from _describe_memory_parts(plan)
    fits = memory.peak <= plan.room
    yield (
        f"{'fits' if fits else 'does not fit'}: {format_gib(memory.peak)} at most, where tensors have "
        f"{format_gib(plan.room)} of {format_gib(plan.gpu.memory)}"
    )
    largest = plan.find_largest_micro_batch()
    if largest is None:
        yield (
            "not even micro_batch=1 fits: more ranks, more blocks in model.activation_checkpointing or a smaller model "
            "need less"
        )
    else:
        rows, needed = largest
        yield f"largest micro_batch that fits: {rows}, with {format_gib(needed.peak)} at most"


def _describe_memory_parts(plan: Plan) -> Iterator[str]:
    memory, model = plan.memory, plan.model
    spread = "replicated" if plan.owners == 1 else f"the largest share of {plan.owners} ranks"
    kept = "kept for the backward pass"
    if model.activation_checkpointing:
        kept += f", {model.activation_checkpointing} of {model.layers} blocks checkpointed"
    if plan.config.compile:
        kept += ", counted as if not compiled: it may be less"
    part = f"float32, the rows of one of {plan.owners} ranks" if plan.is_sharded else "float32"
    whole = "float32, whole until the last micro-batch" if plan.accumulation > 1 else part
    rows = (
        ("weights", memory.weights, part),
        ("gradients", memory.gradients, whole if plan.is_sharded else part),
        ("optimizer state", memory.state, spread),
        ("activations", memory.activations, kept),
        ("head, loss, backward", memory.temporary, "besides those at most"),
        ("optimizer step", memory.step, "besides weights, gradients and state, when there are no activations"),
    )
    for name, size, note in rows:
        yield f"  {name:<21}{format_gib(size):>7}  {note}"


def describe_time(plan: Plan, mfu: float | None) -> Iterator[str]:
    """Yield lines on how long a step takes, and the run."""
    per_token, peak = plan.model.flops_per_token(), plan.gpu.flops * plan.ranks
    tokens = plan.config.batch_tokens
    yield f"\n{per_token / 1e9:.3f} GFLOP per token, peak {plan.gpu.flops / 1e12:,.0f} TFLOP/s in bfloat16 each"
    seconds = plan.estimate_seconds(mfu)
    if mfu is not None:
        yield f"at the MFU given, {mfu:.1%}:"
    else:
        yield from _describe_assumptions(plan)
        parts = {name: value for name, value in vars(plan.step_time).items() if plan.is_sharded or name != "rows"}
        yield "  seconds of a step: " + ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
        yield f"MFU {per_token * tokens / seconds / peak:.1%}:"
    training, evaluating = plan.estimate_hours(mfu)
    yield (
        f"  {seconds:.3f} s a step, {tokens / seconds:,.0f} tokens/s, {training:,.1f} hours, "
        f"{training * plan.ranks:,.0f} GPU hours; {plan.count_evaluations()} evaluations add {evaluating:,.1f} hours"
    )


def _describe_assumptions(plan: Plan) -> Iterator[str]:
    """Yield lines on what the time of a step is estimated with."""
    gpu, passes = plan.gpu, f"the model's passes at an MFU of {MFU[plan.config.compile]:.0%}"
    yield f"assumed are {passes}, the optimizer's products in bfloat16 at {OPTIMIZER_MFU:.0%} of the peak"
    if plan.ranks > 1:
        yield (
            f"and {LINK:.0%} of the links, {gpu.link_bandwidth / 1e9:g} GB/s from a GPU to the others of a node of "
            f"{gpu.gpus_per_node} and {gpu.network_bandwidth / 1e9:g} to other nodes (network=); gradients"
        )
        yield "travel during the last micro-batch's backward pass, those of the embedding at its end, weights after it"
        if plan.is_sharded:
            yield "or, as they are gathered, during the passes of the blocks before; rows are those of X and O"
