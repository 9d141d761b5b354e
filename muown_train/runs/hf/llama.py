"""Our GPT as `LlamaForCausalLM` of transformers: the same function, but q, k, v, gate and up are each a matrix."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, cat

from muown_train.models.gpt import compute_mlp_hidden
from muown_train.runs.hf.config_json import check_values, read_positive, read_rope_base, read_size

TARGET = "muown_train.models.gpt.GPT"
MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"
GROUP = "tiny"  # the option of our config group `model` to train on with

_OUTSIDE = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
# Names inside a block. A fused matrix of ours is their matrices, one below the other.
_INSIDE = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.out": ("mlp.down_proj",),
}


def to_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json, besides the vocabulary, for all arguments of GPT."""
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


def to_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of GPT for a config.json.

    Raises:
        ValueError: it describes a Llama that our GPT cannot be.
    """
    heads, dim = read_size(config, "num_attention_heads"), read_size(config, "hidden_size")
    wanted = {
        "tie_word_embeddings": (True, False),
        "attention_bias": (False, False),
        "mlp_bias": (False, False),
        "hidden_act": ("silu", "silu"),
    }
    check_values(config, MODEL_TYPE, wanted)
    for key, value in (("num_key_value_heads", heads), ("head_dim", dim // heads)):
        if config.get(key) is not None:  # transformers takes these values for null
            check_values(config, MODEL_TYPE, {key: (value, value)})
    hidden = read_size(config, "intermediate_size")
    return {
        "vocab_size": read_size(config, "vocab_size"),
        "layers": read_size(config, "num_hidden_layers"),
        "dim": dim,
        "heads": heads,
        "seq_len": read_size(config, "max_position_embeddings"),
        "mlp_hidden": None if hidden == compute_mlp_hidden(dim) else hidden,  # null is what GPT computes itself
        "rope_base": read_rope_base(config),
        "norm_eps": read_positive(config, "rms_norm_eps", 1e-6),
        "activation_checkpointing": 0,
    }


def export_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights under their names; the parts of a fused matrix share its memory."""
    theirs = {}
    for name, weight in weights.items():
        if name in _OUTSIDE:
            theirs[_OUTSIDE[name]] = weight
            continue
        _, layer, part = name.removesuffix(".weight").split(".", 2)
        for their_part, rows in zip(_INSIDE[part], weight.chunk(len(_INSIDE[part])), strict=True):
            theirs[f"model.layers.{layer}.{their_part}.weight"] = rows
    return theirs


def import_weights(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Invert `export_weights`. All weights must be there and have their shapes; others are left out."""
    ours = {name: weights[theirs] for name, theirs in _OUTSIDE.items()}
    for layer in range(settings["layers"]):
        for part, theirs in _INSIDE.items():
            ours[f"blocks.{layer}.{part}.weight"] = cat([weights[f"model.layers.{layer}.{t}.weight"] for t in theirs])
    return ours
