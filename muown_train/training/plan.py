"""What a run will cost, before it costs anything: parameters, updates, memory of each GPU, hours on a given device.

Nothing is trained or downloaded, and no GPU is needed. Time is an estimate of `roofline.py`, or follows from an MFU
that is known.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from muown_train.analysis.cost.memory import (
    Memory,
    Pass,
    Sizes,
    largest_micro_batch,
    memory,
    optimizer_memory,
    sizes_of,
)
from muown_train.analysis.cost.roofline import FRACTIONS, Update, update_time
from muown_train.config.budget import compute_batch_rows
from muown_train.config.compose import load_config
from muown_train.config.schema import RunConfig
from muown_train.models.language_model import LanguageModel, build_model
from muown_train.optim import Combined, parameter_roles
from muown_train.runtime.formatting import format_gib
from muown_train.runtime.hardware import Gpu, find_gpu
from muown_train.training.optimizers import build_optimizer
from muown_train.training.schedule import build_schedule

# What is not tensors: CUDA's context and kernels, workspaces of cuBLAS and NCCL; and of the rest a part that the
# allocator cannot use, in pieces between tensors. Assumed, not measured.
RESERVED, FRAGMENTED = 2 * 2**30, 0.05


@dataclass
class Plan:
    """A run and the machine it is for."""

    config: RunConfig
    model: LanguageModel
    optimizer: Combined
    sizes: Sizes
    steps: int
    rows: int  # of an update on each rank
    how: Pass
    gpu: Gpu
    device: str
    ranks: int

    @property
    def accumulation(self) -> int:
        return self.rows // self.how.rows

    @property
    def owners(self) -> int:
        """Ranks that the optimizer is spread over."""
        return self.ranks if self.config.shard_optimizer else 1

    @cached_property
    def of_ranks(self) -> list[tuple[int, int]]:
        """What each rank takes for the optimizer, see `optimizer_memory`."""
        return optimizer_memory(self.optimizer, self.owners, "cuda", self.how.width)

    @property
    def room(self) -> int:
        return int((self.gpu.memory - RESERVED) * (1 - FRAGMENTED))


def planned(overrides: list[str], device: str, ranks: int) -> Plan:
    """The plan of a configuration, checked as `build` checks it.

    Raises:
        ValueError: a setting or a device that cannot be.
    """
    if ranks < 1:
        raise ValueError(f"--ranks {ranks} must be 1 or more")
    card = find_gpu(device)
    config = load_config(overrides)
    batch = compute_batch_rows(config.batch_tokens, config.seq_len, config.micro_batch, ranks)
    with torch.device("meta"):  # sizes without numbers
        model = build_model(config.model, config.seq_len, config.trust)
    steps, _ = build_schedule(config, sum(p.numel() for p in model.parameters()))
    how = Pass(config.micro_batch, config.seq_len, config.precision != "float32", compiled=config.compile)
    sizes = sizes_of(model, how)
    optimizer = build_optimizer(config.optim, model, config.trust)
    return Plan(config, model, optimizer, sizes, steps, batch // ranks, how, card, device, ranks)


def of_parameters(plan: Plan) -> Iterator[str]:
    """Parameters by role, updates, and how a GPU makes one."""
    counts: dict[str, int] = {}
    roles = parameter_roles(plan.model)
    for name, parameter in plan.model.named_parameters():
        counts[roles[name].role] = counts.get(roles[name].role, 0) + parameter.numel()
    parts = ", ".join(f"{role} {count:,}" for role, count in counts.items())
    yield f"{sum(counts.values()):,} parameters: {parts}"
    config, how = plan.config, plan.how
    tokens = plan.steps * config.batch_tokens
    micro = f"{plan.accumulation} micro-batch{'es' * (plan.accumulation > 1)} of {how.rows} x {how.seq_len} tokens"
    yield f"{tokens:,} tokens: {plan.steps:,} updates of {config.batch_tokens:,}, on each of {plan.ranks} GPUs {micro}"
    yield f"{'bfloat16 autocast' if how.autocast else 'float32'}, {'' if how.compiled else 'not '}compiled"


def needed_memory(plan: Plan) -> Memory:
    """Of the rank that needs most."""
    return memory(plan.sizes, plan.how, plan.of_ranks)


def of_memory(plan: Plan) -> Iterator[str]:
    """The memory of the rank that needs most, and what would fit."""
    needed = needed_memory(plan)
    yield f"\nmemory of a {plan.device}, GiB"
    yield from lines_of(needed, plan)
    fits = needed.peak <= plan.room
    yield (
        f"{'fits' if fits else 'does not fit'}: {format_gib(needed.peak)} at most, where tensors have "
        f"{format_gib(plan.room)} of {format_gib(plan.gpu.memory)}"
    )
    found = largest_micro_batch(plan.sizes, plan.how, plan.rows, plan.room, plan.of_ranks)
    if found is None:
        yield (
            "not even micro_batch=1 fits: more ranks, more blocks in model.activation_checkpointing or a smaller model "
            "need less"
        )
    else:
        size, taken = found
        yield f"largest micro_batch that fits: {size}, with {format_gib(taken.peak)} at most"


def lines_of(needed: Memory, plan: Plan) -> Iterator[str]:
    """Each part of the memory, GiB, and what it is."""
    sizes = plan.sizes
    spread = "replicated" if plan.owners == 1 else f"the largest share of {plan.owners} ranks"
    recomputed = sizes.activation_checkpointing
    again = f", {recomputed} of {sizes.layers} blocks checkpointed" * bool(recomputed)
    traced = ", counted as if not compiled: it may be less" * (sizes.traced is not None and plan.how.compiled)
    rows = (
        ("weights", needed.weights, "float32"),
        ("gradients", needed.gradients, "float32"),
        ("optimizer state", needed.state, spread),
        ("activations", needed.activations, f"kept for the backward pass{again}{traced}"),
        ("head, loss, backward", needed.head, "besides those at most"),
        ("optimizer step", needed.step, "besides weights, gradients and state, when there are no activations"),
    )
    for name, size, note in rows:
        yield f"  {name:<21}{format_gib(size):>7}  {note}"


def parts_of_update(plan: Plan) -> Update:
    """Seconds of an update by the roofline."""
    sent = 2 if plan.config.reduce_dtype == "bfloat16" else 4
    return update_time(plan.sizes, plan.how, plan.gpu, plan.optimizer, plan.ranks, plan.accumulation, plan.owners, sent)


def seconds_of_update(plan: Plan, mfu: float | None) -> float:
    """By a known MFU, or else by the roofline."""
    if mfu is None:
        return parts_of_update(plan).total
    return plan.model.flops_per_token() * plan.config.batch_tokens / (mfu * plan.gpu.flops * plan.ranks)


def hours(plan: Plan, mfu: float | None) -> tuple[float, float]:
    """Hours of training and of evaluations on all ranks together; times ranks, GPU hours."""
    seconds = seconds_of_update(plan, mfu)
    # a forward pass is a third
    evaluating = evaluations(plan) * plan.config.valid_tokens / plan.config.batch_tokens * seconds / 3
    return plan.steps * seconds / 3600, evaluating / 3600


def evaluations(plan: Plan) -> int:
    """Before the first update, and after every `eval_every` and the last."""
    return 1 + -(-plan.steps // plan.config.eval_every)


def of_time(plan: Plan, mfu: float | None) -> Iterator[str]:
    """How long an update takes, and the run."""
    per_token, peak = plan.model.flops_per_token(), plan.gpu.flops * plan.ranks
    tokens = plan.config.batch_tokens
    yield f"\n{per_token / 1e9:.3f} GFLOP per token, peak {plan.gpu.flops / 1e12:,.0f} TFLOP/s in bfloat16 each"
    seconds = seconds_of_update(plan, mfu)
    if mfu is not None:
        yield f"at the MFU given, {mfu:.1%}:"
    else:
        shown = ", ".join(f"{name} {value:.3f}" for name, value in vars(parts_of_update(plan)).items())
        attained = ", ".join(f"{name} {value:.0%}" for name, value in FRACTIONS.items())
        yield f"roofline, nothing overlaps, attained of peak rates: {attained}"
        yield f"  seconds of an update: {shown}"
        yield f"MFU {per_token * tokens / seconds / peak:.1%}:"
    training, evaluating = hours(plan, mfu)
    yield (
        f"  {seconds:.3f} s an update, {tokens / seconds:,.0f} tokens/s, {training:,.1f} hours, "
        f"{training * plan.ranks:,.0f} GPU hours; {evaluations(plan)} evaluations add {evaluating:,.1f} hours"
    )
