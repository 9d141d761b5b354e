"""The interface of all models, and `build_model`, which builds the configured one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from muown_train.config.instantiate import bind_target
from muown_train.models.attention import KeyValueCache, name_implementation
from muown_train.models.loss import Differentiate, differentiate_logits, linear_cross_entropy, softcap_logits


class LanguageModel(nn.Module):
    """A causal language model.

    A layer may have the attributes `row_blocks`, the rows of each part of a fused matrix, and `role`, which says that
    its weight is not a plain matrix (see `muown_train.optim.param_groups`).
    """

    vocab_size: int  # rows of the embedding, at least the tokenizer's size
    seq_len: int  # longest input
    layers: int  # number of blocks
    dim: int  # width of the residual stream, and of all heads of attention together
    activation_checkpointing: int = 0  # number of blocks that recompute their activations in the backward pass
    softcap: float | None = None  # bound of the logits, see `loss.softcap_logits`
    tied_embeddings: bool = True  # the weights of the embedding are those of the head
    head_dim: int | None = None  # width of a head of attention
    cos: Tensor  # (seq_len, head_dim), see `register_rotary_table`
    sin: Tensor
    differentiate_logits: Differentiate = staticmethod(differentiate_logits)
    blocks: nn.ModuleList  # each maps (x, cos, sin, cache) to (B, T, D), see `run_blocks`

    def forward(self, inputs: Tensor, targets: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """Return logits (B, T, vocab_size), or with targets (B, T) the summed cross-entropy in nats, a float32 scalar.

        Targets of -100 do not count, as in torch's cross-entropy. With a cache the inputs continue what it holds and
        are added to it. T plus the length of the cache may be at most seq_len.
        """
        raise NotImplementedError

    def find_positions(self, inputs: Tensor, cache: KeyValueCache | None) -> slice:
        """Return the positions of inputs (B, T, …), which follow those in the cache."""
        start = cache.length if cache is not None else 0
        end = start + inputs.shape[1]
        assert end <= self.seq_len, f"input of {end} tokens, model.seq_len is {self.seq_len}"
        return slice(start, end)

    def register_rotary_table(self, cos: Tensor, sin: Tensor) -> None:
        """Keep the cosines and sines of the rotary embedding as buffers, which checkpoints leave out."""
        self.head_dim = cos.shape[-1]
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def run_blocks(self, x: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Return the output of `blocks` for embedded inputs x (B, T, D), whose positions follow those in the cache.

        The first `activation_checkpointing` blocks keep only their input for the backward pass.
        """
        positions = self.find_positions(x, cache)
        cos, sin = self.cos[positions], self.sin[positions]
        recomputed_blocks = self.activation_checkpointing if torch.is_grad_enabled() else 0
        for i, block in enumerate(self.blocks):
            if i < recomputed_blocks:  # blocks draw no random numbers, so there is no generator state to preserve
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin, cache)
        return x

    def list_blocks(self) -> Iterable[nn.Module]:
        """Return the blocks, which have the same code and differ in their weights; without blocks the model itself."""
        return getattr(self, "blocks", [self])

    def compile_blocks(self) -> None:
        """Compile each block, and what the head computes besides products, when they first run.

        One program serves all blocks, where a compiled model has the program of a block once for each. Inside
        `torch.compiler.set_stance("force_eager")` the blocks run as if they were not compiled.
        """
        for block in self.list_blocks():
            block.compile()
        self.differentiate_logits = torch.compile(differentiate_logits)

    def apply_head(self, x: Tensor, weight: Tensor, targets: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Return what `forward` returns for the final states x (B, T, D), by the head's weight (vocab_size, D)."""
        if targets is not None:
            flat = x.flatten(0, 1), weight, targets.flatten()
            return linear_cross_entropy(*flat, bias, self.softcap, self.differentiate_logits)
        logits = F.linear(x, weight, bias)
        return logits if self.softcap is None else softcap_logits(logits.float(), self.softcap)

    def name_attention(self, seq_len: int, autocast: bool) -> str | None:
        """Return what computes attention in training, see `name_implementation`; None where `head_dim` is not known.

        Args:
            seq_len: tokens of a row.
            autocast: whether forward passes are in bfloat16.
        """
        if self.head_dim is None:
            return None
        shape, device = (1, self.dim // self.head_dim, seq_len, self.head_dim), next(self.parameters()).device
        dtype = torch.bfloat16 if autocast else torch.float32
        return name_implementation(torch.empty(shape, dtype=dtype, device=device, requires_grad=True))

    def flops_per_token(self) -> float:
        """Return the floating-point operations of one token's forward and backward pass at T = seq_len.

        They are 6 for each weight that multiplies and 12 layers D T for attention, the convention of PaLM (Chowdhery
        et al. 2022, appendix B), which does not discount the causal mask. A tied embedding multiplies once, as the
        head; one of its own is only looked up.
        """
        multiplying = sum(p.numel() for p in self.parameters() if p.ndim == 2)
        if not self.tied_embeddings:
            multiplying -= self.vocab_size * self.dim
        return 6.0 * multiplying + 12.0 * self.layers * self.dim * self.seq_len


def build_model(settings: Mapping[str, Any], seq_len: int, trust: Sequence[str] = ()) -> LanguageModel:
    """Build the model that the `model` section of a configuration describes.

    Args:
        seq_len: length of the rows that the model is to read.
        trust: targets that are allowed besides those of the package, see `bind_target`.

    Raises:
        ValueError: a setting is wrong, or the model reads fewer than `seq_len` tokens.
    """
    model: LanguageModel = bind_target(settings, "model", trust=trust)()
    if model.seq_len < seq_len:
        raise ValueError(f"model.seq_len={model.seq_len} is shorter than seq_len={seq_len}, the rows it is to train on")
    return model


LARGEST_SIZE, MOST_LAYERS = 2**24, 4096  # beyond these even the shapes of the weights take too long, or overflow


def check_sizes(**sizes: object) -> None:
    """Refuse sizes of a model that are not positive integers, also 768.0, since sizes are stored as they are given.

    Sizes are at most LARGEST_SIZE, and there are at most MOST_LAYERS layers.

    Raises:
        ValueError: naming the setting.
    """
    for name, size in sizes.items():
        most = MOST_LAYERS if name == "layers" else LARGEST_SIZE
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most:
            raise ValueError(f"model.{name}={size!r} must be a positive integer of at most {most:,}")


def check_heads(dim: int, heads: int) -> None:
    """Refuse a width that does not split into heads of even size; a head of odd size cannot be rotated.

    Raises:
        ValueError: naming both.
    """
    if dim % heads or (dim // heads) % 2:
        raise ValueError(f"model.dim={dim} does not split into model.heads={heads} heads of even size")
