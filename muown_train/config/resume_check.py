"""Whether the run in a folder is one that a configuration can go on with."""

from pathlib import Path
from typing import Any

from muown_train.config.compose import DATA_IDENTITY
from muown_train.config.instantiate import defaults
from muown_train.runtime.redaction import redacted_tree

# of the configuration, dotted
_WHAT_MAY_NOT_CHANGE = (
    *("model", "data", "seq_len", "batch_tokens", "seed", "init_from", "checkpoint"),
    *("optim._target_", "optim.rest._target_"),
)
_MAY_CHANGE = ("data.retries", "model.checkpointed")


def refuse_other_run(folder: Path, about: dict[str, Any] | None, resolved: dict[str, Any]) -> None:
    """Error if the folder's checkpoints, which `about` tells of, are of a run that this one cannot go on with."""
    for section in _WHAT_MAY_NOT_CHANGE if about else ():
        old, new = _get(about, f"config.{section}"), redacted_tree(_get(resolved, section))
        if isinstance(old, dict) and isinstance(new, dict):
            # a setting that an older version did not have is as it was then
            usual = defaults(new, section)
            old, new = ({**tree, **{key: usual[key] for key in usual if key not in tree}} for tree in (old, new))
            keys = [key for key in {**old, **new} if f"{section}.{key}" not in _MAY_CHANGE]
            key = next((key for key in keys if old.get(key) != new.get(key)), keys[0])
            section, old, new = f"{section}.{key}", old.get(key), new.get(key)
        if old != new:
            raise ValueError(
                f"{folder} holds a run with {section}={old}, this one has {section}={new}: "
                "give it another name, or the old setting"
            )


def refuse_other_data(folder: Path, about: dict[str, Any] | None, facts: dict[str, Any]) -> None:
    """Error if the checkpoints are of a run on other data, though the settings are the same."""
    for key in DATA_IDENTITY if about else ():
        old, new = _get(about, f"data.{key}"), redacted_tree(facts.get(key))
        if old != new:
            raise ValueError(
                f"{folder} holds a run on other data ({key} was {old}, is {new}): "
                "give it another name, or the data as they were"
            )


def _get(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
