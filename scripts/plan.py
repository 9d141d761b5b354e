"""What a run will cost, before it costs anything: `python scripts/plan.py model=500m --device H100-80GB --ranks 8`.

Prints parameters, updates, the memory of each GPU and whether it suffices, and how long the run takes. The settings are
those of `python -m muown_train`; nothing is trained or downloaded, and no GPU is needed. Time is an estimate of
`muown_train/roofline.py`, or follows from an MFU that you know (`--mfu`).
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import OmegaConf

from muown_train.__main__ import WRONG, explained, leave
from muown_train.batch import rows_per_update
from muown_train.build import make_model, make_optimizer, make_schedule
from muown_train.config import check_overrides, check_trust, composed
from muown_train.estimate import Memory, Pass, Sizes, largest_micro_batch, memory, optimizer_memory, sizes_of
from muown_train.hardware import GPUS, Gpu, gpu
from muown_train.models.language_model import LanguageModel
from muown_train.optim import Combined, parameter_roles
from muown_train.roofline import FRACTIONS, update_time
from muown_train.top_level import TopLevel, top_level

# What is not tensors: CUDA's context and kernels, workspaces of cuBLAS and NCCL; and of the rest a part that the
# allocator cannot use, in pieces between tensors. Assumed, not measured.
RESERVED, FRAGMENTED = 2 * 2**30, 0.05


@dataclass
class Plan:
    """A run and the machine it is for."""

    top: TopLevel
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
        return self.ranks if self.top.shard_optimizer else 1

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
    card = gpu(device)
    check_overrides(overrides)
    resolved: dict[str, Any] = OmegaConf.to_container(composed(overrides), resolve=True)  # type: ignore[assignment]
    top = top_level(resolved, "plan")
    check_trust(top.trust, overrides)
    batch = rows_per_update(top.batch_tokens, top.seq_len, top.micro_batch, ranks)
    with torch.device("meta"):  # sizes without numbers
        model = make_model(resolved, top)
    sizes = sizes_of(model)
    steps, _ = make_schedule(resolved, top, model)
    how = Pass(top.micro_batch, top.seq_len, top.precision != "float32", compiled=top.compile)
    optimizer = make_optimizer(resolved, model, top.trust)
    return Plan(top, model, optimizer, sizes, steps, batch // ranks, how, card, device, ranks)


def of_parameters(plan: Plan) -> Iterator[str]:
    counts: dict[str, int] = {}
    roles = parameter_roles(plan.model)
    for name, parameter in plan.model.named_parameters():
        counts[roles[name].role] = counts.get(roles[name].role, 0) + parameter.numel()
    parts = ", ".join(f"{role} {count:,}" for role, count in counts.items())
    yield f"{plan.sizes.parameters:,} parameters: {parts}"
    top, how = plan.top, plan.how
    tokens = plan.steps * top.batch_tokens
    micro = f"{plan.accumulation} micro-batch{'es' * (plan.accumulation > 1)} of {how.rows} x {how.seq_len} tokens"
    yield f"{tokens:,} tokens: {plan.steps:,} updates of {top.batch_tokens:,}, on each of {plan.ranks} GPUs {micro}"
    yield f"{'bfloat16 autocast' if how.autocast else 'float32'}, {'' if how.compiled else 'not '}compiled"


def of_memory(plan: Plan) -> Iterator[str]:
    """The memory of the rank that needs most, and what would fit."""
    spread = optimizer_memory(plan.optimizer, plan.owners, "cuda", plan.how.width)
    state, step = max(spread, key=sum)
    needed = memory(plan.sizes, plan.how, state, step)
    yield f"\nmemory of a {plan.device}, GiB"
    yield from lines_of(needed, plan)
    fits = needed.peak <= plan.room
    yield (
        f"{'fits' if fits else 'does not fit'}: {gib(needed.peak)} at most, where tensors have "
        f"{gib(plan.room)} of {gib(plan.gpu.memory)}"
    )
    found = largest_micro_batch(plan.sizes, plan.how, plan.rows, plan.room, state=state, step=step)
    if found is None:
        yield "not even micro_batch=1 fits: more ranks, more blocks in model.checkpointed or a smaller model need less"
    else:
        size, taken = found
        yield f"largest micro_batch that fits: {size}, with {gib(taken.peak)} at most"


def lines_of(needed: Memory, plan: Plan) -> Iterator[str]:
    spread = "replicated" if plan.owners == 1 else f"the largest share of {plan.owners} ranks"
    again = f", {plan.sizes.checkpointed} of {plan.sizes.layers} blocks checkpointed" * bool(plan.sizes.checkpointed)
    rows = (
        ("weights", needed.weights, "float32"),
        ("gradients", needed.gradients, "float32"),
        ("optimizer state", needed.state, spread),
        ("activations", needed.activations, f"kept for the backward pass{again}"),
        ("head, loss, backward", needed.head, "besides those at most"),
        ("optimizer step", needed.step, "besides weights, gradients and state, when there are no activations"),
    )
    for name, size, note in rows:
        yield f"  {name:<21}{gib(size):>7}  {note}"


def of_time(plan: Plan, mfu: float | None) -> Iterator[str]:
    per_token, peak = plan.model.flops_per_token(), plan.gpu.flops * plan.ranks
    tokens = plan.top.batch_tokens
    yield f"\n{per_token / 1e9:.3f} GFLOP per token, peak {plan.gpu.flops / 1e12:,.0f} TFLOP/s in bfloat16 each"
    if mfu is not None:
        seconds = per_token * tokens / (mfu * peak)
        yield f"at the MFU given, {mfu:.1%}:"
    else:
        sent = 2 if plan.top.reduce_dtype == "bfloat16" else 4
        parts = update_time(
            plan.sizes, plan.how, plan.gpu, plan.optimizer, plan.ranks, plan.accumulation, plan.owners, sent
        )
        seconds = parts.total
        shown = ", ".join(f"{name} {value:.3f}" for name, value in vars(parts).items())
        attained = ", ".join(f"{name} {value:.0%}" for name, value in FRACTIONS.items())
        yield f"roofline, nothing overlaps, attained of peak rates: {attained}"
        yield f"  seconds of an update: {shown}"
        yield f"MFU {per_token * tokens / seconds / peak:.1%}:"
    hours = plan.steps * seconds / 3600
    evaluations = 1 + -(-plan.steps // plan.top.eval_every)
    evaluating = evaluations * plan.top.valid_tokens / tokens * seconds / 3 / 3600  # a forward pass is a third
    yield (
        f"  {seconds:.3f} s an update, {tokens / seconds:,.0f} tokens/s, {hours:,.1f} hours, "
        f"{hours * plan.ranks:,.0f} GPU hours; {evaluations} evaluations add {evaluating:,.1f} hours"
    )


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: leave(f"error: {message}; see --help", WRONG)  # type: ignore[method-assign]
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as of python -m muown_train")
    parser.add_argument("--device", default="H100-80GB", help=f"{', '.join(GPUS)} (default H100-80GB)")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs (default 1)")
    parser.add_argument("--mfu", type=float, help="a known one, from 0 to 1; by default a roofline")
    arguments = parser.parse_intermixed_args()
    if arguments.mfu is not None and not 0 < arguments.mfu <= 1:
        parser.error(f"--mfu {arguments.mfu:g} must be above 0 and at most 1")
    with explained(arguments.settings):
        plan = planned(arguments.settings, arguments.device, arguments.ranks)
        lines = [*of_parameters(plan), *of_memory(plan), *of_time(plan, arguments.mfu)]
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
