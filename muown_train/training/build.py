"""The one place that reads configuration objects: it checks them and makes the objects of a run.

Everything that can be wrong is found before data are read or fetched, and before the run's folder is touched.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf
from torch import nn

from muown_train.cli.collector import resting
from muown_train.config.budget import rows_per_update, updates
from muown_train.config.compose import run_folder
from muown_train.config.instantiate import check_settings, factory, whole
from muown_train.config.resume_check import refuse_other_data, refuse_other_run
from muown_train.config.schema import TopLevel, top_level
from muown_train.config.settings import Schedule, Settings
from muown_train.data.loader import Loader
from muown_train.data.rows import RowSource
from muown_train.data.sources import FROM_RUN, TrainingData
from muown_train.data.text.tokenizer import TOKENIZER
from muown_train.data.workers import apart, with_workers
from muown_train.models.language_model import LanguageModel
from muown_train.optim import Combined, param_groups, shard
from muown_train.runs import manifest
from muown_train.runs.checkpoint import Checkpoints, about_newest
from muown_train.runs.metrics import Line, Metrics, Sink
from muown_train.runs.status import Outcome, count_start, read_status, write_status
from muown_train.runtime import hardware
from muown_train.runtime.atomic_files import replace
from muown_train.runtime.distributed import World
from muown_train.runtime.redaction import redacted, redacted_tree
from muown_train.runtime.stop_signal import Stop
from muown_train.training.divergence import Guard
from muown_train.training.optimizers import made, try_out
from muown_train.training.patterns import check_patterns, divided
from muown_train.training.tracking.console import console
from muown_train.training.trainer import Trainer
from muown_train.training.warm_start import read_start


@dataclass(frozen=True)
class Origin:
    """The checkpoint of another run that a new one goes on from."""

    run: Path  # folder
    checkpoint: Path
    step: int
    data: dict[str, Any]  # facts


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
    origin: Path | None = None  # checkpoint of another run that this one goes on from

    def resume(self) -> Outcome | None:
        """Take up the newest checkpoint and, unless the run has ended, write down what it now is.

        The record of a run that has ended, or of one that this configuration cannot go on with, is left as it was.

        Returns:
            How the run ended before, if it did.
        """
        trainer = self.trainer
        before = trainer.world.gather(read_status(self.folder))[0]
        if before.get("state") == "diverged":
            return Outcome("diverged", before["reason"])
        if trainer.resume(self.origin):
            if before.get("state") != "finished":  # killed before it could say so
                self._status(Outcome("finished"))
            return Outcome("finished")
        if trainer.world.is_main:
            manifest.write(self.folder, self.resolved, self.facts)
            if self.data.tokenizer.raw is not None:  # for those who use the model
                replace(self.folder / TOKENIZER, self.data.tokenizer.raw)
            manifest.show(self.facts, self.folder)
            if trainer.step:
                print(f"  going on after update {trainer.step:,}{self._whose()}", flush=True)
            self._start_sinks()
        return None

    def train(self) -> Outcome:
        """Train until the run has ended or is stopped, and write down which; a collective call."""
        self._status(Outcome("running"))
        try:
            with self.trainer.stop:
                outcome = self.trainer.fit()
        except BaseException as error:
            with suppress(OSError):  # a full disk, of which the error tells
                self._status(Outcome("failed", redacted(str(error)) or type(error).__name__))
            raise
        self._status(outcome)
        return outcome

    def _whose(self) -> str:
        if not self.origin:
            return ""
        level = self.resolved["schedule"]["level"]
        down = f"; from {level:g} times the learning rate" if level != 1 else "; from the full learning rate"
        return f" of {self.origin}{down} down to 0"

    def _start_sinks(self) -> None:
        """Checkpoints keep the id of the W&B run too: where its file is lost the run goes on there all the same."""
        about, file = self.trainer.checkpoints.about, self.folder / "wandb_id"
        if about["wandb_id"] and not file.exists():
            replace(file, about["wandb_id"].encode())
        self.trainer.sinks = self.sinks  # to be ended, whatever happens
        for sink in self.sinks:
            sink.start(self.folder, self.resolved, self.trainer.settings.steps)
        if file.exists():
            about["wandb_id"] = file.read_text().strip()

    def _status(self, outcome: Outcome) -> None:
        if self.trainer.world.is_main:
            write_status(self.folder, outcome, self.trainer.step, self.trainer.settings.steps)

    def close(self) -> None:
        """End what runs in the background, give the terminal back, and let others have the folder."""
        self.trainer.loader.close()
        for sink in self.trainer.sinks:
            sink.finish({})  # without effect after a first time
        if self.lock:
            self.lock.release()


def build(config: DictConfig, name: str, world: World, origin: Origin | None = None) -> Run:
    """Make a run of a configuration.

    Args:
        name: the run's name where the configuration gives none.
        origin: what a new run goes on from, as `continuation.continued` gives it with its configuration.

    Raises:
        ValueError: a setting that is unknown, out of range, or does not go with the others.
        OSError: data or folders that cannot be read or written; ConnectionError: data that cannot be fetched.
    """
    resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    top = top_level(resolved, name)
    resolved |= {"init_from": top.init_from, "checkpoint": top.checkpoint}
    batch_rows = rows_per_update(top.batch_tokens, top.seq_len, top.micro_batch, world.size)

    stop = Stop(world, None if top.time_limit is None else 60 * top.time_limit)  # counts from here

    folder = run_folder(top.out, top.name)
    about = about_newest(folder / "checkpoints")
    refuse_other_run(folder, about, resolved)
    torch.manual_seed(top.seed)
    model = make_model(resolved, top).to(world.device)
    start = None
    if top.init_from and about is None:  # else the run's own weights follow
        start = read_start(top.init_from)
        start.load_into(model, resolved["model"], top.trust)  # before the optimizer: Muown's state is of the weights
    steps, schedule = make_schedule(resolved, top, model)
    with resting():  # torch imports its compiler with a process's first optimizer, though nothing may be compiled
        optimizer = make_optimizer(resolved, model, top.trust)
    if top.compile:
        optimizer.compile()
    if top.shard_optimizer and world.size > 1:
        shard(optimizer)
    tracking: Sink | None = None
    if resolved["tracking"]:
        tracking = factory(resolved["tracking"], "tracking", trust=top.trust)()

    if top.give_up_after:
        count_start(folder, top.give_up_after, world)
    data = make_data(resolved["data"], top, model.vocab_size)
    settings = make_settings(top, steps, model, world.device)
    if origin:
        refuse_other_data(origin.run, {"data": origin.data}, data.facts)
    refuse_other_data(folder, about, data.facts)
    if start and data.tokenizer.raw is not None:
        start.refuse_other_tokenizer(data.facts)
    started = start.facts if start else (about or {}).get("init_from")
    came_from = {"checkpoint": str(origin.checkpoint), "step": origin.step} if origin else (about or {}).get("origin")
    rows_apart = apart(data.train) if resolved.get("probes") else data.train
    rows = with_workers(data.train, top.workers)
    trainer = Trainer(
        world=world,
        model=torch.compile(model) if top.compile else model,  # type: ignore[arg-type]
        optimizer=optimizer,
        schedule=schedule,
        loader=Loader(rows, batch_rows, world.rank, world.size, pin_memory=world.device.type == "cuda"),
        valid=data.valid,
        checkpoints=Checkpoints(
            folder / "checkpoints",
            world,
            top.keep_checkpoints,
            top.keep_every,
            top.keep_best,
            about=redacted_tree({"config": resolved, "data": data.facts, "init_from": started})
            | {"wandb_id": (about or {}).get("wandb_id"), "origin": came_from},
        ),
        settings=settings,
        guard=Guard(
            top.max_bad_updates,
            top.on_bad_updates,
            top.max_rollbacks,
            top.diverged_above,
            top.diverged_from,
            top.log_every,
        ),
        stop=stop,
        metrics=Metrics(folder) if world.is_main else None,
    )
    if resolved.get("probes"):
        trainer.probe = make_probes(resolved, top, trainer, model, rows_apart)
    came = origin.checkpoint if origin else None
    run = Run(trainer, model, folder, data, top, resolved, facts={}, sinks=[], lock=None, origin=came)
    if world.is_main:
        facts = manifest.describe(model, optimizer, data.facts, settings, world, started)
        run.facts = facts | {"origin": came_from}
        run.sinks = [sink for sink in (console(), tracking) if sink]
        run.lock = locked(folder)
    return run


def make_data(section: dict[str, Any], top: TopLevel, vocab_size: int) -> TrainingData:
    """The data of a configuration.

    Args:
        section: `data` of the resolved configuration; top: its plain keys.
        vocab_size: of the model.
    """
    from_run = {
        "seq_len": top.seq_len,
        "seed": top.seed,
        "valid_tokens": top.valid_tokens,
        "cache": cache_folder(top.cache),
        "vocab_size": vocab_size,
    }
    data: TrainingData = factory(section, "data", FROM_RUN, top.trust)(**from_run)
    return data


def make_settings(top: TopLevel, steps: int, model: LanguageModel, device: torch.device) -> Settings:
    """What the loop needs to know of the configuration."""
    return Settings(
        steps=steps,
        batch_tokens=top.batch_tokens,
        seq_len=top.seq_len,
        micro_batch=top.micro_batch,
        eval_every=top.eval_every,
        save_every=top.save_every,
        log_every=top.log_every,
        valid_tokens=top.valid_tokens,
        check_every=top.check_every,
        probe_every=top.probe_every,
        stop_if_unsaved=top.on_save_error == "stop",
        grad_clip=top.grad_clip,
        autocast=hardware.wants_autocast(top.precision, device),
        reduce_in_bfloat16=top.reduce_dtype == "bfloat16",
        flops_per_token=model.flops_per_token(),
        peak_flops=hardware.peak_flops(device),
    )


def make_model(resolved: dict[str, Any], top: TopLevel) -> LanguageModel:
    """The model, for rows as long as those it is to train on."""
    model: LanguageModel = factory(resolved["model"], "model", trust=top.trust)()
    if model.seq_len < top.seq_len:
        raise ValueError(
            f"model.seq_len={model.seq_len} is shorter than seq_len={top.seq_len}, the rows it is to train on"
        )
    return model


def make_schedule(resolved: dict[str, Any], top: TopLevel, model: nn.Module) -> tuple[int, Schedule]:
    """The number of updates that the budget pays for, and the schedule of the learning rate over them.

    Those of a run that goes on from another's checkpoint come after the updates done there, which count as well.
    """
    parameters = sum(p.numel() for p in model.parameters())
    steps = updates(top.tokens, top.tokens_per_parameter, parameters, top.batch_tokens)
    schedule = factory(resolved["schedule"], "schedule", ["step", "steps"], top.trust)
    steps += whole("schedule.start", schedule.keywords.get("start") or 0, 0)  # what was done before the budget counts
    schedule(0, steps)  # an impossible setting is found now
    return steps, schedule


def make_optimizer(resolved: dict[str, Any], model: nn.Module, trust: Sequence[str] = ()) -> Combined:
    """The matrices to the chosen optimizer, the rest to `optim.rest`, each role and pattern with its own settings."""
    if not isinstance(resolved["optim"].get("rest"), dict):
        raise ValueError(f"optim.rest={resolved['optim'].get('rest')!r} must be the settings of an optimizer")
    optim, rest = dict(resolved["optim"]), dict(resolved["optim"]["rest"])
    row_blocks, patterns = optim.pop("row_blocks"), optim.pop("patterns", None)
    if not isinstance(row_blocks, bool):
        raise ValueError(f"optim.row_blocks={row_blocks!r} must be true or false")
    of_role = {role: rest.pop(role, None) or {} for role in ("embedding", "head", "vector")}
    del optim["rest"]
    for_matrices = factory(optim, "optim", ["params"], trust)
    for_rest = factory(rest, "optim.rest", ["params"], trust)
    for role, settings in of_role.items():
        check_settings(settings, for_rest, f"optim.rest.{role}", given=["params"])
    matrices, others = param_groups(model, blocks=row_blocks)
    others = [group | of_role[group["role"]] for group in others]
    patterns = check_patterns(patterns, [name for group in matrices + others for name, _ in group["params"]])
    matrices, others = (
        divided(groups, patterns, partial(check_settings, target=optimizer, given=["params"]))
        for optimizer, groups in ((for_matrices, matrices), (for_rest, others))
    )
    for optimizer, section, groups in ((for_matrices, "optim", matrices), (for_rest, "optim.rest", others)):
        for group in groups:
            sections = {section: optimizer.keywords}
            if group["role"] in of_role:
                sections |= {f"optim.rest.{group['role']}": of_role[group["role"]]}
            sections |= {f"optim.patterns.{name}": settings for name, settings in group.get("patterns", {}).items()}
            try_out(optimizer, sections, group["params"][0][1].ndim)
    return Combined(made(for_matrices, matrices, "optim"), made(for_rest, others, "optim.rest"))


def make_probes(
    resolved: dict[str, Any], top: TopLevel, trainer: Trainer, model: LanguageModel, rows: RowSource
) -> Callable[[], Line]:
    """What the sections of `probes` measure in a run; `rows` are for nothing else."""
    from muown_train.analysis.context import Subject, magnitudes_of
    from muown_train.analysis.probes import Probes

    subject = Subject(
        model,
        trainer.world,
        magnitudes_of(trainer.optimizer, model, trainer.world),
        lambda: rows,
        trainer.loader.state_dict,
        top.seq_len,
        top.batch_tokens,
        top.micro_batch,
        trainer.settings.autocast,
    )
    sections = {
        name: factory(section, f"probes.{name}", ["subject"], top.trust) for name, section in resolved["probes"].items()
    }
    return Probes({name: section(subject=subject) for name, section in sections.items()})


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
