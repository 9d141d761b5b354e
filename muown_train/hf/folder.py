"""A folder of `transformers` as weights and settings of ours, or a sentence on what does not fit."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from muown_train.data.tokenizer import TOKENIZER, fingerprint_of
from muown_train.hf import layouts
from muown_train.hf.common import ORIGIN


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
        layout = layouts.of_config(config)
        settings = layout.settings(config)
        weights = layout.imported(_weights(path), settings)
    except KeyError as error:
        raise ValueError(f"{path}: there is no weight {error.args[0]} in model*.safetensors") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    tokenizer = (path / TOKENIZER).read_bytes() if (path / TOKENIZER).exists() else None
    origin = _object(path / ORIGIN) if (path / ORIGIN).exists() else {}
    found = fingerprint_of(tokenizer) if tokenizer else None
    return Folder(
        {"_target_": layout.TARGET, **settings}, weights, tokenizer, origin.get("tokenizer_hash", found), origin
    )


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
    return {name: weight.to(torch.float32) for name, weight in weights.items()}
