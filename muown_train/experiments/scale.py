"""The same experiment in small: overrides that shrink a run and leave its shape.

Widths keep their ratio as far as whole heads allow, MLPs theirs to the width, Qwen2 its groups of heads; schedules and
optimizers stay. The budget is so many updates, or 20 tokens per parameter, whatever it was; but a budget in tokens per
parameter keeps its ratio to 20.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from muown_train.config.compose import compose_config
from muown_train.config.overrides import parse_overrides

_HEADS = 4  # heads of a run for one of the small one; a GPT of so many or fewer keeps them


@dataclass(frozen=True)
class Scale:
    """Sizes of the small run."""

    layers: int
    head_dim: int
    seq_len: int
    batch_tokens: int
    micro_batch: int
    updates: int | None  # None: 20 tokens per parameter
    valid_tokens: int
    evaluations: int  # about so many
    vocab_size: int = 4096


# tiny: seconds a run, to see that all goes through. small: minutes a run on a CPU, to see an effect.
SCALES = {
    "tiny": Scale(2, 16, 64, 1024, 4, 30, 4096, 3),
    "small": Scale(4, 16, 256, 8192, 8, None, 262_144, 10),
}


def scaled(scale: Scale, overrides: Sequence[str], further: Sequence[str] = ()) -> list[str]:
    """Overrides of a run as it is small, these among them; `data=stdlib` unless `further` says something of data.

    Args:
        overrides: of the run as it is, without two of one key.
        further: overrides that are to follow what is returned.

    Raises:
        ValueError: the model is of a kind that cannot be shrunk here.
    """
    words = [word for word in overrides if word.partition("=")[0] != "data"]
    if not any(override.key_or_group.partition(".")[0] == "data" for override in parse_overrides(further)):
        words.append("data=stdlib")
    config: dict[str, Any] = OmegaConf.to_container(compose_config(words), resolve=True)  # type: ignore[assignment]
    small = _model(config["model"], scale)
    steps = scale.updates
    if steps is None:
        steps = round(20 * _parameters(small, scale) / scale.batch_tokens)
    steps = max(1, round(steps * (config["tokens_per_parameter"] or 20) / 20))
    every = max(1, steps // scale.evaluations)
    plain = {
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
    if config["keep_every"]:  # all of its checkpoints
        plain["keep_every"] = every
    if config.get("probes"):
        plain["probe_every"] = every
    sizes = [f"++model.{key}={value}" for key, value in small.items()]
    values = [f"{key}={'null' if value is None else str(value).lower()}" for key, value in plain.items()]
    own = {word.partition("=")[0].lstrip("+") for word in (*sizes, *values)}
    return [*(word for word in words if word.partition("=")[0].lstrip("+") not in own), *sizes, *values]


def _model(model: Mapping[str, Any], scale: Scale) -> dict[str, int]:
    """Sizes of a model of the same kind."""
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
        raise ValueError(f"a scale is for GPT, Qwen2 and Speedrun, not for {kind}")
    dim = heads * scale.head_dim
    hidden = (model.get("mlp_hidden") or 8 * model["dim"] / 3) / model["dim"] * dim
    return small | {"dim": dim, "heads": heads, "mlp_hidden": 8 * round(hidden / 8)}


def _parameters(small: Mapping[str, int], scale: Scale) -> int:
    """About how many there are: of embedding and matrices, as if attention had four of D by D and the MLP three."""
    dim = small["dim"]
    hidden = small.get("mlp_hidden", 8 * dim // 3)  # two of D by 4 D, as Speedrun has, are as many
    return small["vocab_size"] * dim + small["layers"] * (4 * dim * dim + 3 * dim * hidden)
