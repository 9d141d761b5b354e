"""A run that goes on from a checkpoint of another: `schedule=decay_from checkpoint=runs/NAME tokens=…`.

The point of a schedule with a stable part (Hu et al. 2024, "MiniCPM"): from one long run at a constant learning rate,
models of any budget, each for the price of its decay. The new run takes over everything, weights, optimizer, place in
the data and random generators, and so ends bit for bit as a WSD run that had been planned like this from the start.

What defines a run comes with the checkpoint: model, data, optimizer, batch, seed. The command line says how far and how
to decay, and where and how the new run works: all that never goes into a run's default name.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from muown_train.config.compose import NOT_IN_NAME, parsed, run_folder
from muown_train.config.resume_check import refuse_other_run
from muown_train.config.schema import top_level
from muown_train.runs.checkpoint import about_newest
from muown_train.runs.saved_run import SavedRun, open_run
from muown_train.training.build import Origin, make_model, make_schedule

_BUDGET = ("tokens", "tokens_per_parameter")
# sections and keys that the command line must leave to the checkpoint, and what of them it may set
_OF_CHECKPOINT = (
    *("model", "optim", "data", "experiment", "seed", "seq_len", "batch_tokens"),
    *("precision", "paper_exact", "init_from"),
)
_MAY_CHANGE = ("model.checkpointed",)
_OF_COMMAND = (*NOT_IN_NAME, *_BUDGET, "schedule", "checkpoint", "init_from")
_TARGET = "muown_train.training.schedule.decay_from"


def continued(config: DictConfig, overrides: Iterable[str], name: str) -> tuple[DictConfig, Origin | None]:
    """The configuration of a run, completed by that of the checkpoint that it goes on from.

    Args:
        config: of the command line; without `checkpoint` it is given back as it is.
        overrides: of the command line.
        name: the run's name where the configuration gives none.

    Returns:
        The configuration, and the checkpoint to begin with; None for a run that has checkpoints of its own, which does
        not need that one any more.

    Raises:
        ValueError: no such checkpoint, one that cannot be trained on, or settings that are the checkpoint's to say.
    """
    command: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    top = top_level(command, name)
    if top.checkpoint is None:
        return config, None
    command["checkpoint"] = top.checkpoint
    given = {override.key_or_group for override in parsed(overrides)}
    check_command(command, given)
    folder = run_folder(top.out, top.name)
    own = about_newest(folder / "checkpoints")
    if own is not None:
        refuse_other_run(folder, own, {**own["config"], "checkpoint": command["checkpoint"]})
        stored, origin = own["config"], None
        fall = {key: stored["schedule"][key] for key in ("start", "level")}
    else:
        source = open_run(command["checkpoint"])
        stored, origin = source.config, Origin(source.folder, source.checkpoint, source.step, source.data)
        fall = {"start": source.step, "level": multiplier(source, top.trust)}
    merged = command | {key: value for key, value in stored.items() if key not in {*_OF_COMMAND, *given}}
    merged |= {key: command[key] if key in given else None for key in _BUDGET}
    merged["schedule"] = command["schedule"] | fall
    if "model.checkpointed" in given:
        merged["model"] = merged["model"] | {"checkpointed": command["model"]["checkpointed"]}
    return OmegaConf.create(merged), origin


def check_command(command: Mapping[str, Any], given: Iterable[str]) -> None:
    """Refuse what does not go with `checkpoint`.

    Args:
        command: the resolved configuration of the command line.
        given: its keys and groups.
    """
    checkpoint = command["checkpoint"]
    if command["schedule"].get("_target_") != _TARGET:
        raise ValueError(f"checkpoint={checkpoint} is for schedule=decay_from, which must be given with it")
    for key in given:
        if key not in _MAY_CHANGE and key.replace("/", ".").split(".")[0] in _OF_CHECKPOINT:
            raise ValueError(
                f"{key} cannot be given with checkpoint={checkpoint}: model, optimizer, data, batch and seed are those "
                "of the checkpoint's run"
            )
        if key in ("schedule.start", "schedule.level"):
            raise ValueError(f"{key} cannot be given: it is the checkpoint's")
    if not set(_BUDGET) & set(given):
        raise ValueError(f"checkpoint={checkpoint} needs tokens=…: how many to decay over, such as tokens=2e5")


def multiplier(source: SavedRun, trust: list[str]) -> float:
    """What the base learning rate of a checkpoint's last update was multiplied by.

    Raises:
        ValueError: it holds weights alone.
    """
    if source.opened.weights_alone:
        raise ValueError(f"{source.checkpoint} holds weights alone, and no run's state that could be gone on from")
    top = dataclasses.replace(source.top, trust=trust)
    with torch.device("meta"):  # a budget may be given per parameter
        model = make_model(source.config, top)
    steps, schedule = make_schedule(source.config, top, model)
    return schedule(source.step - 1, steps)
