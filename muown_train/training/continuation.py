"""Continue from a checkpoint of another run: `schedule=decay_from checkpoint=runs/NAME tokens=…`.

This is the point of a schedule with a stable part (Hu et al. 2024, "MiniCPM"): one long run at a constant learning rate
gives models of any budget, each for the price of its decay. The new run takes over weights, optimizer, place in the
data and random generators, and so ends bit for bit as a WSD run that had been planned like this from the start.

The settings that define a run come with the checkpoint: model, data, optimizer, batch, seed. The command line says how
far and how to decay, and where and how the new run works; none of that enters a run's default name.
"""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from muown_train.config.overrides import parse_overrides
from muown_train.config.renamed_names import update_stored_config, update_target
from muown_train.config.resume_check import check_same_run
from muown_train.config.run_name import NOT_IN_NAME, locate_run_folder
from muown_train.config.schema import RunConfig, parse_config
from muown_train.models.language_model import build_model
from muown_train.runs.checkpoint_reader import read_newest_metadata
from muown_train.runs.saved_run import SavedRun, open_run
from muown_train.training.schedule import build_schedule

_BUDGET = ("tokens", "tokens_per_parameter")
# sections and keys that the checkpoint decides, and what the command line may still set in them
_FROM_CHECKPOINT = (
    *("model", "optim", "data", "experiment", "seed", "seq_len", "batch_tokens"),
    *("precision", "paper_exact", "init_from"),
)
_MAY_CHANGE = ("model.activation_checkpointing",)
_FROM_COMMAND_LINE = (*NOT_IN_NAME, *_BUDGET, "schedule", "checkpoint", "init_from")
_TARGET = "muown_train.training.schedule.decay_from"


@dataclass(frozen=True)
class Source:
    """The checkpoint of another run that a new one continues."""

    folder: Path  # folder of the other run
    checkpoint: Path
    step: int
    data: dict[str, Any]  # metadata of its data


def continue_from_checkpoint(config: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, Source | None]:
    """Complete a run's configuration by that of the checkpoint that it continues.

    Args:
        config: the configuration of the command line; without `checkpoint` it is returned as it is.
        overrides: the words of the command line.

    Returns:
        The configuration, and the checkpoint to begin with. A run that has checkpoints of its own needs none: None.

    Raises:
        ValueError: there is no such checkpoint, it cannot be trained on, or a setting was given that it decides.
    """
    if config.checkpoint is None:
        return config, None
    given = {override.key_or_group for override in parse_overrides(overrides)}
    check_given(config, given)
    folder = locate_run_folder(config.out, config.name)
    own = read_newest_metadata(folder / "checkpoints")
    source = None
    if own is not None:
        stored = update_stored_config(own["config"])
        check_same_run(folder, own, {**stored, "checkpoint": config.checkpoint})
        decay = {key: stored["schedule"][key] for key in ("start", "level")}
    else:
        saved = open_run(config.checkpoint)
        stored = saved.config.to_dict()
        source = Source(saved.folder, saved.checkpoint, saved.step, saved.data)
        decay = {"start": saved.step, "level": read_lr_multiplier(saved, config.trust)}
    ours = config.to_dict()
    merged = ours | {key: value for key, value in stored.items() if key not in {*_FROM_COMMAND_LINE, *given}}
    merged |= {key: ours[key] if key in given else None for key in _BUDGET}
    merged["schedule"] = ours["schedule"] | decay
    if "model.activation_checkpointing" in given:
        merged["model"] = merged["model"] | {"activation_checkpointing": config.model["activation_checkpointing"]}
    return parse_config(merged, config.name), source


def check_given(config: RunConfig, given: Collection[str]) -> None:
    """Refuse settings that cannot be given together with `checkpoint`.

    Args:
        given: keys and groups that the command line gives.

    Raises:
        ValueError: naming the setting.
    """
    checkpoint = config.checkpoint
    if update_target(config.schedule.get("_target_")) != _TARGET:
        raise ValueError(f"checkpoint={checkpoint} is for schedule=decay_from, which must be given with it")
    for key in given:
        if key not in _MAY_CHANGE and key.replace("/", ".").split(".")[0] in _FROM_CHECKPOINT:
            raise ValueError(
                f"{key} cannot be given with checkpoint={checkpoint}: model, optimizer, data, batch and seed are those "
                "of the checkpoint's run"
            )
        if key in ("schedule.start", "schedule.level"):
            raise ValueError(f"{key} cannot be given: the checkpoint decides it")
    if not set(_BUDGET) & set(given):
        raise ValueError(f"checkpoint={checkpoint} needs tokens=…: how many to decay over, such as tokens=2e5")


def read_lr_multiplier(saved: SavedRun, trust: list[str]) -> float:
    """Return the schedule's multiplier of the base learning rate in a checkpoint's last step.

    Raises:
        ValueError: the checkpoint holds weights alone.
    """
    if saved.opened.weights_alone:
        raise ValueError(f"{saved.checkpoint} holds only weights, and training cannot go on from them")
    config = dataclasses.replace(saved.config, trust=trust)
    with torch.device("meta"):  # the budget may be given per parameter
        model = build_model(config.model, config.seq_len, config.trust)
    steps, schedule = build_schedule(config, sum(p.numel() for p in model.parameters()))
    return schedule(saved.step - 1, steps)
