"""Qwen2 (Yang et al. 2024, arXiv 2407.10671): the model of `transformers`, built from sizes; nothing is downloaded.

Grouped-query attention with biases on q, k and v, which are matrices of their own, RMSNorm, SwiGLU, RoPE, embeddings
tied. Only the modules are theirs. The loss is ours, which never holds all logits, and so is the attention: theirs makes
a mask (T, T) when it is compiled (transformers 5.24 with torch before 2.14), which FlashAttention does not take.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from muown_train.models.attention import causal_attention
from muown_train.models.kv_cache import KeyValueCache, attention_after
from muown_train.models.language_model import LanguageModel, check_heads, check_positive, check_sizes
from muown_train.models.loss import linear_cross_entropy

try:
    from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, Qwen2Config, Qwen2ForCausalLM
except ImportError as error:
    raise ImportError(f"Qwen2 needs transformers: pip install -e '.[qwen2]' ({error})") from None

OURS = "muown_train"  # the name of this attention among theirs


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """q (B, h, T, d); k, v of fewer heads, and of more positions if there is a cache -> (B, T, h, d), no weights."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    y = (causal_attention if k.shape[2] == q.shape[2] else attention_after)(q, k, v, scaling)
    return y.transpose(1, 2).contiguous(), None


AttentionInterface.register(OURS, _attention)
AttentionMaskInterface.register(OURS, lambda *_, **__: None)


class Qwen2(LanguageModel):
    """Language model with tied embeddings; `.qwen2` is the Qwen2ForCausalLM.

    Args:
        vocab_size: rows of the embedding; at least the tokenizer's size.
        layers, dim, heads: depth, width D, query heads; heads divides dim into heads of even size.
        kv_heads: heads of keys and values; divides heads.
        mlp_hidden: inner size of the MLP.
        seq_len: longest input T.
        rope_base: of the rotation; 10000 as in the Muown paper and the first phase of Qwen2's pre-training. (The
            published model has 1000000.)
        norm_eps: of the norms.
        init_std: deviation of embeddings and matrices at first; biases are zero, gains one.

    Raises:
        ValueError: a size below 1, a number that is not above 0, or heads that do not divide.
    """

    def __init__(
        self,
        vocab_size: int,
        layers: int,
        dim: int,
        heads: int,
        kv_heads: int,
        mlp_hidden: int,
        seq_len: int,
        rope_base: float = 10_000.0,
        norm_eps: float = 1e-6,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, layers=layers, dim=dim, heads=heads, kv_heads=kv_heads)
        check_sizes(mlp_hidden=mlp_hidden, seq_len=seq_len)
        check_heads(dim, heads)
        check_positive(rope_base=rope_base, norm_eps=norm_eps, init_std=init_std)
        if heads % kv_heads:
            raise ValueError(f"model.kv_heads={kv_heads} must divide model.heads={heads}")
        self.vocab_size, self.layers, self.dim, self.seq_len = vocab_size, layers, dim, seq_len
        named: dict[str, Any] = {
            "attn_implementation": OURS,
            "rope_theta": rope_base,  # before transformers 5, and since:
            "rope_parameters": {"rope_type": "default", "rope_theta": rope_base},
        }
        config = Qwen2Config(
            vocab_size=vocab_size,
            hidden_size=dim,
            intermediate_size=mlp_hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=seq_len,
            rms_norm_eps=norm_eps,
            initializer_range=init_std,
            tie_word_embeddings=True,
            **named,
        )
        self.qwen2 = Qwen2ForCausalLM(config)

    def forward(self, inputs: Tensor, targets: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        self.positions(inputs, cache)
        theirs = None if cache is None else _Cache(cache)
        # by position: their name of the cache's argument differs between versions
        x = self.qwen2.model(inputs, None, None, theirs, use_cache=cache is not None)[0]  # (B, T, D)
        weight = self.qwen2.lm_head.weight
        if targets is None:
            return F.linear(x, weight)
        return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten())

    def flops_per_token(self) -> float:
        # the tied embedding multiplies once, as the head
        multiplying = sum(p.numel() for p in self.parameters() if p.ndim == 2)
        return 6.0 * multiplying + 12.0 * self.layers * self.dim * self.seq_len


class _Cache(DynamicCache):
    """A cache of theirs for one forward pass, filled from ours, which gets what is added."""

    def __init__(self, ours: KeyValueCache) -> None:
        super().__init__()
        self.ours = ours
        for layer, (k, v) in ours.layers.items():
            super().update(k, v, layer)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        whole: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.ours.layers[layer_idx] = whole
        return whole
