"""Our Qwen2, which wraps `Qwen2ForCausalLM` of transformers: its weights have the same names after a prefix."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from muown_train.runs.hf.config_json import check_values, read_positive, read_rope_base, read_size

TARGET = "muown_train.models.qwen2.Qwen2"
MODEL_TYPE = "qwen2"
ARCHITECTURE = "Qwen2ForCausalLM"
GROUP = "qwen2_0_5b"  # the option of our config group `model` to train on with
PREFIX = "qwen2."  # the attribute of our model that holds theirs


def to_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json, besides the vocabulary, for all arguments of our Qwen2."""
    return {
        "hidden_size": settings["dim"],
        "intermediate_size": settings["mlp_hidden"],
        "num_hidden_layers": settings["layers"],
        "num_attention_heads": settings["heads"],
        "num_key_value_heads": settings["kv_heads"],
        "hidden_act": "silu",
        "max_position_embeddings": settings["seq_len"],
        "rms_norm_eps": settings["norm_eps"],
        "rope_theta": settings["rope_base"],
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    }


def to_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of our Qwen2 for a config.json.

    Raises:
        ValueError: it describes a Qwen2 that ours cannot be.
    """
    wanted = {
        "tie_word_embeddings": (True, False),
        "hidden_act": ("silu", "silu"),
        "use_sliding_window": (False, False),
    }
    check_values(config, MODEL_TYPE, wanted)
    return {
        "vocab_size": read_size(config, "vocab_size"),
        "layers": read_size(config, "num_hidden_layers"),
        "dim": read_size(config, "hidden_size"),
        "heads": read_size(config, "num_attention_heads"),
        "kv_heads": read_size(config, "num_key_value_heads"),
        "seq_len": read_size(config, "max_position_embeddings"),
        "mlp_hidden": read_size(config, "intermediate_size"),
        "rope_base": read_rope_base(config),
        "norm_eps": read_positive(config, "rms_norm_eps", 1e-6),
    }


def export_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights under their names."""
    return {name.removeprefix(PREFIX): weight for name, weight in weights.items()}


def import_weights(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Invert `export_weights`."""
    return {PREFIX + name: weight for name, weight in weights.items()}
