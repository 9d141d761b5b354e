"""The one place that reads configuration objects: it checks them and makes the objects of a run.

Everything that can be wrong is found before data are read or fetched, and before the run's folder is touched.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf
from torch import nn

from muown_train import hardware, manifest
from muown_train.batch import rows_per_update, updates
from muown_train.checkpoint import Checkpoints
from muown_train.config import check_name, nearest
from muown_train.data.loader import Loader
from muown_train.data.sources import TrainingData
from muown_train.data.workers import with_workers
from muown_train.distributed import World
from muown_train.factory import check_settings, factory, is_number
from muown_train.models.language_model import LanguageModel
from muown_train.optim import Combined, param_groups, shard
from muown_train.records import Metrics, Sink, console
from muown_train.trainer import Schedule, Settings, Trainer

# of the configuration, dotted; and of what the data turned out to be
_WHAT_MAY_NOT_CHANGE = ("model", "data", "seq_len", "batch_tokens", "seed", "optim._target_", "optim.rest._target_")
_MAY_CHANGE = ("data.retries",)
_DATA_MAY_NOT_CHANGE = ("content", "tokenizer_hash", "revision", "held_out_content")


@dataclass
class TopLevel:
    """The plain keys of train.yaml, checked."""

    name: str
    out: str
    cache: str | None
    seed: int
    tokens: float | None
    tokens_per_parameter: float | None
    seq_len: int
    batch_tokens: int
    micro_batch: int
    workers: int | None
    precision: str
    compile: bool
    shard_optimizer: bool
    grad_clip: float | None
    eval_every: int
    valid_tokens: int
    save_every: int
    keep_checkpoints: int
    log_every: int
    sample_tokens: int
    paper_exact: bool

    def __post_init__(self) -> None:
        self.name = check_name(self.name)  # name=5 is a number in YAML
        for key, allowed in (("out", str), ("cache", str | None)):
            if not isinstance(getattr(self, key), allowed):
                raise ValueError(f"{key}={getattr(self, key)!r} must be a folder")
        for key in ("seq_len", "batch_tokens", "micro_batch", "eval_every", "valid_tokens", "save_every"):
            self._whole(key, 1)
        for key, least in (("keep_checkpoints", 1), ("log_every", 1), ("sample_tokens", 0), ("seed", 0)):
            self._whole(key, least)
        if self.workers is not None:
            self._whole("workers", 0)
        for key in ("tokens", "tokens_per_parameter", "grad_clip"):
            value = getattr(self, key)
            if value is not None and not (is_number(value) and value > 0):
                raise ValueError(f"{key}={value!r} must be a positive number or null")
        for key in ("compile", "shard_optimizer", "paper_exact"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"{key}={getattr(self, key)!r} must be true or false")

    def _whole(self, key: str, least: int) -> None:
        value = getattr(self, key)
        if not is_number(value) or value != int(value) or not least <= value < 2**63:
            raise ValueError(f"{key}={value!r} must be a whole number of at least {least}")
        setattr(self, key, int(value))  # 5e9 is a float in YAML


@dataclass
class Run:
    """A run ready to go, and what its report needs."""

    trainer: Trainer
    model: LanguageModel  # not compiled
    folder: Path
    data: TrainingData
    config: TopLevel
    resolved: dict[str, Any]  # the whole configuration
    facts: dict[str, Any]  # for the manifest; this and what follows on the main rank alone
    sinks: list[Sink]
    lock: FileLock | None  # of the folder

    def resume(self) -> bool:
        """Take up the newest checkpoint and, unless the run is finished, write down what it now is.

        The record of a finished run, or of one that this configuration cannot go on with, is left as it was.

        Returns:
            Whether the run is finished.
        """
        finished = self.trainer.resume()
        if self.trainer.world.is_main and not finished:
            manifest.write(self.folder, OmegaConf.to_yaml(OmegaConf.create(self.resolved)), self.facts)
            manifest.show(self.facts, self.folder)
            if self.trainer.step:
                print(f"  going on after update {self.trainer.step:,}", flush=True)
            for sink in self.sinks:
                sink.start(self.folder, self.resolved, self.trainer.settings.steps)
            self.trainer.sinks = self.sinks
        return finished

    def close(self) -> None:
        """End what runs in the background, give the terminal back, and let others have the folder."""
        self.trainer.loader.close()
        for sink in self.trainer.sinks:
            sink.finish({})  # without effect after a first time
        if self.lock:
            self.lock.release()


def build(config: DictConfig, name: str, world: World) -> Run:
    """Make a run of a configuration.

    Args:
        name: the run's name where the configuration gives none.

    Raises:
        ValueError: a setting that is unknown, out of range, or does not go with the others.
        OSError: data or folders that cannot be read or written; ConnectionError: data that cannot be fetched.
    """
    resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    top = top_level(resolved, name)
    autocast = hardware.wants_autocast(top.precision, world.device)
    batch_rows = rows_per_update(top.batch_tokens, top.seq_len, top.micro_batch, world.size)

    torch.manual_seed(top.seed)
    model: LanguageModel = factory(resolved["model"], "model")().to(world.device)
    if model.seq_len < top.seq_len:
        raise ValueError(
            f"model.seq_len={model.seq_len} is shorter than seq_len={top.seq_len}, the rows it is to train on"
        )
    parameters = sum(p.numel() for p in model.parameters())
    steps = updates(top.tokens, top.tokens_per_parameter, parameters, top.batch_tokens)
    schedule: Schedule = factory(resolved["schedule"], "schedule", given=["step", "steps"])
    schedule(0, steps)  # an impossible setting is found now
    optimizer = make_optimizer(resolved, model)
    if top.compile:
        optimizer.compile()
    if top.shard_optimizer and world.size > 1:
        shard(optimizer)
    tracking: Sink | None = factory(resolved["tracking"], "tracking")() if resolved["tracking"] else None

    folder = Path(top.out) / top.name
    refuse_other_run(folder, resolved)
    from_run = {
        "seq_len": top.seq_len,
        "seed": top.seed,
        "valid_tokens": top.valid_tokens,
        "cache": cache_folder(top.cache),
        "vocab_size": model.vocab_size,
    }
    data: TrainingData = factory(resolved["data"], "data", given=[*from_run, "progress"])(**from_run)
    settings = Settings(
        steps=steps,
        batch_tokens=top.batch_tokens,
        seq_len=top.seq_len,
        micro_batch=top.micro_batch,
        eval_every=top.eval_every,
        save_every=top.save_every,
        log_every=top.log_every,
        valid_tokens=top.valid_tokens,
        grad_clip=top.grad_clip,
        autocast=autocast,
        flops_per_token=model.flops_per_token(),
        peak_flops=hardware.peak_flops(world.device),
    )
    refuse_other_data(folder, data.facts)
    rows = with_workers(data.train, top.workers)
    trainer = Trainer(
        world=world,
        model=torch.compile(model) if top.compile else model,  # type: ignore[arg-type]
        optimizer=optimizer,
        schedule=schedule,
        loader=Loader(rows, batch_rows, world.rank, world.size, pin_memory=world.device.type == "cuda"),
        valid=data.valid,
        checkpoints=Checkpoints(folder / "checkpoints", world, top.keep_checkpoints),
        settings=settings,
        metrics=Metrics(folder) if world.is_main else None,
    )
    run = Run(trainer, model, folder, data, top, resolved, facts={}, sinks=[], lock=None)
    if world.is_main:
        run.facts = manifest.describe(model, optimizer, data.facts, settings, world)
        run.sinks = [sink for sink in (console(), tracking) if sink]
        run.lock = locked(folder)
    return run


def top_level(resolved: dict[str, Any], name: str) -> TopLevel:
    """The plain keys; an unknown one is an error with the nearest name."""
    known = [field.name for field in fields(TopLevel)]
    groups = ("model", "data", "optim", "schedule", "tracking")
    for key in resolved:
        if key not in (*known, *groups):
            raise ValueError(f"there is no key {key}{nearest(key, (*known, *groups))}")
    plain = {key: resolved[key] for key in known}
    if plain["name"] is None:
        plain["name"] = name
    return TopLevel(**plain)


def make_optimizer(resolved: dict[str, Any], model: nn.Module) -> Combined:
    """The matrices to the chosen optimizer, the rest to `optim.rest`, each role with its own settings."""
    if not isinstance(resolved["optim"].get("rest"), dict):
        raise ValueError(f"optim.rest={resolved['optim'].get('rest')!r} must be the settings of an optimizer")
    optim, rest = dict(resolved["optim"]), dict(resolved["optim"]["rest"])
    row_blocks = optim.pop("row_blocks")
    if not isinstance(row_blocks, bool):
        raise ValueError(f"optim.row_blocks={row_blocks!r} must be true or false")
    of_role = {role: rest.pop(role, None) or {} for role in ("embedding", "head", "vector")}
    del optim["rest"]
    for_matrices = factory(optim, "optim", given=["params"])
    for_rest = factory(rest, "optim.rest", given=["params"])
    for role, settings in of_role.items():
        check_settings(settings, for_rest, f"optim.rest.{role}", given=["params"])
    matrices, others = param_groups(model, blocks=row_blocks)
    return Combined(for_matrices(matrices), for_rest([group | of_role[group["role"]] for group in others]))


def refuse_other_run(folder: Path, resolved: dict[str, Any]) -> None:
    """Error if the folder holds checkpoints of a run that this configuration cannot go on with."""
    before = _of_checkpoints(folder / "config.yaml", yaml.safe_load)
    for section in _WHAT_MAY_NOT_CHANGE if before is not None else ():
        old, new = (_get(settings, section) for settings in (before, resolved))
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in {**old, **new} if f"{section}.{key}" not in _MAY_CHANGE]
            key = next((key for key in keys if old.get(key) != new.get(key)), keys[0])
            section, old, new = f"{section}.{key}", old.get(key), new.get(key)
        if old != new:
            raise ValueError(
                f"{folder} holds a run with {section}={old}, this one has {section}={new}: "
                "give it another name, or the old setting"
            )


def refuse_other_data(folder: Path, facts: dict[str, Any]) -> None:
    """Error if the folder holds checkpoints of a run on other data, though the settings are the same."""
    before = _of_checkpoints(folder / "manifest.json", json.loads)
    for key in _DATA_MAY_NOT_CHANGE if before is not None else ():
        old, new = _get(before, f"data.{key}"), facts.get(key)
        if old != new:
            raise ValueError(
                f"{folder} holds a run on other data ({key} was {old}, is {new}): "
                "give it another name, or the data as they were"
            )


def _of_checkpoints(stored: Path, parse: Callable[[str], Any]) -> Any:
    """A file of the record that goes with a run's checkpoints; None where there are none of them."""
    if not stored.exists() or not any((stored.parent / "checkpoints").glob("step-*")):
        return None
    try:
        return parse(stored.read_text())
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"{stored} cannot be read ({type(error).__name__}): restore it, or give another name"
        ) from None


def _get(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def locked(folder: Path) -> FileLock:
    """Make a run's folder and keep it for this process; the system frees it when the process ends, however it ends.

    Raises:
        ValueError: another process trains there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{folder} is being trained by another process: wait for it, or give another name") from None
    return lock


def cache_folder(configured: str | None) -> Path:
    """Where prepared data are kept."""
    if configured:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "muown_train"
