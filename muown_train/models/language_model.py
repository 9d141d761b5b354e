"""What the trainer and the builder ask of a model, whatever its architecture."""

from typing import Any

from torch import Tensor, nn

from muown_train.config.checks import is_number
from muown_train.models.kv_cache import KeyValueCache


class LanguageModel(nn.Module):
    """A causal language model.

    `row_blocks` on a layer of its own declares the rows of a fused matrix, `role` that its weight is no plain matrix
    (see `muown_train.optim.parameter_roles`).
    """

    vocab_size: int  # rows of the embedding, at least the tokenizer's size
    seq_len: int  # longest input
    layers: int  # blocks
    dim: int  # width of the residual stream, and of all heads of attention together
    activation_checkpointing: int = 0  # number of blocks that recompute their activations in the backward pass
    softcap: float | None = None  # of the logits, see `cross_entropy.softcapped`

    def forward(self, inputs: Tensor, targets: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """Logits (B, T, vocab_size), or with targets (B, T) the summed cross-entropy in nats, a float32 scalar.

        Targets of -100 do not count, as in torch's cross-entropy. With a cache the inputs continue what it has seen,
        and are added to it. T, with what the cache has seen, may be anything up to seq_len.
        """
        raise NotImplementedError

    def positions(self, inputs: Tensor, cache: KeyValueCache | None) -> slice:
        """Where inputs (B, T) stand: behind what the cache has seen."""
        start = cache.length if cache is not None else 0
        end = start + inputs.shape[1]
        assert end <= self.seq_len, f"input of {end} tokens, model.seq_len is {self.seq_len}"
        return slice(start, end)

    def flops_per_token(self) -> float:
        """Floating-point operations of one token's forward and backward at T = seq_len.

        6 per weight that multiplies and 12 layers D T for attention, the convention of PaLM (Chowdhery et al. 2022,
        appendix B), which does not discount the causal mask.
        """
        raise NotImplementedError


def check_sizes(**sizes: object) -> None:
    """Refuse sizes of a model that are no positive integers.

    Raises:
        ValueError: naming the setting.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"model.{name}={size!r} must be a positive integer")


def check_positive(**numbers: Any) -> None:
    """Refuse numbers of a model that are not above 0 and finite.

    Raises:
        ValueError: naming the setting.
    """
    for name, number in numbers.items():
        if not is_number(number) or number <= 0:
            raise ValueError(f"model.{name}={number!r} must be above 0")


def check_heads(dim: int, heads: int) -> None:
    """Refuse a width that heads of even size, which can be rotated, do not divide.

    Raises:
        ValueError: naming both.
    """
    if dim % heads or (dim // heads) % 2:
        raise ValueError(f"model.dim={dim} does not split into model.heads={heads} heads of even size")
