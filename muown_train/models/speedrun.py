"""The GPT of modded-nanogpt's record of 2024-10-10, which the paper's figure of learning rates and widths trains.

github.com/KellerJordan/modded-nanogpt, records/track_1_short/2024-10-10_Muon: heads of 64, RMSNorm without gains, GELU
MLP of 4 D, the attention branch times 1 / sqrt(2 layers), tied embeddings, no biases, PyTorch's initialisation of
linear layers, also for the tied embedding. The record rotates the other way round, by -t. That is the same model with
the halves of every head of q and k exchanged, a difference that neither the initialisation nor the optimizers see.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from muown_train.config.checks import check_positive
from muown_train.models.attention import KeyValueCache
from muown_train.models.gpt import Attention, build_rotary_table
from muown_train.models.language_model import LanguageModel, check_sizes


class MLP(nn.Module):
    """out(gelu(up(x))) of inner size 4 D: (B, T, D) -> (B, T, D)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.out = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Pre-norm transformer block: (B, T, D) -> (B, T, D)."""

    def __init__(self, dim: int, heads: int, attention_scale: float, norm_eps: float, layer: int) -> None:
        super().__init__()
        self.attention_scale, self.norm_eps = attention_scale, norm_eps
        self.attention = Attention(dim, heads, layer)
        self.mlp = MLP(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x = x + self.attention_scale * self.attention(rms_norm(x, self.norm_eps), cos, sin, cache)
        x = x + self.mlp(rms_norm(x, self.norm_eps))
        return x


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Divide x by the root of its mean square along the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


class Speedrun(LanguageModel):
    """Language model with tied embeddings.

    Args:
        vocab_size: rows of the embedding; at least the tokenizer's size.
        layers, dim: depth, width D.
        seq_len: longest input T.
        head_dim: size of a head; there are D / head_dim heads.
        rope_base, norm_eps: rotation base and epsilon of the norms; the defaults are those of the record.

    Raises:
        ValueError: a size below 1, a number that is not above 0, heads of odd size, or a width that is not a
            multiple of them.
    """

    def __init__(
        self,
        vocab_size: int,
        layers: int,
        dim: int,
        seq_len: int,
        head_dim: int = 64,
        rope_base: float = 10_000.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, layers=layers, dim=dim, seq_len=seq_len, head_dim=head_dim)
        check_positive("model.rope_base", rope_base)
        check_positive("model.norm_eps", norm_eps)
        if dim % head_dim or head_dim % 2:
            raise ValueError(f"model.dim={dim} must be a multiple of model.head_dim={head_dim}, which must be even")
        self.vocab_size, self.layers, self.dim, self.seq_len = vocab_size, layers, dim, seq_len
        self.norm_eps = norm_eps
        scale = 1 / math.sqrt(2 * layers)
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, dim // head_dim, scale, norm_eps, i) for i in range(layers))
        self.register_rotary_table(*build_rotary_table(head_dim, seq_len, rope_base))
        # the initialisation of a linear layer, in place of an embedding's N(0, 1)
        nn.init.kaiming_uniform_(self.embedding.weight, a=math.sqrt(5))

    def forward(self, inputs: Tensor, targets: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        x = rms_norm(self.run_blocks(self.embedding(inputs), cache), self.norm_eps)  # (B, T, D)
        return self.apply_head(x, self.embedding.weight, targets)
