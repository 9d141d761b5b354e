"""Estimate how long a step takes on a GPU, from floating-point operations, stated rates and links.

The parts of a step are added up. Gradients travel while the backward pass of the last micro-batch goes on, as
DistributedDataParallel sends them, so that only what is left of them at its end takes time; its last bucket begins to
travel then, and holds the embedding, which is the first parameter of a model. The weights that a sharded optimizer's
ranks have moved travel after its step. Waiting for data, evaluations and checkpoints are not counted.
"""

from dataclasses import dataclass

from muown_train.analysis.cost.memory import FLOAT
from muown_train.models.language_model import LanguageModel
from muown_train.models.parallel import BUCKET_MB
from muown_train.optim import Combined
from muown_train.optim.sharding import assign_owners, estimate_step_cost
from muown_train.runtime.hardware import Gpu

# The share of a GPU's peak rate that a model's passes attain, compiled or not.
# Compiled: measured on one H200 (docs/performance.md), `model=124m` takes 1.055 s for the passes of a step, 43 %. For
# comparison, MosaicML's LLM Foundry (scripts/train/benchmarking/README.md) measures, for whole steps on 8 H100 in
# bfloat16 with rows of 1024 or 2048 tokens and no activation checkpointing, 40 % at 760M parameters, 42 % at 1B and
# 46 % at 3B and 7B; and the paper's step of its 500M model on four GH200, 1.27 s, is 39 %, all included.
# Not compiled: no published measurement of such a model was found. Counting the bytes of each elementwise operation
# gives 25 % at 124M, 33 % at 500M and 37 % at 2.7B.
MFU = {True: 0.43, False: 0.33}
# The share that an optimizer's products attain in bfloat16. Newton-Schulz of 48 matrices of 768 x 768 and of 12 of
# 4096 x 768 ran at 152 and 142 TFLOP/s of 989 on the H200. Wider matrices were not measured; they are perhaps faster,
# though the paper's step times at width 1280 tell 110 to 120. In float32 products attain the share that those of a
# model do, by the steps of SOAP on the H200.
OPTIMIZER_MFU = 0.15
LINK = 0.70  # the share of a link's rate that collectives attain, commonly 70 to 80 %


@dataclass(frozen=True)
class StepTime:
    """Seconds of the parts of a step."""

    model: float
    optimizer: float
    gradients: float  # averaging them over ranks, as far as the backward pass does not hide it
    weights: float  # sending those that ranks have moved (DDP), or gathering them, as far as passes do not hide it
    rows: float = 0.0  # sending rows of X and O to where matrices are whole and back, under FSDP2

    @property
    def total(self) -> float:
        return self.model + self.optimizer + self.gradients + self.weights + self.rows


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
    accumulation: int = 1,
) -> StepTime:
    """Return the seconds of a step.

    Args:
        model, optimizer: may be on the meta device.
        tokens: tokens of a step over all ranks.
        autocast: whether products are in bfloat16; float32 has no tensor cores.
        owners: ranks that the optimizer is spread over; 1 if every rank does all of it.
        gradient_bytes: bytes of a number of the gradients on its way between ranks.
        accumulation: micro-batches of a step on each rank.
    """
    passes, forward = estimate_pass_time(model, gpu, tokens, autocast, compiled, ranks)
    backward = (passes - forward) / accumulation
    sizes = [p.numel() for p in model.parameters()]
    all_reduce = 2 * (ranks - 1) / ranks * gradient_bytes / get_link_rate(gpu, ranks)  # seconds for each number
    last = min(max(sizes[0], BUCKET_MB * 2**20 // FLOAT), sum(sizes))
    return StepTime(
        passes,
        estimate_optimizer_time(optimizer, gpu, autocast, owners),
        max(sum(sizes) * all_reduce - backward, last * all_reduce),
        FLOAT * sum(sizes) / get_link_rate(gpu, owners) if owners > 1 else 0.0,
    )


def estimate_pass_time(
    model: LanguageModel, gpu: Gpu, tokens: int, autocast: bool, compiled: bool, ranks: int
) -> tuple[float, float]:
    """Return the seconds of the passes of a step on each rank, and of the forward passes among them."""
    rate = MFU[compiled] * (gpu.flops if autocast else gpu.float32_flops)
    forward = model.flops_per_token() * tokens / (rate * ranks) / 3
    recomputed = model.activation_checkpointing / model.layers
    return (3 + recomputed) * forward, forward


def estimate_optimizer_time(optimizer: Combined, gpu: Gpu, autocast: bool, owners: int) -> float:
    """Return the seconds of the optimizer on the rank where it takes longest."""
    owner = assign_owners(optimizer, owners).owners
    seconds = [0.0] * owners
    for part in optimizer.optimizers:
        for group in part.param_groups:
            in_float32 = not autocast or "precondition_frequency" in group  # SOAP multiplies in float32
            rate = MFU[True] * gpu.float32_flops if in_float32 else OPTIMIZER_MFU * gpu.flops
            for p in group["params"]:
                seconds[owner[p]] += estimate_step_cost(p, group) / rate
    return max(seconds)


def get_link_rate(gpu: Gpu, ranks: int) -> float:
    """Return the bytes per second of collectives of that many ranks, whose ring leaves each node once.

    Between nodes it has the ways of all GPUs of a node to the network.
    """
    inside = ranks <= gpu.gpus_per_node
    return LINK * (gpu.link_bandwidth if inside else min(gpu.link_bandwidth, gpu.network_bandwidth * gpu.gpus_per_node))
