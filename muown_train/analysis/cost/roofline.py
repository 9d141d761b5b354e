"""How long an update takes on a GPU, by a roofline: an estimate that no GPU has been asked about.

The parts of an update are added up, as if nothing overlapped: products of matrices at a fraction of the peak rate,
attention at another, what is elementwise as fast as memory delivers its bytes, the gradients' way over the ranks, the
optimizer. Launching kernels takes no time here, nor do data, evaluation and checkpoints. The fractions are those of
FRACTIONS. What is multiplied is counted in the model's own modules, of any architecture; the bytes of what is
elementwise were counted operation by operation in the code of GPT, and other blocks are taken to move as many for each
number of their width and of their MLP's. (An MLP without a gate moves fewer, norms of queries and keys more.)
"""

from dataclasses import dataclass

from torch import Tensor

from muown_train.analysis.cost.memory import FLOAT, Pass, Sizes
from muown_train.optim import Combined, Lion, Muon, Muown
from muown_train.optim.core.base import Group
from muown_train.optim.sharding import FLOPS_PER_BYTE, assign_owners, estimate_step_cost
from muown_train.runtime.hardware import Gpu

# Of the peak: what is commonly attained. Products of thousands of rows at 60 to 75 %, as clocks fall under full load;
# FlashAttention-2 at 35 % on H100 (Shah et al. 2024, arXiv 2407.08608, figure 5), and at heads of 64 rather 30 %;
# memory at 80 to 90 %; collectives at 70 to 80 % of the links.
FRACTIONS = {"products": 0.65, "attention": 0.30, "memory": 0.80, "link": 0.70}
# Bytes per second of a GPU's own way to other nodes, 400 Gbit/s (InfiniBand NDR). A ring leaves each node once, and has
# the ways of all its GPUs for that.
NETWORK = 50e9

# Bytes for each number, read and written, of a forward and backward pass of a block of GPT in bfloat16: (D, H).
# Uncompiled, forward: two norms and casts 14 each, rotation of q and k 36 each, two residual sums 10 each; silu and
# product 10. Backward: casts of two gradients 6 each, two norms with sums 38 each, rotation 48 each, q, k and v put
# together 24; product, silu and halves put together 26.
# Compiled each is a pass or two: norms with residual sums 28 and 32, rotation 8 and 14; silu and product 6 and 10.
BLOCK_BYTES = {False: (328, 36), True: (82, 16)}
# of a logit, and of a weight in each micro-batch: rounded (6), the gradient cast (6) and added (12)
LOGIT_BYTES, WEIGHT_BYTES = {False: 32, True: 8}, 24
CLIP_BYTES = 12  # of a gradient: its norm, and scaled

# Of a parameter in a step, uncompiled and compiled, beside the products of matrices (see `Muown`). Uncompiled 40 are so
# that an update can be left out (`optim.core.skip_step.run_or_restore`, of weights and momentum).
STEP_BYTES = {Muown: (132, 32), Muon: (84, 32), Lion: (100, 100)}
OTHER_STEP_BYTES = (28, 28)  # fused AdamW reads four numbers and writes three


@dataclass(frozen=True)
class Update:
    """Seconds of the parts of an update."""

    products: float
    attention: float
    elementwise: float
    optimizer: float
    gradients: float  # their mean over ranks, and sending what each rank has updated

    @property
    def total(self) -> float:
        return self.products + self.attention + self.elementwise + self.optimizer + self.gradients


def update_time(
    sizes: Sizes,
    how: Pass,
    gpu: Gpu,
    optimizer: Combined,
    ranks: int,
    accumulation: int,
    owners: int,
    sent: int = FLOAT,
) -> Update:
    """Seconds of an update.

    Args:
        how: a micro-batch, of which there are `accumulation` on each of `ranks`.
        optimizer: may be on the meta device; spread over so many `owners`, 1 if every rank does all.
        sent: bytes of a number of the gradients on its way over the ranks.
    """
    rate = gpu.flops if how.autocast else gpu.float32_flops
    memory = gpu.bandwidth * FRACTIONS["memory"]
    tokens = how.tokens * accumulation
    again = 1 + sizes.activation_checkpointing / sizes.layers / 3  # a forward pass is a third
    products = 6 * (sizes.matrices * again + sizes.head) * tokens
    # half of the pairs, as the mask wants; 2 products forward and 5 backward, 2 FLOP each
    attention = 7 * how.seq_len * sizes.dim * sizes.layers * again * tokens
    of_dim, of_hidden = BLOCK_BYTES[how.compiled]
    wider = 1 if how.autocast else 1.5  # numbers of 4 bytes in place of some of 2
    of_block = wider * (of_dim * sizes.dim + of_hidden * sizes.hidden)
    moved = tokens * (sizes.layers * of_block * again + LOGIT_BYTES[how.compiled] * sizes.vocab_size)
    moved += accumulation * WEIGHT_BYTES * (sizes.matrices + sizes.head) + CLIP_BYTES * sizes.parameters
    # float32 has no tensor cores, nor FlashAttention: the two fractions are one there
    attained = FRACTIONS["attention"] if how.autocast else FRACTIONS["products"]
    return Update(
        products / (rate * FRACTIONS["products"]),
        attention / (rate * attained),
        moved / memory,
        _step(optimizer, gpu, owners, how),
        _sent(sizes, gpu, ranks, owners, sent),
    )


def _step(optimizer: Combined, gpu: Gpu, owners: int, how: Pass) -> float:
    """Seconds of the optimizer on the rank where it takes longest."""
    owner = assign_owners(optimizer, owners).owners
    seconds = [0.0] * owners
    for part in optimizer.optimizers:
        kinds = (b for kind, b in STEP_BYTES.items() if isinstance(part, kind))
        bytes_each = next(kinds, OTHER_STEP_BYTES)[how.compiled]
        for group in part.param_groups:
            # SOAP multiplies in float32; its QR decompositions, which no peak rate tells of, count as products
            half = "ns_steps" in group and how.autocast
            rate = (gpu.flops if half else gpu.float32_flops) * FRACTIONS["products"]
            for p in group["params"]:
                traffic = bytes_each * p.numel() / (gpu.bandwidth * FRACTIONS["memory"])
                seconds[owner[p]] += traffic + _products(p, group) / rate
    return max(seconds)


def _products(p: Tensor, group: Group) -> int:
    """FLOP of the products of matrices in an update of p."""
    return estimate_step_cost(p, group) - FLOPS_PER_BYTE * p.numel() * p.element_size()


def _sent(sizes: Sizes, gpu: Gpu, ranks: int, owners: int, sent: int) -> float:
    """Seconds of an all-reduce of gradients, and of the broadcasts of a sharded optimizer; a ring of all ranks."""
    if ranks == 1:
        return 0.0
    link = gpu.link_bandwidth if ranks <= gpu.gpus_per_node else min(gpu.link_bandwidth, NETWORK * gpu.gpus_per_node)
    gradients = 2 * (ranks - 1) / ranks * sent * sizes.parameters
    return (gradients + (FLOAT * sizes.parameters if owners > 1 else 0)) / (link * FRACTIONS["link"])
