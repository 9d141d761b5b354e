"""Export a checkpoint as a folder that `transformers` loads. The export itself needs no transformers."""

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
from muown_train.runs.hf.model_card import render_model_card
from muown_train.runs.saved_run import SavedRun
from muown_train.runtime.atomic_files import atomic_folder

WEIGHTS = "model.safetensors"
_NAMES = {  # the files of an export
    *(ORIGIN, WEIGHTS, TOKENIZER),
    *("config.json", "generation_config.json", "tokenizer_config.json", "README.md"),
}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")  # weights with a row for each token


def export_run(saved: SavedRun, out: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Write the folder `out`, whole or not at all. An earlier export there is replaced.

    Rows of the vocabulary for which the tokenizer has no token are cut off. As in training, the tokenizer adds no
    tokens of its own, and takes special tokens that a text spells for text unless `data.special_tokens` was true.

    Args:
        dtype: the dtype of the weights, float32 or bfloat16.

    Returns:
        A summary: `architecture`, `parameters`, `vocabulary`, `cut` rows, `bytes` of weights.

    Raises:
        ValueError: transformers has no such model, the run has no tokenizer, its weights do not fit its model or are
            not finite, or `out` is something else, or another process writes it.
    """
    layout = layouts.find_layout(saved.config.model["_target_"])
    with atomic_folder(out, check_replaceable) as partial:
        return _write_export(saved, partial, dtype, layout)


def _write_export(saved: SavedRun, folder: Path, dtype: torch.dtype, layout: layouts.Layout) -> dict[str, Any]:
    """Do the work of `export_run` in an empty folder."""
    tokenizer = saved.load_tokenizer()
    weights = layout.export_weights(saved.load_checked_weights())
    settings = list_settings(saved.config.model, "model")
    for name in weights:
        if name in _VOCABULARY:
            weights[name] = weights[name][: tokenizer.size]
    try:
        weights = {name: check_finite(name, weight.to(dtype)).contiguous() for name, weight in weights.items()}
    except ValueError as error:
        raise ValueError(f"{saved.checkpoint}: {error}") from None
    summary = {
        "architecture": layout.ARCHITECTURE,
        "parameters": sum(weight.numel() for weight in weights.values()),
        "vocabulary": tokenizer.size,
        "cut": settings["vocab_size"] - tokenizer.size,
        "bytes": sum(weight.numel() * weight.element_size() for weight in weights.values()),
    }
    # transformers 5 calls this key dtype, but reads the older name as well
    common = {"torch_dtype": str(dtype).removeprefix("torch."), "vocab_size": tokenizer.size}
    ends = {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}
    kind = {"architectures": [layout.ARCHITECTURE], "model_type": layout.MODEL_TYPE}
    origin = {"run": saved.folder.name, "step": saved.step, "tokenizer_hash": tokenizer.fingerprint}
    origin |= tokenizer.options
    texts = {
        "config.json": _to_json(kind | layout.to_config(settings) | common | ends),
        "generation_config.json": _to_json(ends | {"pad_token_id": tokenizer.end_of_text}),
        **_build_tokenizer_files(tokenizer, settings["seq_len"]),
        "README.md": render_model_card(saved, summary, settings),
    }
    _write_files(folder, origin, texts, weights)
    return summary


def check_replaceable(out: Path) -> None:
    """Check that an export may be written to a folder.

    Raises:
        ValueError: it exists and is not an earlier export, or holds a file that no export writes.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ValueError(f"{out} is no folder: give another --out")
    if out.exists() and any(out.iterdir()) and not (out / ORIGIN).exists():
        raise ValueError(f"{out} exists and is no earlier export (it has no {ORIGIN}): give another --out")
    if out.exists() and (others := {path.name for path in out.iterdir()} - _NAMES):
        raise ValueError(f"{out} holds {min(others)} besides an earlier export: move it, or give another --out")


def _build_tokenizer_files(tokenizer: HubTokenizer, longest: int) -> dict[str, str]:
    content = tokenizer.raw.decode()
    if tokenizer.adds_tokens:  # the model has never seen the tokens that are added around every text
        content = _to_json(json.loads(content) | {"post_processor": None})
    end = tokenizer.decode([tokenizer.end_of_text])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # every version takes tokenizer.json as it is
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        # without this transformers 4 passes on other inputs, which no model here takes
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": not tokenizer.special_tokens,  # the model has seen their letters, not them
    }
    return {TOKENIZER: content, "tokenizer_config.json": _to_json(settings)}


def _write_files(folder: Path, origin: Mapping[str, Any], texts: Mapping[str, str], weights: dict[str, Tensor]) -> None:
    for name, text in {ORIGIN: _to_json(origin), **texts}.items():
        (folder / name).write_text(text, encoding="utf-8")
    try:
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # "Error while serializing: I/O error: No space left on device (os error 28)"
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder / WEIGHTS)) from error
    (folder / WEIGHTS).chmod((folder / ORIGIN).stat().st_mode)  # safetensors lets only the owner read it


def _to_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
