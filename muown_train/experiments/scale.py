"""A small version of an experiment: overrides that shrink a run and keep its shape.

Widths keep their ratio as far as whole heads allow, MLPs keep their ratio to the width, and Qwen2 keeps its ratio of
heads to key/value heads; schedules and optimizers stay. The budget becomes a number of steps, or 20 tokens per
parameter, whatever it was, except that a budget in tokens per parameter keeps its ratio to 20.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from muown_train.config.compose import compose_config
from muown_train.config.overrides import parse_overrides

_HEADS = 4  # this many heads become one; a GPT with at most this many heads keeps them


@dataclass(frozen=True)
class Scale:
    """Sizes of the small run."""

    layers: int
    head_dim: int
    seq_len: int
    batch_tokens: int
    micro_batch: int
    steps: int | None  # None means 20 tokens per parameter
    valid_tokens: int
    evaluations: int  # approximate
    vocab_size: int = 4096


# A tiny run takes seconds and shows that everything works; a small one takes minutes on a CPU and shows an effect.
SCALES = {
    "tiny": Scale(2, 16, 64, 1024, 4, 30, 4096, 3),
    "small": Scale(4, 16, 256, 8192, 8, None, 262_144, 10),
}


def scale_down(scale: Scale, overrides: Sequence[str], later: Sequence[str] = ()) -> list[str]:
    """Return the overrides of the small version of a run.

    It has `data=stdlib` unless `later` sets something of data that stdlib does not have, which is all but `data.bos`.

    Args:
        overrides: the overrides of the full run, each key once.
        later: overrides that will follow those returned.

    Raises:
        ValueError: a model of this kind cannot be shrunk.
    """
    words = [word for word in overrides if word.partition("=")[0] != "data"]
    given = {override.key_or_group for override in parse_overrides(later)} - {"data.bos"}
    if not any(key.partition(".")[0] == "data" for key in given):
        words.append("data=stdlib")
    config: dict[str, Any] = OmegaConf.to_container(compose_config(words), resolve=True)  # type: ignore[assignment]
    model = _shrink_model(config["model"], scale)
    steps = scale.steps
    if steps is None:
        steps = round(20 * _estimate_parameters(model, scale) / scale.batch_tokens)
    steps = max(1, round(steps * (config["tokens_per_parameter"] or 20) / 20))
    every = max(1, steps // scale.evaluations)
    settings = {
        "seq_len": scale.seq_len,
        "batch_tokens": scale.batch_tokens,
        "micro_batch": scale.micro_batch,
        "tokens": steps * scale.batch_tokens,
        "tokens_per_parameter": None,
        "valid_tokens": scale.valid_tokens,
        "eval_every": every,
        "save_every": every,
        "compile": False,
        "sample_tokens": 0,
    }
    if config["keep_every"]:  # the small run keeps every checkpoint it saves
        settings["keep_every"] = every
    if config.get("probes"):
        settings["probe_every"] = every
    small = [f"++model.{key}={value}" for key, value in model.items()]
    small += [f"{key}={'null' if value is None else str(value).lower()}" for key, value in settings.items()]
    replaced = {word.partition("=")[0].lstrip("+") for word in small}
    return [*(word for word in words if word.partition("=")[0].lstrip("+") not in replaced), *small]


def _shrink_model(model: Mapping[str, Any], scale: Scale) -> dict[str, int]:
    """Return the sizes of a small model of the same kind."""
    kind = str(model["_target_"]).rpartition(".")[2]
    small = {"vocab_size": scale.vocab_size, "layers": scale.layers}
    if kind == "Speedrun":
        heads = max(1, round(model["dim"] / model["head_dim"] / _HEADS))
        return small | {"dim": heads * scale.head_dim, "head_dim": scale.head_dim}
    if kind == "Qwen2":
        kv_heads = max(1, round(model["kv_heads"] / _HEADS))
        heads = kv_heads * max(1, round(model["heads"] / _HEADS / kv_heads))
        small |= {"kv_heads": kv_heads}
    elif kind == "GPT":
        heads = model["heads"] if model["heads"] <= _HEADS else round(model["heads"] / _HEADS)
    else:
        raise ValueError(f"scale= is for GPT, Qwen2 and Speedrun, not for {kind}")
    dim = heads * scale.head_dim
    hidden = (model.get("mlp_hidden") or 8 * model["dim"] / 3) / model["dim"] * dim
    return small | {"dim": dim, "heads": heads, "mlp_hidden": 8 * round(hidden / 8)}


def _estimate_parameters(model: Mapping[str, int], scale: Scale) -> int:
    """Estimate the number of parameters in the embedding and the matrices.

    Every layer counts four matrices of D by D in attention and three in the MLP; the two of D by 4 D that Speedrun has
    are as many parameters.
    """
    dim = model["dim"]
    hidden = model.get("mlp_hidden", 8 * dim // 3)
    return model["vocab_size"] * dim + model["layers"] * (4 * dim * dim + 3 * dim * hidden)
