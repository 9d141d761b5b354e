"""The GPT of Track 3 of modded-nanogpt, a benchmark of optimizers that fixes data, batch and architecture.

github.com/KellerJordan/modded-nanogpt, records/track_3_optimization: heads of 128 whose queries and keys are
normalised, RoPE on half of each head, relu^2 MLP of 4 D, RMSNorm with gains (after the embedding too), biases
everywhere, an untied head with capped logits. The embedding's weights are bfloat16 themselves and are updated as such.
Without autocast the whole forward pass is in float32; under autocast the residual stream is bfloat16, as in the
benchmark.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muown_train.models.attention import KeyValueCache, cached_attention, causal_attention
from muown_train.models.gpt import rotate
from muown_train.models.language_model import LanguageModel, check_sizes

ATTENTION_SCALE = 0.12  # the factor of q k^T, in place of 1 / sqrt(128) = 0.088
LOWEST_FREQUENCY = 1 / 1024  # radians per token, in the half of each head that is rotated
NORM_EPS = torch.finfo(torch.float32).eps  # torch's default for RMSNorm


def build_half_rotary_table(head_dim: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for `rotate`, each (T, head_dim); the second half of the head_dim / 2 pairs stay as is.

    The angles are negative, so that pairs turn in the direction of the benchmark's code.
    """
    count = head_dim // 4
    turning = LOWEST_FREQUENCY ** (torch.arange(count, dtype=torch.float32) / max(1, count - 1))
    frequencies = torch.cat((turning, torch.zeros_like(turning)))  # (head_dim / 2,)
    angles = -torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


class RMSNorm(nn.RMSNorm):
    """RMSNorm with gains that computes in the dtype of its input, also under autocast."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention: (B, T, D) -> (B, T, D)."""

    def __init__(self, dim: int, heads: int, layer: int) -> None:
        super().__init__()
        self.heads, self.layer = heads, layer
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        B, T, D = x.shape
        shape = B, T, self.heads, D // self.heads
        q, k, v = (project(x).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))  # (B, h, T, d)
        q, k = (rotate(F.rms_norm(y, shape[-1:], eps=NORM_EPS), cos, sin).to(v.dtype) for y in (q, k))
        if cache is None:
            y = causal_attention(q, k, v, ATTENTION_SCALE)
        else:
            y = cached_attention(q, *cache.extend(self.layer, k, v), ATTENTION_SCALE)
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, T, D))
        return out


class MLP(nn.Module):
    """out(relu(up(x))^2): (B, T, D) -> (B, T, D)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.relu(self.up(x)).square())
        return out


class Block(nn.Module):
    """Pre-norm transformer block: (B, T, D) -> (B, T, D)."""

    def __init__(self, dim: int, heads: int, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = Attention(dim, heads, layer)
        self.mlp_norm = RMSNorm(dim)
        self.mlp = MLP(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Track3(LanguageModel):
    """The benchmark's model.

    Args:
        vocab_size: rows of the embedding and of the head; at least the tokenizer's size.
        layers, dim, heads: depth, width D, attention heads; a head's size is a multiple of 4.
        seq_len: longest input T.

    Raises:
        ValueError: a size below 1, or a width that does not split into such heads.
    """

    softcap = 15.0
    tied_embeddings = False

    def __init__(
        self, vocab_size: int = 50304, layers: int = 12, dim: int = 768, heads: int = 6, seq_len: int = 1024
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, layers=layers, dim=dim, heads=heads, seq_len=seq_len)
        if dim % (4 * heads):
            raise ValueError(f"model.dim={dim} does not split into model.heads={heads} heads of a multiple of 4")
        self.vocab_size, self.layers, self.dim, self.seq_len = vocab_size, layers, dim, seq_len
        self.embedding = nn.Embedding(vocab_size, dim, dtype=torch.bfloat16)
        self.embedding_norm = RMSNorm(dim)
        self.blocks = nn.ModuleList(Block(dim, heads, i) for i in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab_size)
        self.register_rotary_table(*build_half_rotary_table(dim // heads, seq_len))
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set the initial weights.

        The embedding is N(0, 1). The head and the matrices that write into the residual stream are zero. The other
        matrices have the standard deviation sqrt(0.33 / fan-in), and biases are zero.
        """
        nn.init.normal_(self.embedding.weight)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=math.sqrt(0.33 / module.in_features))
                nn.init.zeros_(module.bias)
        zeros = [self.head]
        for block in self.blocks:
            assert isinstance(block, Block)
            zeros += [block.attention.out, block.mlp.out]
        for layer in zeros:
            nn.init.zeros_(layer.weight)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head, whose weight optimizers do not treat as a matrix (see `muown_train.optim.param_groups`)."""
        return self.head

    def forward(self, inputs: Tensor, targets: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        x = self.embedding(inputs)  # (B, T, D)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.norm.weight.dtype)
        x = self.norm(self.run_blocks(self.embedding_norm(x), cache))
        return self.apply_head(x, self.head.weight, targets, self.head.bias)
