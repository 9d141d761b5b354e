"""A folder of `transformers` as the folder of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from muown_train.config.compose import composed, new_folder
from muown_train.config.instantiate import all_settings
from muown_train.data.text.tokenizer import HubTokenizer
from muown_train.runs.hf import layouts
from muown_train.runs.hf.folder import read_folder
from muown_train.runs.saved_run import write_run


@dataclass(frozen=True)
class Imported:
    """What was written."""

    model: dict[str, Any]  # its settings with `_target_`
    parameters: int
    tokenizer: bool  # whether there was one


def import_folder(path: Path, out: Path) -> Imported:
    """Write the model of a folder of transformers to `out`, for all that reads runs; weights become float32.

    Raises:
        ValueError: it holds a model that none of ours is, a weight is missing or has another shape, its tokenizer is of
            no use to us, or `out` cannot be written to.
    """
    new_folder(out)
    theirs = read_folder(path)
    config: dict[str, Any] = OmegaConf.to_container(composed([]), resolve=True)  # type: ignore[assignment]
    # what it was trained on and how is not known
    config |= {"model": theirs.model, "seq_len": theirs.model["seq_len"], "data": {}, "optim": {}, "schedule": {}}
    config |= {"tokens": None, "name": None}
    data: dict[str, Any] = {}
    try:
        if theirs.tokenizer:
            size = HubTokenizer(str(path), theirs.tokenizer).size
            data = {"tokenizer": str(path), "tokenizer_hash": theirs.tokenizer_hash, "vocabulary": size}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    step, origin = theirs.origin.get("step", 0), {"imported": str(path)} | theirs.origin
    write_run(out, theirs.weights, config, step, data, theirs.tokenizer, origin)
    parameters = sum(weight.numel() for weight in theirs.weights.values())
    return Imported(theirs.model, parameters, theirs.tokenizer is not None)


def training_settings(model: dict[str, Any]) -> list[str]:
    """What the command line needs besides `init_from` to train on with a model of these settings."""
    group = f"model={layouts.of_target(model['_target_']).GROUP}"
    known = dict(composed([group]).model)  # others take a plus
    usual = all_settings({str(key): value for key, value in known.items()}, "model")
    given = [key for key in usual if key in model and key != "seq_len" and model[key] != usual[key]]
    return [group, *(f"{'' if key in known else '+'}model.{key}={model[key]}" for key in given)]
