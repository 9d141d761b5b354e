"""Our GPT as `LlamaForCausalLM` of transformers: the same function, with q, k, v, gate and up each a matrix."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, cat

from muown_train.models.gpt import compute_mlp_hidden
from muown_train.runs.hf.config_json import demand, positive, rope_base, size

TARGET = "muown_train.models.gpt.GPT"
MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"
GROUP = "tiny"  # model= to train on with

_OUTSIDE = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
# of a block; a fused matrix is theirs one below the other
_INSIDE = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.out": ("mlp.down_proj",),
}


def config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json holds besides the vocabulary, of all arguments of GPT."""
    dim, heads = settings["dim"], settings["heads"]
    hidden = settings["mlp_hidden"]
    return {
        "hidden_size": dim,
        "intermediate_size": compute_mlp_hidden(dim) if hidden is None else hidden,
        "num_hidden_layers": settings["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": dim // heads,
        "hidden_act": "silu",
        "max_position_embeddings": settings["seq_len"],
        "rms_norm_eps": settings["norm_eps"],
        "rope_theta": settings["rope_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of GPT, of a config.json.

    Raises:
        ValueError: a Llama that our GPT is not.
    """
    heads, dim = size(config, "num_attention_heads"), size(config, "hidden_size")
    wanted = {
        "tie_word_embeddings": (True, False),
        "attention_bias": (False, False),
        "mlp_bias": (False, False),
        "hidden_act": ("silu", "silu"),
    }
    demand(config, MODEL_TYPE, wanted)
    for key, value in (("num_key_value_heads", heads), ("head_dim", dim // heads)):
        if config.get(key) is not None:  # transformers takes these for a null
            demand(config, MODEL_TYPE, {key: (value, value)})
    hidden = size(config, "intermediate_size")
    return {
        "vocab_size": size(config, "vocab_size"),
        "layers": size(config, "num_hidden_layers"),
        "dim": dim,
        "heads": heads,
        "seq_len": size(config, "max_position_embeddings"),
        "mlp_hidden": None if hidden == compute_mlp_hidden(dim) else hidden,  # as GPT has it by itself
        "rope_base": rope_base(config),
        "norm_eps": positive(config, "rms_norm_eps", 1e-6),
        "activation_checkpointing": 0,
    }


def exported(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under their names; parts of fused ones share memory with them."""
    theirs = {}
    for name, weight in weights.items():
        if name in _OUTSIDE:
            theirs[_OUTSIDE[name]] = weight
            continue
        _, layer, part = name.removesuffix(".weight").split(".", 2)
        for their_part, rows in zip(_INSIDE[part], weight.chunk(len(_INSIDE[part])), strict=True):
            theirs[f"model.layers.{layer}.{their_part}.weight"] = rows
    return theirs


def imported(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """The inverse of `exported`, of weights that are all there and of their shapes; others are left out."""
    ours = {name: weights[theirs] for name, theirs in _OUTSIDE.items()}
    for layer in range(settings["layers"]):
        for part, theirs in _INSIDE.items():
            ours[f"blocks.{layer}.{part}.weight"] = cat([weights[f"model.layers.{layer}.{t}.weight"] for t in theirs])
    return ours
