"""Names that stored configurations and users still write in their old form, and the names that replaced them.

Archived runs, checkpoints and users' own files name code by dotted `_target_`s and settings by keys. When either is
renamed, its old name goes into a table here, so that everything written before keeps its meaning.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

# `_target_` of earlier versions -> `_target_` of today
RENAMED_TARGETS = {
    "muown_train.data.hub_source.hub_stream": "muown_train.data.hub.dataset.hub_stream",
    "muown_train.data.shards.shards": "muown_train.data.shards.dataset.shards",
    "muown_train.schedule.constant": "muown_train.training.schedule.constant",
    "muown_train.schedule.cosine": "muown_train.training.schedule.cosine",
    "muown_train.schedule.decay_from": "muown_train.training.schedule.decay_from",
    "muown_train.schedule.power_cooldown": "muown_train.training.schedule.power_cooldown",
    "muown_train.schedule.wsd": "muown_train.training.schedule.wsd",
    "muown_train.tensorboard_sink.TensorBoardSink": "muown_train.training.tracking.tensorboard_sink.TensorBoardSink",
    "muown_train.wandb_sink.WandbSink": "muown_train.training.tracking.wandb_sink.WandbSink",
}
# dotted key of earlier versions -> dotted key of today
RENAMED_KEYS = {
    "check_every": "replica_check_every",
    "model.checkpointed": "model.activation_checkpointing",
}

# top-level key -> value of earlier versions -> value of today
RENAMED_VALUES = {"shard_optimizer": {True: "node", False: "none"}}


def update_target(target: Any) -> Any:
    """Return today's name of a `_target_`; anything that was not renamed is returned as it is."""
    return RENAMED_TARGETS.get(target, target) if isinstance(target, str) else target


def update_stored_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a stored configuration in which renamed keys, targets and values have today's names."""
    updated: dict[str, Any] = _update_targets(config)
    for old, new in RENAMED_KEYS.items():
        section, _, key = old.rpartition(".")
        settings = updated.get(section) if section else updated
        if isinstance(settings, dict) and key in settings:
            settings[new.rpartition(".")[2]] = settings.pop(key)  # whoever writes the old key means it
    for key, values in RENAMED_VALUES.items():
        if isinstance(updated.get(key), bool):
            updated[key] = values[updated[key]]
    return updated


def update_overrides(overrides: Sequence[str]) -> list[str]:
    """Return `key=value` words of a command line with today's keys, and say on standard error which key was renamed."""
    updated = []
    for override in overrides:
        word, equals, value = override.partition("=")
        prefix = word[: len(word) - len(word.lstrip("+~"))]
        key = word[len(prefix) :]
        if key in RENAMED_KEYS:
            print(f"note: {key} is called {RENAMED_KEYS[key]} now", file=sys.stderr)
            override = f"{prefix}{RENAMED_KEYS[key]}{equals}{value}"
        updated.append(override)
    return updated


def _update_targets(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {k: update_target(v) if k == "_target_" else _update_targets(v) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [_update_targets(item) for item in node]
    return node
