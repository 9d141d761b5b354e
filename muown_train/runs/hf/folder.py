"""Read a folder of `transformers` as weights and settings of this package, or say in a sentence what does not fit."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from muown_train.config.checks import check_int
from muown_train.config.instantiate import bind_target
from muown_train.config.stored_files import TEXT, Kind, check_entries
from muown_train.data.text.tokenizer import TOKENIZER, fingerprint_tokenizer
from muown_train.models.language_model import LanguageModel
from muown_train.runs.checkpoint_reader import check_finite
from muown_train.runs.hf import layouts
from muown_train.runs.hf.config_json import ORIGIN
from muown_train.runs.state import ModelState
from muown_train.runtime.atomic_files import open_regular, parse_json, read_regular

_ORIGIN: dict[str, Kind] = {"run|tokenizer_hash": TEXT}
_IGNORED = re.compile(r"^lm_head\.weight$|\.rotary_emb\.inv_freq$")  # tied weight; constant of old versions


@dataclass(frozen=True)
class TransformersFolder:
    """The content of a folder of transformers, in terms of this package."""

    model: dict[str, Any]  # settings of our model, with its `_target_`
    weights: dict[str, Tensor]  # float32 weights by our names
    tokenizer: bytes | None  # tokenizer.json
    tokenizer_hash: str | None  # fingerprint of the tokenizer it was exported with, else of tokenizer.json
    origin: dict[str, Any]  # `run` and `step` of an export of ours, else empty

    @property
    def parameters(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())


def is_transformers_folder(path: Path) -> bool:
    """Return whether a folder looks like one of transformers."""
    return (path / "config.json").is_file()


def read_transformers_folder(path: Path) -> TransformersFolder:
    """Read config.json, model*.safetensors and tokenizer.json. Nothing in it is run or unpickled.

    Raises:
        ValueError: it is not such a folder, or holds a model that this package does not have.
    """
    if not is_transformers_folder(path):
        raise ValueError(f"{path} has no config.json: give a folder of save_pretrained or of muown-train export")
    try:
        config = _read_json(path / "config.json")
        if config.get("quantization_config") is not None:
            raise ValueError("config.json has a quantization_config: quantised weights are not read")
        layout = layouts.find_layout_of_config(config)
        model = {"_target_": layout.TARGET, **layout.to_settings(config)}
        weights = layout.import_weights(_select_weights(_read_weights(path), model, layout), model)
        origin = _read_json(path / ORIGIN) if (path / ORIGIN).exists() else {}
        check_entries(origin, _ORIGIN)
        if "step" in origin:
            origin["step"] = check_int(f"{ORIGIN}: step", origin["step"], 0)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    tokenizer = read_regular(path / TOKENIZER, follow_link=True) if (path / TOKENIZER).exists() else None
    fingerprint = fingerprint_tokenizer(tokenizer) if tokenizer else None
    return TransformersFolder(model, weights, tokenizer, origin.get("tokenizer_hash", fingerprint), origin)


def _select_weights(
    theirs: Mapping[str, Tensor], settings: Mapping[str, Any], layout: layouts.Layout
) -> Mapping[str, Tensor]:
    """Return the weights that the model has, by their names.

    The model is made without memory, since a stranger's sizes may ask for any amount.

    Raises:
        ValueError: a weight is missing, has no place in the model or has another shape.
    """
    if settings["layers"] > len(theirs):
        raise ValueError(f"config.json has num_hidden_layers={settings['layers']}, and there are {len(theirs)} weights")
    try:
        with torch.device("meta"):
            model: LanguageModel = bind_target(settings, "model")()
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"config.json has sizes that no model can have: {str(error).splitlines()[0]}") from error
    wanted = layout.export_weights(ModelState(model).state_dict())
    if missing := wanted.keys() - theirs.keys():
        raise ValueError(f"there is no weight {min(missing)} in model*.safetensors")
    if odd := [name for name in theirs if name not in wanted and not _IGNORED.search(name)]:
        raise ValueError(f"there is a weight {min(odd)} ({len(odd)} such) that has no place in our model")
    for name, weight in wanted.items():
        if theirs[name].shape != weight.shape:
            shapes = f"{tuple(theirs[name].shape)}, by config.json it is {tuple(weight.shape)}"
            raise ValueError(f"{name} has the shape {shapes}")
    return {name: theirs[name] for name in wanted}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_regular(path, follow_link=True))
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return content


def _read_weights(path: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(path.glob("model*.safetensors")):
        try:
            open_regular(file, follow_link=True).close()
            weights |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file.name} is damaged: {error}") from None
    if not weights:
        raise ValueError("there is no model*.safetensors (pickled weights are not read)")
    integers = [name for name, weight in weights.items() if not weight.is_floating_point()]
    if integers:
        raise ValueError(f"{integers[0]} is {weights[integers[0]].dtype}: quantised weights are not read")
    return {name: check_finite(name, weight.to(torch.float32)) for name, weight in weights.items()}
