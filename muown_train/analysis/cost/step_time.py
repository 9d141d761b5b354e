"""Estimate how long a step takes on a GPU, from floating-point operations, a stated MFU and links.

The parts of a step are added up, as if nothing overlapped: the model's forward and backward passes, the optimizer, and
what travels between ranks. Waiting for data, evaluations and checkpoints are not counted.
"""

from dataclasses import dataclass

from muown_train.models.language_model import LanguageModel
from muown_train.optim import Combined
from muown_train.optim.sharding import assign_owners, estimate_step_cost
from muown_train.runtime.hardware import Gpu

# The share of a GPU's peak rate that a model's passes attain, compiled or not.
# Compiled: MosaicML's LLM Foundry (scripts/train/benchmarking/README.md) measures, for whole steps on 8 H100 in
# bfloat16 with rows of 1024 or 2048 tokens and no activation checkpointing, 40 % at 760M parameters, 42 % at 1B and
# 46 % at 3B and 7B; here the optimizer and the links are added.
# Not compiled: no published measurement of such a model was found. Counting the bytes of each elementwise operation
# gives 25 % at 124M, 33 % at 500M and 37 % at 2.7B.
# For comparison, the paper's step of its 500M model on four GH200, 1.27 s, is an MFU of 39 %, all included.
MFU = {True: 0.46, False: 0.33}
LINK = 0.70  # the share of a link's rate that collectives attain, commonly 70 to 80 %
# Bytes per second of a GPU's own way to other nodes, 400 Gbit/s (InfiniBand NDR). A ring leaves each node once, and has
# the ways of all GPUs of the node for that.
NETWORK = 50e9


@dataclass(frozen=True)
class StepTime:
    """Seconds of the parts of a step."""

    model: float
    optimizer: float
    gradients: float  # averaging them over ranks, and sending the parameters that each rank has updated

    @property
    def total(self) -> float:
        return self.model + self.optimizer + self.gradients


def estimate_step_time(
    model: LanguageModel,
    optimizer: Combined,
    gpu: Gpu,
    tokens: int,
    autocast: bool,
    compiled: bool,
    ranks: int = 1,
    owners: int = 1,
    gradient_bytes: int = 4,
) -> StepTime:
    """Return the seconds of a step.

    Args:
        model, optimizer: may be on the meta device.
        tokens: tokens of a step over all ranks.
        autocast: whether products are in bfloat16; float32 has no tensor cores.
        owners: ranks that the optimizer is spread over; 1 if every rank does all of it.
        gradient_bytes: bytes of a number of the gradients on its way between ranks.
    """
    rate = MFU[compiled] * (gpu.flops if autocast else gpu.float32_flops)
    recomputed = 1 + model.activation_checkpointing / model.layers / 3  # a forward pass is a third
    return StepTime(
        model.flops_per_token() * recomputed * tokens / (rate * ranks),
        _time_optimizer(optimizer, gpu, MFU[compiled], autocast, owners),
        _time_links(sum(p.numel() for p in model.parameters()), gpu, ranks, owners, gradient_bytes),
    )


def _time_optimizer(optimizer: Combined, gpu: Gpu, mfu: float, autocast: bool, owners: int) -> float:
    """Return the seconds of the optimizer on the rank where it takes longest."""
    owner = assign_owners(optimizer, owners).owners
    seconds = [0.0] * owners
    for part in optimizer.optimizers:
        for group in part.param_groups:
            in_float32 = not autocast or "precondition_frequency" in group  # SOAP multiplies in float32
            for p in group["params"]:
                rate = gpu.float32_flops if in_float32 else gpu.flops
                seconds[owner[p]] += estimate_step_cost(p, group) / (mfu * rate)
    return max(seconds)


def _time_links(parameters: int, gpu: Gpu, ranks: int, owners: int, gradient_bytes: int) -> float:
    """Return the seconds of an all-reduce of gradients and a sharded optimizer's broadcasts, in a ring of all ranks."""
    if ranks == 1:
        return 0.0
    inside = ranks <= gpu.gpus_per_node
    link = gpu.link_bandwidth if inside else min(gpu.link_bandwidth, NETWORK * gpu.gpus_per_node)
    gradients = 2 * (ranks - 1) / ranks * gradient_bytes * parameters
    return (gradients + (4 * parameters if owners > 1 else 0)) / (link * LINK)
