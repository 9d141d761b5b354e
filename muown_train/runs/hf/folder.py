"""A folder of `transformers` as weights and settings of ours, or a sentence on what does not fit."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from muown_train.config.instantiate import factory, whole
from muown_train.data.text.tokenizer import TOKENIZER, fingerprint_of
from muown_train.models.language_model import LanguageModel
from muown_train.runs.checkpoint import ModelState
from muown_train.runs.hf import layouts
from muown_train.runs.hf.config_json import ORIGIN
from muown_train.runs.weights import check_finite

_IGNORED = re.compile(r"^lm_head\.weight$|\.rotary_emb\.inv_freq$")  # tied; a constant that old versions stored


@dataclass(frozen=True)
class Folder:
    """What was read."""

    model: dict[str, Any]  # settings of our model, with its `_target_`
    weights: dict[str, Tensor]  # by our names, float32
    tokenizer: bytes | None  # tokenizer.json
    tokenizer_hash: str | None  # fingerprint of the tokenizer that it was exported with, else of tokenizer.json
    origin: dict[str, Any]  # of an export of ours: `run`, `step`


def is_folder(path: Path) -> bool:
    """Whether it looks like a folder of transformers."""
    return (path / "config.json").is_file()


def read_folder(path: Path) -> Folder:
    """Read config.json, model*.safetensors and tokenizer.json. Nothing in it is run or unpickled.

    Raises:
        ValueError: it is no such folder, or holds a model that none of ours is.
    """
    if not is_folder(path):
        raise ValueError(f"{path} has no config.json: give a folder of save_pretrained or scripts/export_hf.py")
    try:
        config = _object(path / "config.json")
        if config.get("quantization_config") is not None:
            raise ValueError("config.json has a quantization_config: quantised weights are not read")
        layout = layouts.of_config(config)
        model = {"_target_": layout.TARGET, **layout.settings(config)}
        weights = layout.imported(_fitting(_weights(path), model, layout), model)
        origin = _object(path / ORIGIN) if (path / ORIGIN).exists() else {}
        if "step" in origin:
            origin["step"] = whole(f"{ORIGIN}: step", origin["step"], 0)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    tokenizer = (path / TOKENIZER).read_bytes() if (path / TOKENIZER).exists() else None
    found = fingerprint_of(tokenizer) if tokenizer else None
    return Folder(model, weights, tokenizer, origin.get("tokenizer_hash", found), origin)


def _fitting(theirs: Mapping[str, Tensor], settings: Mapping[str, Any], layout: layouts.Layout) -> Mapping[str, Tensor]:
    """Those of the weights that the model has, by their names; it is made without memory, which sizes may ask for.

    Raises:
        ValueError: naming one that is missing, has no place or has another shape.
    """
    if settings["layers"] > len(theirs):
        raise ValueError(f"config.json has num_hidden_layers={settings['layers']}, and there are {len(theirs)} weights")
    try:
        with torch.device("meta"):
            model: LanguageModel = factory(settings, "model")()
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"config.json has sizes that no model can have: {str(error).splitlines()[0]}") from error
    wanted = layout.exported(ModelState(model).state_dict())
    if missing := wanted.keys() - theirs.keys():
        raise ValueError(f"there is no weight {min(missing)} in model*.safetensors")
    if odd := [name for name in theirs if name not in wanted and not _IGNORED.search(name)]:
        raise ValueError(f"there is a weight {min(odd)} ({len(odd)} such) that has no place in our model")
    for name, weight in wanted.items():
        if theirs[name].shape != weight.shape:
            shapes = f"{tuple(theirs[name].shape)}, by config.json it is {tuple(weight.shape)}"
            raise ValueError(f"{name} has the shape {shapes}")
    return {name: theirs[name] for name in wanted}


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return content


def _weights(path: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(path.glob("model*.safetensors")):
        try:
            weights |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file.name} is damaged: {error}") from None
    if not weights:
        raise ValueError("there is no model*.safetensors (pickled weights are not read)")
    integers = [name for name, weight in weights.items() if not weight.is_floating_point()]
    if integers:
        raise ValueError(f"{integers[0]} is {weights[integers[0]].dtype}: quantised weights are not read")
    return {name: check_finite(name, weight.to(torch.float32)) for name, weight in weights.items()}
