"""Estimate memory and time of a step under `parallel=fsdp` and `hsdp`, where ranks hold the rows of one copy.

A block's weights are gathered before its forward and its backward pass, while the block before computes, and its
gradients are averaged into the ranks' rows after the backward pass of the last micro-batch. Then X and O travel between
the ranks of a copy (`muown_train.optim.row_shards`). Of all this no GPU has measured anything.
"""

from dataclasses import dataclass

from torch import nn

from muown_train.analysis.cost.memory import FLOAT, PassMemory, StepMemory
from muown_train.analysis.cost.step_time import (
    StepTime,
    estimate_optimizer_time,
    estimate_pass_time,
    get_link_rate,
)
from muown_train.models.language_model import LanguageModel
from muown_train.optim import Combined
from muown_train.optim.core.matrix import MatrixOptimizer
from muown_train.runtime.hardware import Gpu


@dataclass(frozen=True)
class ModelParts:
    """Numbers of parameters: of the whole model, of all blocks, and of the largest block."""

    model: int
    blocks: int
    block: int

    @property
    def root(self) -> int:
        """Those outside of blocks, which stay gathered during a pass."""
        return self.model - self.blocks


def count_parts(model: LanguageModel) -> ModelParts:
    """Return the numbers of parameters of a model and of its blocks."""
    blocks = [_count(block) for block in model.list_blocks() if block is not model]
    return ModelParts(_count(model), sum(blocks), max(blocks, default=0))


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def shard_memory(
    parts: ModelParts, traced: PassMemory, by_rank: list[tuple[int, int]], autocast: bool, accumulation: int
) -> StepMemory:
    """Return the memory of a rank.

    Args:
        traced: the pass of a rank that holds all weights.
        by_rank: the optimizer's memory on each rank of a copy, were it to own whole parameters; its rows are an equal
            share of the state.
        accumulation: micro-batches of a step; before the last one gradients are whole on every rank.
    """
    ranks = len(by_rank)
    width = 2 if autocast else FLOAT
    gathered = FLOAT * parts.root + 2 * width * parts.block  # a block that computes, and the next one
    # autocast would keep a narrow copy of each weight, which is gathered again instead
    activations = traced.activations - (2 * parts.blocks if autocast else 0) + gathered
    gradients = FLOAT * parts.model // (1 if accumulation > 1 else ranks)
    return StepMemory(
        weights=FLOAT * parts.model // ranks,
        gradients=gradients,
        state=sum(state for state, _ in by_rank) // ranks,
        activations=activations,
        temporary=traced.peak - traced.activations + 2 * FLOAT * parts.block,  # gradients on their way
        step=max(step for _, step in by_rank),
    )


def estimate_sharded_time(
    model: LanguageModel,
    optimizer: Combined,
    gpu: Gpu,
    tokens: int,
    autocast: bool,
    compiled: bool,
    ranks: int,
    parts: int,
    gradient_bytes: int = FLOAT,
    accumulation: int = 1,
) -> StepTime:
    """Return the seconds of a step; arguments are those of `estimate_step_time`.

    Args:
        parts: ranks that hold one copy; there are ranks / parts copies.
    """
    passes, forward = estimate_pass_time(model, gpu, tokens, autocast, compiled, ranks)
    forward, backward = forward / accumulation, (passes - forward) / accumulation
    sizes, share = count_parts(model), (parts - 1) / parts
    inside = share / get_link_rate(gpu, parts)  # seconds of a byte of the whole that is gathered or averaged
    width = 2 if autocast else FLOAT
    root, blocks = FLOAT * sizes.root * inside, width * sizes.blocks * inside
    averaged = gradient_bytes * sizes.model * inside
    if ranks > parts:  # and between copies, where each rank averages its rows with those of its peers
        averaged += 2 * gradient_bytes * sizes.model / parts * (1 - parts / ranks) / get_link_rate(gpu, ranks)
    last_gradients = max(averaged + blocks - backward, averaged * sizes.root / sizes.model)
    waiting = root + max(0.0, blocks - forward)  # in each forward pass; the root is gathered before it begins
    waiting_backward = max(0.0, blocks - backward)
    rows = sum(
        p.numel()
        for part in optimizer.optimizers
        if isinstance(part, MatrixOptimizer)
        for group in part.param_groups
        for p in group["params"]
    )
    return StepTime(
        passes,
        estimate_optimizer_time(optimizer, gpu, autocast, parts),
        last_gradients,
        accumulation * waiting + (accumulation - 1) * waiting_backward,
        2 * width * rows / parts * inside,
    )
