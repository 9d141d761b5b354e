"""Qwen2 (Yang et al. 2024, arXiv 2407.10671): the model of `transformers`, built from sizes; nothing is downloaded.

Qwen2 has grouped-query attention with biases on q, k and v, which are separate matrices, RMSNorm, SwiGLU, RoPE and tied
embeddings. The modules are those of `transformers`. The loss is ours, since it never holds all logits. The attention is
ours too: when theirs is compiled it makes a mask (T, T) (transformers 5.24 with torch before 2.14), which
FlashAttention does not take.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, Qwen2Config, Qwen2ForCausalLM

from muown_train.config.checks import check_positive
from muown_train.models.attention import KeyValueCache, cached_attention, causal_attention
from muown_train.models.language_model import LanguageModel, check_heads, check_sizes

ATTENTION_NAME = "muown_train"  # the name of our attention in the register of transformers


def _compute_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Compute attention in the form that transformers calls; no attention weights are returned.

    q is (B, h, T, d); k and v have fewer heads, and more positions if there is a cache. The result is (B, T, h, d).
    """
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    y = (causal_attention if k.shape[2] == q.shape[2] else cached_attention)(q, k, v, scaling)
    return y.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, _compute_attention)
AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)


class Qwen2(LanguageModel):
    """Language model with tied embeddings; its attribute `qwen2` is the Qwen2ForCausalLM of transformers.

    Args:
        vocab_size: rows of the embedding; at least the tokenizer's size.
        layers, dim, heads: depth, width D, query heads; heads divides dim into heads of even size.
        kv_heads: heads of keys and values; divides heads.
        mlp_hidden: inner size of the MLP.
        seq_len: longest input T.
        rope_base: base of the rotation; 10000 as in the Muown paper and the first phase of Qwen2's pre-training. (The
            published model has 1000000.)
        norm_eps: epsilon of the norms.
        init_std: standard deviation of embeddings and matrices at initialisation; biases start at zero, gains at one.

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
        for key, value in (("rope_base", rope_base), ("norm_eps", norm_eps), ("init_std", init_std)):
            check_positive(f"model.{key}", value)
        if heads % kv_heads:
            raise ValueError(f"model.kv_heads={kv_heads} must divide model.heads={heads}")
        self.vocab_size, self.layers, self.dim, self.seq_len = vocab_size, layers, dim, seq_len
        self.head_dim = dim // heads
        other_settings: dict[str, Any] = {
            "attn_implementation": ATTENTION_NAME,
            "rope_theta": rope_base,  # the key before transformers 5; the next one since
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
            **other_settings,
        )
        self.qwen2 = Qwen2ForCausalLM(config)

    def list_blocks(self) -> Iterable[nn.Module]:
        return list(self.qwen2.model.layers)

    def name_attention(self, seq_len: int, autocast: bool) -> str | None:
        # under autocast q stays float32 until scaled_dot_product_attention itself casts it
        on_cpu = next(self.parameters()).device.type == "cpu"
        return super().name_attention(seq_len, autocast and not on_cpu)

    def forward(self, inputs: Tensor, targets: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        self.find_positions(inputs, cache)  # refuses an input that is too long
        their_cache = None if cache is None else _Cache(cache)
        # the cache is passed by position, since the name of its argument differs between versions of transformers
        x = self.qwen2.model(inputs, None, None, their_cache, use_cache=cache is not None)[0]  # (B, T, D)
        return self.apply_head(x, self.qwen2.lm_head.weight, targets)


class _Cache(DynamicCache):
    """A cache of transformers for one forward pass: it starts as a copy of ours and passes on what is added to it."""

    def __init__(self, ours: KeyValueCache) -> None:
        super().__init__()
        self.ours = ours
        for layer, (k, v) in ours.layers.items():
            super().update(k, v, layer)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        extended: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.ours.layers[layer_idx] = extended
        return extended
