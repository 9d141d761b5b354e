"""Check that a configuration may continue the run that a folder already holds."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from muown_train.config.instantiate import list_defaults
from muown_train.config.renamed_names import update_stored_config
from muown_train.runtime.redaction import redact_tree

# entries of a run's data metadata that tell its data from others
DATA_IDENTITY = (
    *("mixture", "content", "tokenizer_hash", "end_of_text"),
    *("special_tokens", "bos", "revision", "held_out_content"),
)
# dotted keys of the configuration that must stay as they were
_FIXED = (
    *("model", "data", "seq_len", "batch_tokens", "seed", "init_from", "checkpoint"),
    *("optim._target_", "optim.rest._target_"),
)
_PATHS = ("init_from", "checkpoint")
_MAY_CHANGE = ("data.retries", "model.activation_checkpointing")


def check_same_run(folder: Path, metadata: Mapping[str, Any] | None, config: Mapping[str, Any]) -> list[str]:
    """Refuse a configuration that cannot continue from the checkpoints in a folder.

    Where the hash of the data's content is known it tells whether the data are the same (`check_same_data`), and the
    settings that say where they lie may change.

    Args:
        metadata: the newest checkpoint's, with its `config`; None where there is no checkpoint.
        config: the configuration that is to continue the run, as plain data.

    Returns:
        A description of each setting of the data that has changed.

    Raises:
        ValueError: a setting that must stay has changed; the message names it with both values.
    """
    stored = update_stored_config((metadata or {}).get("config") or {})
    has_content = _get(metadata, "data.content") is not None
    moved = []
    for key in _FIXED if metadata else ():
        old, new = _get(stored, key), redact_tree(_get(config, key))
        differences = list(_list_differences(key, old, new))
        if key == "data" and has_content and _get(old, "_target_") == _get(new, "_target_"):
            moved = [f"{k} was {before}, is {now}" for k, before, now in differences]
        elif differences:
            key, old, new = differences[0]
            raise ValueError(
                f"{folder} holds a run with {key}={old}, this one has {key}={new}: "
                "give it another name, or the old setting"
            )
    return moved


def check_same_data(folder: Path, metadata: Mapping[str, Any] | None, data: Mapping[str, Any]) -> None:
    """Refuse data that are not those of the checkpoints in a folder, although the settings are the same.

    Args:
        metadata: the newest checkpoint's, with its `data`; None where there is no checkpoint.
        data: metadata of the data that are to be trained on.

    Raises:
        ValueError: the data differ; the message names the first entry that does.
    """
    for key in DATA_IDENTITY if metadata else ():
        old, new = _get(metadata, f"data.{key}"), redact_tree(data.get(key))
        if old != new and key == "tokenizer_hash":
            raise ValueError(
                f"{folder} holds a run with another tokenizer ({_get(metadata, 'data.tokenizer')} of "
                f"{_get(metadata, 'data.vocabulary')} entries, hash {old}; this one is {data.get('tokenizer')} of "
                f"{data.get('vocabulary')}, hash {new}): give it another name, or go on with the run's own by "
                f"data.tokenizer={folder / 'tokenizer.json'}"
            )
        if old != new:
            raise ValueError(
                f"{folder} holds a run on other data ({key} was {old}, is {new}): "
                "give it another name, or the data as they were"
            )


def _list_differences(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted key and both values of each setting that must stay and differs, at any depth."""
    if isinstance(old, dict) and isinstance(new, dict):
        # a setting that did not exist yet counts as its default, which is how the run was trained
        defaults = list_defaults(new, key)
        old, new = ({**tree, **{k: v for k, v in defaults.items() if k not in tree}} for tree in (old, new))
        for k in {**old, **new}:
            yield from _list_differences(f"{key}.{k}", old.get(k), new.get(k))
    elif old != new and not (key in _PATHS and _is_same_path(old, new)) and not _may_change(key):
        yield key, old, new


def _may_change(key: str) -> bool:
    """Return whether a setting may change; one of a source of a mix is as free as it is without the mix."""
    return re.sub(r"^data\.sources\.[^.]+\.", "data.", key) in _MAY_CHANGE


def _is_same_path(old: Any, new: Any) -> bool:
    """Return whether two paths, relative to this folder or absolute, lead to the same place."""
    return isinstance(old, str) and isinstance(new, str) and os.path.realpath(old) == os.path.realpath(new)


def _get(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
