"""How much memory an update takes, from sizes alone: nothing is trained, and no tensor is made.

What autograd keeps of a block was read off its saved tensors (`torch.autograd.graph.saved_tensors_hooks`) on a CPU,
whose estimates a test compares with `peak_memory`. On GPUs, where nothing of this has been measured, two things
differ: RMSNorm is one operation that keeps its input and a number per token, where on CPUs it keeps the normalised
input besides; and attention is FlashAttention, which keeps no probabilities. What a compiled model keeps was read off
once on a CPU with torch 2.13 (two blocks, flash attention; kept 2 % less than there, 5 % more at most): other versions
may choose otherwise. What other architectures keep is traced (`traced.py`), as if not compiled: they may keep less.

All sizes are in bytes. N = rows T tokens of a micro-batch, s = 2 bytes under autocast and 4 without.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from muown_train.analysis.cost.traced import Kept, kept_by
from muown_train.models.attention import prefers_blocks, split_into_blocks
from muown_train.models.gpt import GPT
from muown_train.models.language_model import LanguageModel
from muown_train.models.loss import choose_chunk_rows
from muown_train.optim import SOAP, Combined, Lion, parameter_roles
from muown_train.optim.core.base import Group
from muown_train.optim.core.matrix import MAX_BATCH_ELEMENTS, MatrixOptimizer
from muown_train.optim.core.skip_step import split_into_chunks
from muown_train.optim.sharding import assign_owners

FLOAT = 4  # bytes of weights, gradients, optimizer state and the residual stream


@dataclass(frozen=True)
class Pass:
    """How a micro-batch is computed: rows of seq_len tokens, in bfloat16 where autocast says so, on "cpu" or "cuda"."""

    rows: int
    seq_len: int
    autocast: bool
    device: str = "cuda"
    compiled: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len

    @property
    def width(self) -> int:
        """Bytes of a number in products of matrices."""
        return 2 if self.autocast else FLOAT


@dataclass(frozen=True)
class Sizes:
    """What a model of any architecture is made of, in numbers of its weights and widths."""

    matrices: int  # weights of the blocks that multiply
    head: int  # weights that make the logits: the embedding's, where it is tied
    parameters: int
    layers: int
    dim: int  # of the residual stream, and of all heads of attention together
    hidden: int  # of the MLP
    vocab_size: int
    activation_checkpointing: int = 0  # of the layers, which keep only their input for the backward pass
    heads: int = 0  # of GPT
    softcapped: bool = False  # of logits
    traced: Kept | None = None  # by a pass of a model that is no GPT, whose blocks are known


def sizes_of(model: LanguageModel, how: Pass) -> Sizes:
    """Count a model by the roles of its parameters, and trace it if it is no GPT; it may be on the meta device."""
    roles = parameter_roles(model)
    of: dict[str, list[Tensor]] = {"matrix": [], "embedding": [], "head": [], "vector": []}
    for name, p in model.named_parameters():
        of[roles[name].role].append(p)
    gpt = isinstance(model, GPT)
    return Sizes(
        sum(p.numel() for p in of["matrix"]),
        sum(p.numel() for p in of["head"] or of["embedding"]),
        sum(p.numel() for p in model.parameters()),
        model.layers,
        model.dim,
        max(p.shape[1] for p in of["matrix"]),  # what the MLP's last matrix takes in
        model.vocab_size,
        model.activation_checkpointing,
        model.blocks[0].attention.heads if gpt else 0,  # type: ignore[index, union-attr]
        model.softcap is not None,
        None if gpt else kept_by(model, how.seq_len, how.autocast),
    )


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes. What is not needed at the same time is not added up: see `peak`."""

    weights: int
    gradients: int
    state: int  # of the optimizer
    activations: int  # kept for the backward pass, with the bfloat16 copies of the weights
    head: int  # of the head and the loss at most, and of the backward pass as it begins
    step: int  # of the optimizer's step, when there are no activations

    @property
    def peak(self) -> int:
        lasting = self.weights + self.gradients + self.state
        return lasting + max(self.activations + self.head, self.step)


def kept_by_block(sizes: Sizes, how: Pass) -> int:
    """What a block keeps for its backward pass, weights aside.

    Two norms keep the residual stream (4 D each), what comes out of them is the input of a product (s D each, which
    without autocast is the norm's own output). Gate and up keep 2 H, silu(gate) and its product with up H each; a
    compiled model computes silu again, and nothing else.
    """
    D, H, s = sizes.dim, sizes.hidden, how.width
    norms = 2 * (FLOAT * D + s * D + FLOAT)
    if how.device == "cpu" and not how.compiled:
        norms += 2 * FLOAT * D  # the normalised input
    mlp = (3 if how.compiled else 4) * H * s
    return how.tokens * (norms + mlp) + _kept_by_attention(sizes, how)


def _kept_by_attention(sizes: Sizes, how: Pass) -> int:
    D, s, N = sizes.dim, how.width, how.tokens
    out = N * D * s  # the input of the output projection
    if prefers_blocks(how.device, torch.bfloat16 if how.autocast else torch.float32, how.seq_len):
        pairs = sum((end - start) * end for start, end in split_into_blocks(how.seq_len))
        return 3 * N * D * s + out + s * how.rows * sizes.heads * pairs
    # q and k rotated, and v, a view into the output of the product with the fused matrix, all of which it keeps; and
    # the logarithm of each softmax's sum
    return 5 * N * D * s + out + FLOAT * N * sizes.heads


def copies(sizes: Sizes, how: Pass) -> int:
    """Weights of the blocks in bfloat16, which autocast keeps until it ends, after the backward pass."""
    return 2 * sizes.matrices if how.autocast else 0


def activations(sizes: Sizes, how: Pass) -> int:
    """What is kept when the forward pass has come to the head."""
    if sizes.traced is not None:
        return sizes.traced.fixed + how.rows * sizes.traced.per_row
    residual = FLOAT * how.tokens * sizes.dim
    block = kept_by_block(sizes, how)
    last = 2 * residual if how.device == "cpu" and not how.compiled else residual  # the norm before the head
    ids = 8 * how.tokens
    return (
        sizes.activation_checkpointing * residual
        + (sizes.layers - sizes.activation_checkpointing) * block
        + last
        + ids
        + copies(sizes, how)
    )


def head(sizes: Sizes, how: Pass) -> int:
    """What the head takes at most: while it makes the loss and both gradients, or as the backward pass begins.

    Gradients of x (N, D) and of the weight (V, D), as `models.loss` makes them in the forward pass, are there
    all the time; a model compiled under autocast keeps what each chunk adds to the latter, in bfloat16, and adds them
    up in the backward pass. A chunk has n V logits.
    """
    D, V, N, s = sizes.dim, sizes.vocab_size, how.tokens, how.width
    n = choose_chunk_rows(N, V, D, torch.device(how.device))
    inputs = s * N * D + (FLOAT * N * D + 2 * sizes.head if how.autocast else 0)  # x; x in float32, the weight rounded
    if how.compiled:
        kept = s * N * D + (2 * math.ceil(N / n) if how.autocast else FLOAT) * sizes.head
        return kept + max(inputs + 8 * n * V, backward_begins(sizes, how))
    # logits, their float32 copy, log p; with more than one chunk log p and the gradient of the one before as well
    per_logit, before, at_gradient = (10, 6, 6) if how.autocast else (8, 4, 4)
    if sizes.softcapped:  # float32 logits before and after, the factor between them and its cube, which is kept
        per_logit, before, at_gradient = 16, before + 4, at_gradient + 4
    per_logit += before if n < N else 0
    # the last: p and the logits' gradient, while the product with x is made
    chunk = max(per_logit * n * V, at_gradient * n * V + s * sizes.head)
    kept = s * N * D + FLOAT * sizes.head
    return kept + max(inputs + chunk, backward_begins(sizes, how))


def backward_begins(sizes: Sizes, how: Pass) -> int:
    """What the backward pass needs besides what is kept: the head's gradients once more, scaled; then the last block's.

    In the last block's MLP it is the gradient of the residual stream, those of silu(gate) up and of both factors, of
    which the first replaces what was kept.
    """
    D, N = sizes.dim, how.tokens
    scaled = how.width * N * D + FLOAT * sizes.head
    # by the last block the unscaled gradient (V, D) is gone; the residual stream's comes twice there
    return max(scaled, _in_a_block(sizes, how) + FLOAT * N * D)


def _in_a_block(sizes: Sizes, how: Pass) -> int:
    """The most that the backward pass of a block takes besides what the block kept."""
    return how.tokens * (FLOAT * sizes.dim + 2 * how.width * sizes.hidden)


def backward_ends(sizes: Sizes, how: Pass) -> int:
    """What the end of the backward pass takes at most besides the gradients: the embedding's comes in two parts."""
    return copies(sizes, how) + FLOAT * (2 * how.tokens * sizes.dim + 2 * sizes.head) + 8 * how.tokens


def computed_again(sizes: Sizes, how: Pass, block: int) -> int:
    """What the backward pass takes in checkpointed block number `block`, which keeps all for a while.

    Besides gradients; the blocks after it are done with, of those before it there is the input.
    """
    before = FLOAT * how.tokens * sizes.dim * block + copies(sizes, how) + FLOAT * sizes.head + 8 * how.tokens
    return before + kept_by_block(sizes, how) + _in_a_block(sizes, how)


def micro_batch(sizes: Sizes, how: Pass, gradients: bool = True) -> int:
    """The most that one forward and backward pass takes besides weights, gradients included.

    Args:
        gradients: whether they exist already; else the pass makes them, those of the last blocks first.
    """
    blocks = FLOAT * sizes.matrices
    first = FLOAT * sizes.parameters if gradients else 0
    most = max(first + activations(sizes, how) + head(sizes, how), (first or blocks) + backward_ends(sizes, how))
    for block in range(sizes.activation_checkpointing):
        made = first or blocks * (sizes.layers - 1 - block) // sizes.layers
        most = max(most, made + computed_again(sizes, how, block))
    return most


def memory(sizes: Sizes, how: Pass, of_ranks: Iterable[tuple[int, int]]) -> Memory:
    """What the rank needs that needs most.

    Args:
        of_ranks: what each takes for the optimizer, see `optimizer_memory`.
    """
    gradients = FLOAT * sizes.parameters
    kept = activations(sizes, how)
    # at the head, or in the backward pass where that needs more, as with checkpointed blocks
    taken = micro_batch(sizes, how) - FLOAT * sizes.parameters - kept
    each = (Memory(gradients, gradients, state, kept, taken, step) for state, step in of_ranks)
    return max(each, key=lambda memory: memory.peak)


def largest_micro_batch(
    sizes: Sizes, how: Pass, rows: int, room: int, of_ranks: Sequence[tuple[int, int]]
) -> tuple[int, Memory] | None:
    """The most rows of a micro-batch that fit, and what they take; None where not even one does.

    Args:
        rows: of an update on a rank, which micro-batches divide; room: bytes there are; of_ranks: see `memory`.
    """
    for size in sorted((size for size in range(1, rows + 1) if rows % size == 0), reverse=True):
        needed = memory(sizes, replace(how, rows=size), of_ranks)
        if needed.peak <= room:
            return size, needed
    return None


def optimizer_memory(optimizer: Combined, ranks: int, device: str, iterates_in: int) -> list[tuple[int, int]]:
    """(state, temporary memory of a step) of each rank that the optimizer is spread over by `shard`.

    Args:
        optimizer: may be on the meta device, and have no state yet.
        iterates_in: bytes of a number in the orthogonalisation.
    """
    owners = assign_owners(optimizer, ranks).owners
    state, step = [0] * ranks, [0] * ranks
    for part in optimizer.optimizers:
        lazily = None if any(part.state.values()) else _kept_per_number(part)
        owned: defaultdict[int, list[tuple[Tensor, Group]]] = defaultdict(list)
        for group in part.param_groups:
            for p in group["params"]:
                rank = owners[p]
                owned[rank].append((p, group))
                tensors = sum(t.nbytes for t in part.state[p].values()) if lazily is None else lazily * p.nbytes
                state[rank] += int(tensors)
        for rank, parameters in owned.items():
            step[rank] = max(step[rank], _temporary(part, parameters, device, iterates_in))
    return list(zip(state, step, strict=True))


def _kept_per_number(part: Optimizer) -> float:
    """Numbers of state for each number of a parameter, of an optimizer that makes its state with the first step."""
    probe = nn.Parameter(torch.zeros(64, 64))
    probe.grad = torch.zeros_like(probe)
    part.add_param_group({"params": [("probe", probe)]})  # the others have no gradient and stay as they are
    part.step()
    kept = sum(tensor.numel() for tensor in part.state.pop(probe).values())
    part.param_groups.pop()
    return float(round(kept / probe.numel(), 2))


def _temporary(part: Optimizer, parameters: list[tuple[Tensor, Group]], device: str, iterates_in: int) -> int:
    """What a step on these parameters takes besides weights, gradients and state."""
    if isinstance(part, MatrixOptimizer):
        return max(_of_batches(parameters, device, iterates_in), default=0)
    if isinstance(part, SOAP):
        return max(_of_refinement(p, group) for p, group in parameters)
    if part.defaults.get("fused"):
        return 0
    if device == "cpu" and not isinstance(part, Lion):
        return 0  # torch's own take one parameter after the other there
    by_group: defaultdict[int, list[Tensor]] = defaultdict(list)
    for p, group in parameters:
        by_group[id(group)].append(p)
    if isinstance(part, Lion) and device != "cpu":  # and copies of weights and state, in case the update is left out
        chunks = (chunk for group in by_group.values() for chunk in split_into_chunks(group))
        return max(3 * sum(p.nbytes for p in chunk) for chunk in chunks)
    return max(sum(p.nbytes for p in group) for group in by_group.values())  # a copy of each parameter


def _of_refinement(p: Tensor, group: Group) -> int:
    """SOAP's step when it brings eigenvectors up to date: of a side (k, k) four, of the matrix three."""
    shapes = [(rows, *p.shape[1:]) for rows in group["blocks"] or p.shape[:1]]
    sides: list[int] = [k for shape in shapes for k in shape if p.ndim == 2 and k <= group["max_precondition_dim"]]
    matrix: int = max(math.prod(shape) for shape in shapes)
    return FLOAT * (4 * max(sides, default=0) ** 2 + 3 * matrix)


def _of_batches(parameters: list[tuple[Tensor, Group]], device: str, iterates_in: int) -> Iterator[int]:
    """What each stack of equal matrices takes while it is orthogonalised and applied (`optim.base`)."""
    alike: defaultdict[tuple[int, int], int] = defaultdict(int)
    copied = 0  # of one matrix, while what the stack gave is applied
    for p, group in parameters:
        # by the row statistics of NorMuon; by the weight decay of Muown; on GPUs in case that the update is left out
        copies = ("beta2" in group) + 2 * bool("magnitude" in group and group["weight_decay"]) + (device != "cpu")
        copied = max(copied, copies)
        for rows in group["blocks"] or (p.shape[0],):
            alike[rows, p.shape[1]] += 1
    for (m, n), count in alike.items():
        k, one = min(count, max(1, MAX_BATCH_ELEMENTS.get(device, 2**26) // (m * n))), FLOAT * m * n
        grams = (4 if max(m, n) >= 2 * min(m, n) else 2) * min(m, n) ** 2
        iteration = one + iterates_in * (2 * m * n + grams)  # X, and two of Y
        result = 2 * one + (iterates_in * m * n if iterates_in != FLOAT else 0)  # X, O, and what O is a copy of
        yield max(k * iteration, k * result, (2 * k + copied) * one)
