"""GPT as in the Muown paper: RoPE, RMSNorm, SwiGLU, tied embeddings, no biases (appendix "Experimental Details").

Choices that the paper leaves open follow the code its runs used: rotation base 500000, norm epsilon 1e-6, hidden size
of the MLP 8/3 of the width rounded up to a multiple of 256, q, k and v fused into one matrix of 3 D rows, gate and up
into one of 2 H rows. Heads and the rotation are laid out as in Llama of `transformers`, to exchange weights.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muown_train.config.checks import check_positive
from muown_train.models.attention import KeyValueCache, cached_attention, causal_attention
from muown_train.models.language_model import LanguageModel, check_heads, check_sizes


def compute_mlp_hidden(dim: int) -> int:
    """Return 8/3 of the width, rounded up to a multiple of 256."""
    return 256 * math.ceil(8 * dim / 3 / 256)


def build_rotary_table(head_dim: int, seq_len: int, base: float) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of RoPE (Su et al. 2021), each (T, head_dim), halves repeated ("rotate half")."""
    frequencies = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)  # (T, head_dim / 2)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x (B, heads, T, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class FusedLinear(nn.Linear):
    """Several linear layers without bias that share their input, as one matrix; `row_blocks` are the rows of each."""

    def __init__(self, dim: int, row_blocks: tuple[int, ...]) -> None:
        super().__init__(dim, sum(row_blocks), bias=False)
        self.row_blocks = row_blocks


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose gains take the dtype of its input, as its fused kernel asks; FSDP2 may gather them in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention: (B, T, D) -> (B, T, D)."""

    def __init__(self, dim: int, heads: int, layer: int) -> None:
        super().__init__()
        self.heads, self.layer = heads, layer
        self.qkv = FusedLinear(dim, (dim, dim, dim))
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)  # (B, h, T, d)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        y = causal_attention(q, k, v) if cache is None else cached_attention(q, *cache.extend(self.layer, k, v))
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, T, D))
        return out


class SwiGLU(nn.Module):
    """out(silu(gate(x)) * up(x)): (B, T, D) -> (B, T, D); gate is the upper half of the fused matrix."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.out(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """Pre-norm transformer block: (B, T, D) -> (B, T, D)."""

    def __init__(self, dim: int, heads: int, hidden: int, norm_eps: float, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, eps=norm_eps)
        self.attention = Attention(dim, heads, layer)
        self.mlp_norm = RMSNorm(dim, eps=norm_eps)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(LanguageModel):
    """Language model with tied embeddings.

    Args:
        vocab_size: rows of the embedding; at least the tokenizer's size.
        layers, dim, heads: depth, width D, attention heads; heads divides dim into heads of even size.
        seq_len: longest input T.
        mlp_hidden: inner size of the MLP, `compute_mlp_hidden(dim)` if None.
        rope_base, norm_eps: rotation base and epsilon of the norms, see the module's docstring.
        activation_checkpointing: number of blocks, from the first on, that keep only their input for the backward
            pass, which computes their activations again: less memory for more work, with the same results.
        init_std: standard deviation of embeddings and matrices at initialisation, divided by sqrt(2 layers) for
            matrices that write into the residual stream; gains start at one.

    Raises:
        ValueError: a size below 1, a number that is not above 0, a width that the heads do not divide, or an
            activation_checkpointing that exceeds the number of blocks.
    """

    def __init__(
        self,
        vocab_size: int,
        layers: int,
        dim: int,
        heads: int,
        seq_len: int,
        mlp_hidden: int | None = None,
        rope_base: float = 500_000.0,
        norm_eps: float = 1e-6,
        activation_checkpointing: int = 0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        hidden = compute_mlp_hidden(dim) if mlp_hidden is None else mlp_hidden
        check_sizes(vocab_size=vocab_size, layers=layers, dim=dim, heads=heads, seq_len=seq_len, mlp_hidden=hidden)
        check_heads(dim, heads)
        count = activation_checkpointing
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= layers:
            raise ValueError(
                f"model.activation_checkpointing={count!r} must be a whole number of blocks, 0 to {layers}"
            )
        for key, value in (("rope_base", rope_base), ("norm_eps", norm_eps), ("init_std", init_std)):
            check_positive(f"model.{key}", value)
        self.activation_checkpointing, self.init_std = activation_checkpointing, init_std
        self.vocab_size, self.layers, self.dim, self.seq_len = vocab_size, layers, dim, seq_len
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden, norm_eps, i) for i in range(layers))
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.register_rotary_table(*build_rotary_table(dim // heads, seq_len, rope_base))
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw embeddings and matrices from normal distributions; `init_std` gives their deviations."""
        std = self.init_std
        nn.init.normal_(self.embedding.weight, std=std)
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.init.normal_(block.attention.qkv.weight, std=std)
            nn.init.normal_(block.mlp.gate_up.weight, std=std)
            for out in (block.attention.out, block.mlp.out):
                nn.init.normal_(out.weight, std=std / math.sqrt(2 * self.layers))

    def forward(self, inputs: Tensor, targets: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        x = self.norm(self.run_blocks(self.embedding(inputs), cache))  # (B, T, D)
        return self.apply_head(x, self.embedding.weight, targets)
