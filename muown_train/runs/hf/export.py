"""A checkpoint as a folder that `transformers` loads. Written without transformers: JSON and safetensors."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from muown_train.config.instantiate import list_settings
from muown_train.data.text.tokenizer import TOKENIZER, HubTokenizer
from muown_train.runs.checkpoint_reader import check_finite
from muown_train.runs.hf import layouts
from muown_train.runs.hf.config_json import ORIGIN
from muown_train.runs.hf.model_card import card
from muown_train.runs.saved_run import SavedRun
from muown_train.runtime.atomic_files import atomic_folder

WEIGHTS = "model.safetensors"
_NAMES = {  # of all that an export writes
    *(ORIGIN, WEIGHTS, TOKENIZER),
    *("config.json", "generation_config.json", "tokenizer_config.json", "README.md"),
}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")  # a row for each token


def export_run(saved: SavedRun, out: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Write the folder `out`, whole or not at all; an earlier export there is replaced.

    The rows of the vocabulary that the tokenizer has no token for are cut off. The tokenizer adds no tokens of its own,
    as it did not in training.

    Args:
        dtype: of the weights, float32 or bfloat16.

    Returns:
        What is said of it: `architecture`, `parameters`, `vocabulary`, `cut` rows, `bytes` of weights.

    Raises:
        ValueError: transformers has no such model, the run has no tokenizer, its weights do not fit its model or are
            not finite, or `out` is something else or being written by another process.
    """
    layout = layouts.of_target(saved.config.model["_target_"])
    with atomic_folder(out, replaceable) as partial:
        return _exported(saved, partial, dtype, layout)


def _exported(saved: SavedRun, folder: Path, dtype: torch.dtype, layout: layouts.Layout) -> dict[str, Any]:
    """The work of `export`, to an empty folder."""
    tokenizer = saved.load_tokenizer()
    weights = layout.exported(saved.load_checked_weights())
    settings = list_settings(saved.config.model, "model")
    for name in weights:
        if name in _VOCABULARY:
            weights[name] = weights[name][: tokenizer.size]
    try:
        weights = {name: check_finite(name, weight.to(dtype)).contiguous() for name, weight in weights.items()}
    except ValueError as error:
        raise ValueError(f"{saved.checkpoint}: {error}") from None
    facts = {
        "architecture": layout.ARCHITECTURE,
        "parameters": sum(weight.numel() for weight in weights.values()),
        "vocabulary": tokenizer.size,
        "cut": settings["vocab_size"] - tokenizer.size,
        "bytes": sum(weight.numel() * weight.element_size() for weight in weights.values()),
    }
    # transformers 5 calls it dtype and reads the older name as well
    common = {"torch_dtype": str(dtype).removeprefix("torch."), "vocab_size": tokenizer.size}
    ends = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    kind = {"architectures": [layout.ARCHITECTURE], "model_type": layout.MODEL_TYPE}
    origin = {"run": saved.folder.name, "step": saved.step, "tokenizer_hash": tokenizer.fingerprint}
    texts = {
        "config.json": _json(kind | layout.config(settings) | common | ends),
        "generation_config.json": _json(ends | {"pad_token_id": tokenizer.end_of_text}),
        **_tokenizer_files(tokenizer, settings["seq_len"]),
        "README.md": card(saved, facts, settings),
    }
    _write(folder, origin, texts, weights)
    return facts


def replaceable(out: Path) -> None:
    """Check that an export may be put there.

    Raises:
        ValueError: it exists and is no earlier export, or holds what no export writes.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ValueError(f"{out} is no folder: give another --out")
    if out.exists() and any(out.iterdir()) and not (out / ORIGIN).exists():
        raise ValueError(f"{out} exists and is no earlier export (it has no {ORIGIN}): give another --out")
    if out.exists() and (others := {path.name for path in out.iterdir()} - _NAMES):
        raise ValueError(f"{out} holds {min(others)} besides an earlier export: move it, or give another --out")


def _tokenizer_files(tokenizer: HubTokenizer, longest: int) -> dict[str, str]:
    described = tokenizer.raw.decode()
    if tokenizer.adds_tokens:  # around every text, where the model has never seen them
        described = _json(json.loads(described) | {"post_processor": None})
    end = tokenizer.decode([tokenizer.end_of_text])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is, in all versions
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "model_input_names": ["input_ids", "attention_mask"],  # before transformers 5 also what no model here takes
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }
    return {TOKENIZER: described, "tokenizer_config.json": _json(settings)}


def _write(folder: Path, origin: Mapping[str, Any], texts: Mapping[str, str], weights: dict[str, Tensor]) -> None:
    for name, text in {ORIGIN: _json(origin), **texts}.items():
        (folder / name).write_text(text, encoding="utf-8")
    try:
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # "Error while serializing: I/O error: No space left on device (os error 28)"
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder / WEIGHTS)) from error
    (folder / WEIGHTS).chmod((folder / ORIGIN).stat().st_mode)  # safetensors leaves it to its owner alone


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
