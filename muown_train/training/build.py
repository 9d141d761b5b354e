"""Build a run from its configuration: model, optimizer, schedule, data, checkpoints, trainer.

Everything that can be wrong is found before data are read or fetched, and before the run's folder is touched.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from filelock import FileLock

from muown_train.analysis.downstream.tasks import SECONDS, DownstreamTasks, load_tasks
from muown_train.config.budget import compute_batch_rows
from muown_train.config.instantiate import bind_target
from muown_train.config.resume_check import check_same_data, check_same_run
from muown_train.config.run_name import locate_run_folder
from muown_train.config.schema import RunConfig, TrainerSettings
from muown_train.data.cache import locate_cache
from muown_train.data.loader import Loader
from muown_train.data.mixed_rows import describe_draws
from muown_train.data.rows import RowSource
from muown_train.data.sources import RunInfo, build_data
from muown_train.data.workers import add_workers, clone_rows
from muown_train.models.language_model import LanguageModel, build_model
from muown_train.models.parallel import ReplicatedModel, ShardedModel, find_copies
from muown_train.runs import manifest
from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.checkpoint_reader import read_newest_metadata
from muown_train.runs.metrics import Line, Metrics, Sink
from muown_train.runs.status import lock_folder
from muown_train.runtime import hardware
from muown_train.runtime.distributed import World
from muown_train.runtime.formatting import format_gib
from muown_train.runtime.progress import discard_line
from muown_train.runtime.redaction import redact_tree
from muown_train.runtime.stop_signal import StopSignal
from muown_train.training.continuation import Source
from muown_train.training.divergence import DivergenceMonitor
from muown_train.training.optimizers import build_optimizer, shard_optimizer
from muown_train.training.run import Run
from muown_train.training.schedule import build_schedule
from muown_train.training.step_hooks import Measurement
from muown_train.training.tracking.console import ConsoleSink
from muown_train.training.trainer import Trainer
from muown_train.training.warm_start import InitialWeights, read_initial_weights


def build_run(config: RunConfig, world: World, source: Source | None = None, lock: FileLock | None = None) -> Run:
    """Build a run from its configuration; a collective call.

    Args:
        source: the checkpoint of another run that a new run continues (see `training.continuation`).
        lock: the lock of the run's folder, where the main rank holds it already.

    Raises:
        ValueError: a setting is unknown, out of range, or does not fit the others.
        OSError: data or folders cannot be read or written; ConnectionError: data cannot be fetched.
    """
    batch_rows = compute_batch_rows(config.batch_tokens, config.seq_len, config.micro_batch, world.size)
    # the time limit counts from here
    stop = StopSignal(world, None if config.time_limit is None else 60 * config.time_limit)
    folder = locate_run_folder(config.out, config.name)
    stored = read_newest_metadata(folder / "checkpoints")
    moved = check_same_run(folder, stored, config.to_dict())

    model, initial = build_initial_model(config, world.device, is_new=stored is None)
    steps, schedule = build_schedule(config, sum(p.numel() for p in model.parameters()))
    settings = build_settings(config, steps, model, world.device)
    if config.compile:
        model.compile_blocks()
    copies = find_copies(config.parallel, world)
    sharded = copies and ShardedModel(model, world, copies, settings.autocast, settings.reduce_in_bfloat16)
    optimizer = build_optimizer(config.optim, model, config.trust)
    if config.compile:
        optimizer.compile()
    if not sharded:
        shard_optimizer(optimizer, config.shard_optimizer, world)
    parallel = sharded or ReplicatedModel(model, world, settings.reduce_in_bfloat16)
    tasks: dict[str, Any] = {}
    if config.tasks:
        world.run_on_main(lambda: tasks.update(load_tasks(config.tasks)))
    tracking = build_sinks(config.tracking or {}, config.trust)
    probes: dict[str, Any] = {
        name: bind_target(section, f"probes.{name}", ["context"], config.trust)
        for name, section in config.probes.items()
    }

    run_info = RunInfo(config.seq_len, config.seed, config.valid_tokens, locate_cache(config.cache), model.vocab_size)
    if not world.is_main:  # what is said of the data is said once
        run_info = replace(run_info, progress=discard_line)
    data = build_data(config.data, run_info, config.trust)
    if source:
        check_same_data(source.folder, {"data": source.data}, data.metadata)
    check_same_data(folder, stored, data.metadata)
    if moved and world.is_main:
        print(f"  the data are those of the run, in another place: {'; '.join(moved)}", file=sys.stderr)
    if initial and data.tokenizer.raw is not None:
        initial.check_tokenizer(data.metadata)

    stored = stored or {}
    started = initial.metadata if initial else stored.get("init_from")
    origin = {"checkpoint": str(source.checkpoint), "step": source.step} if source else stored.get("origin")
    metadata = redact_tree({"config": config.to_dict(), "data": data.metadata, "init_from": started})
    metadata |= {"wandb_id": stored.get("wandb_id"), "origin": origin}
    kept = (config.keep_checkpoints, config.keep_every, config.keep_best)
    probe_rows = clone_rows(data.train) if config.probes else data.train
    rows = add_workers(data.train, config.workers)
    trainer = Trainer(
        world=world,
        model=model,
        parallel=parallel,
        optimizer=optimizer,
        schedule=schedule,
        loader=Loader(rows, batch_rows, world.rank, world.size, world.device),
        valid=data.valid,
        checkpoints=Checkpoints(folder / "checkpoints", world, *kept, metadata=metadata),
        settings=settings,
        monitor=build_monitor(config),
        stop=stop,
        metrics=Metrics(folder) if world.is_main else None,
    )
    if config.probes:
        probe = build_probes(config, probes, trainer, model, probe_rows)
        trainer.measurements.append(Measurement("probe/seconds", config.probe_every, probe))
    checkpoint = source.checkpoint if source else None
    run = Run(config, folder, trainer, model, data, checkpoint, metadata={}, sinks=[], lock=None)
    if config.sample_every:
        trainer.measurements.append(Measurement("sample", config.sample_every, run.write_sample, before_training=False))
    if config.tasks:
        every = config.eval_tasks_every or steps
        trainer.measurements.append(Measurement(SECONDS, every, build_tasks(config, run, tasks), before_training=False))
    if world.is_main:
        described = data.metadata | describe_draws(data.train, steps * batch_rows)
        run.metadata = manifest.describe(model, optimizer, described, settings, world, parallel, started)
        run.metadata["origin"] = origin
        run.sinks = [ConsoleSink(lambda: (trainer.step, trainer.activity.name)), *tracking]
        run.lock = lock or lock_folder(folder)
    return run


def build_initial_model(
    config: RunConfig, device: torch.device, is_new: bool
) -> tuple[LanguageModel, InitialWeights | None]:
    """Return the model with its first weights, and where these come from unless they are random.

    Args:
        is_new: whether the run has no checkpoint yet; `init_from` means nothing to a run that has weights of its own.
    """
    check_memory(config)
    torch.manual_seed(config.seed)
    model = build_model(config.model, config.seq_len, config.trust).to(device)
    if not (config.init_from and is_new):
        return model, None
    initial = read_initial_weights(config.init_from)
    initial.load_into(model, config.model, config.trust)  # before Muown derives its state from them
    return model, initial


def check_memory(config: RunConfig) -> None:
    """Refuse a model whose weights alone are larger than the memory of this machine, before they are made.

    Raises:
        ValueError: the model is too large; the message gives both sizes.
    """
    with torch.device("meta"):
        model = build_model(config.model, config.seq_len, config.trust)
    needed = sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(
            f"the weights of the model take {format_gib(needed)} GiB, and this machine has {format_gib(memory)} GiB of "
            "memory: a smaller model fits"
        )


def build_monitor(config: RunConfig) -> DivergenceMonitor:
    """Return the monitor of the losses and gradients of a run."""
    return DivergenceMonitor(
        config.max_bad_updates,
        config.on_bad_updates,
        config.max_rollbacks,
        config.diverged_above,
        config.diverged_from,
        config.log_every,
    )


def build_settings(config: RunConfig, steps: int, model: LanguageModel, device: torch.device) -> TrainerSettings:
    """Return the settings that the training loop reads."""
    return TrainerSettings(
        steps=steps,
        batch_tokens=config.batch_tokens,
        seq_len=config.seq_len,
        micro_batch=config.micro_batch,
        eval_every=config.eval_every,
        save_every=config.save_every,
        log_every=config.log_every,
        valid_tokens=config.valid_tokens,
        check_every=config.replica_check_every,
        stop_if_unsaved=config.on_save_error == "stop",
        grad_clip=config.grad_clip,
        autocast=hardware.wants_autocast(config.precision, device),
        reduce_in_bfloat16=config.reduce_dtype == "bfloat16",
        flops_per_token=model.flops_per_token(),
        peak_flops=hardware.get_peak_flops(device),
    )


def build_sinks(tracking: Mapping[str, Any], trust: Sequence[str] = ()) -> list[Sink]:
    """Return the sinks of the section `tracking`: that of its own `_target_`, and those of sections inside it.

    Raises:
        ValueError: a setting is wrong, or belongs to no sink.
    """
    inner = {key: value for key, value in tracking.items() if isinstance(value, Mapping) and "_target_" in value}
    own = {key: value for key, value in tracking.items() if key not in inner}
    sections = {f"tracking.{key}": section for key, section in inner.items()}
    if "_target_" in own or (own and not inner):
        sections = {"tracking": own, **sections}
    elif unknown := own.keys() - {"finish_timeout"}:  # which the sections inside refer to
        raise ValueError(f"tracking.{min(unknown)} is no setting of {' or '.join(sections)}")
    return [bind_target(section, key, ["warn"], trust)() for key, section in sections.items()]


def build_tasks(config: RunConfig, run: Run, tasks: Any) -> DownstreamTasks:
    """Return what measures the downstream tasks.

    Args:
        tasks: from `load_tasks`, on the main rank.

    Raises:
        ValueError: the data have no tokenizer.
    """
    trainer, tokenizer = run.trainer, run.data.tokenizer
    if tokenizer.raw is None:
        raise ValueError(f"tasks={config.tasks} need a tokenizer, and random data have none")
    return DownstreamTasks(
        tasks,
        config.eval_tasks_limit,
        run.model,
        tokenizer,
        trainer.world,
        config.seq_len,
        config.micro_batch,
        trainer.autocast,
        trainer.stop.check,
    )


def build_probes(
    config: RunConfig, probes: Mapping[str, Any], trainer: Trainer, model: LanguageModel, rows: RowSource
) -> Callable[[], Line]:
    """Return a function that takes the measurements of several probes.

    Args:
        probes: by name what makes a probe of its context.
        rows: a source of training rows that nothing else reads.
    """
    from muown_train.analysis.context import ProbeContext, make_magnitude_reader
    from muown_train.analysis.probes import Probes

    context = ProbeContext(
        model,
        trainer.world,
        make_magnitude_reader(trainer.optimizer, model, trainer.world),
        lambda: rows,
        trainer.loader.state_dict,
        lambda: trainer.valid,
        config.seq_len,
        config.batch_tokens,
        config.micro_batch,
        trainer.settings.autocast,
        trainer.stop.check,
    )
    with torch.compiler.set_stance("force_eager"):  # a probe may try whether it can observe the model
        return Probes({name: probe(context=context) for name, probe in probes.items()})
