"""Our Qwen2, which wraps `Qwen2ForCausalLM` of transformers: its weights have their names already, after a prefix."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from muown_train.runs.hf.config_json import demand, positive, rope_base, size

TARGET = "muown_train.models.qwen2.Qwen2"
MODEL_TYPE = "qwen2"
ARCHITECTURE = "Qwen2ForCausalLM"
GROUP = "qwen2_0_5b"  # model= to train on with
PREFIX = "qwen2."  # the attribute of our model that is theirs


def config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json holds besides the vocabulary, of all arguments of our Qwen2."""
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


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of our Qwen2, of a config.json.

    Raises:
        ValueError: a Qwen2 that ours is not.
    """
    wanted = {
        "tie_word_embeddings": (True, False),
        "hidden_act": ("silu", "silu"),
        "use_sliding_window": (False, False),
    }
    demand(config, MODEL_TYPE, wanted)
    return {
        "vocab_size": size(config, "vocab_size"),
        "layers": size(config, "num_hidden_layers"),
        "dim": size(config, "hidden_size"),
        "heads": size(config, "num_attention_heads"),
        "kv_heads": size(config, "num_key_value_heads"),
        "seq_len": size(config, "max_position_embeddings"),
        "mlp_hidden": size(config, "intermediate_size"),
        "rope_base": rope_base(config),
        "norm_eps": positive(config, "rms_norm_eps", 1e-6),
    }


def exported(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under their names."""
    return {name.removeprefix(PREFIX): weight for name, weight in weights.items()}


def imported(weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """The inverse of `exported`."""
    return {PREFIX + name: weight for name, weight in weights.items()}
