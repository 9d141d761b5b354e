"""A run from start to end: it resumes by itself, its folder says how it stands, and nobody else trains in it."""

import errno
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from muown_train.config.schema import RunConfig
from muown_train.data.sources import TrainingData
from muown_train.data.text.tokenizer import TOKENIZER, begin_document
from muown_train.models.generate import generate
from muown_train.models.language_model import LanguageModel
from muown_train.runs import manifest
from muown_train.runs.checkpoint_reader import print_warning
from muown_train.runs.metrics import Line, Sink
from muown_train.runs.status import FolderGuard, Outcome, read_status, write_status
from muown_train.runtime.atomic_files import read_regular, write_atomic
from muown_train.training.divergence import explain_unlearned
from muown_train.training.step_hooks import collect_garbage_together, profile_steps
from muown_train.training.trainer import Trainer

LONGEST_SAMPLE = 80_000  # characters that a line of metrics keeps: each takes 12 bytes at most, and a line has a MiB


@dataclass
class Run:
    """A run ready to be trained, and what its summary needs."""

    config: RunConfig
    folder: Path
    trainer: Trainer
    model: LanguageModel
    data: TrainingData
    source_checkpoint: Path | None  # a checkpoint of another run that this run continues
    metadata: dict[str, Any]  # content of the manifest; this and the fields below are set on the main rank only
    sinks: list[Sink]
    lock: FileLock | None  # the lock of the folder
    guard: FolderGuard | None = None
    _writing: threading.Lock = field(default_factory=threading.Lock, repr=False)  # of status.json

    def resume(self) -> Outcome | None:
        """Load the newest checkpoint and, unless the run has ended, write the manifest and start the sinks.

        The record of a run that has ended, or that this configuration cannot continue, is left as it was. A
        collective call.

        Returns:
            How the run ended before, if it did.
        """
        trainer = self.trainer
        if trainer.metrics:
            self.guard = FolderGuard(self.folder)
            trainer.metrics.check_folder = self.guard.check
        status = trainer.world.gather(read_status(self.folder))[0]
        if status.get("state") == "diverged":
            return Outcome("diverged", status.get("reason", ""))
        if status.get("state") != "finished":
            trainer.world.keep_verdict(self._record_failure)
        if trainer.resume(self.source_checkpoint, status.get("state") == "finished"):
            outcome = self._judge_loss()
            if status.get("state") != "finished":  # killed before it could say so
                self._write_status(outcome)
            return outcome
        if trainer.world.is_main:
            manifest.write(self.folder, self.config.to_dict(), self.metadata)
            if self.data.tokenizer.raw is not None:  # everyone who uses the model needs it
                write_atomic(self.folder / TOKENIZER, self.data.tokenizer.raw)
            manifest.show(self.metadata, self.folder)
            self._warn_of_missing_lines()
            if trainer.step:
                print(f"  going on after step {trainer.step:,}{self._describe_source()}", flush=True)
            self._start_sinks()
        return None

    def train(self) -> Outcome:
        """Train until the run has ended or is stopped, and write the status; a collective call."""
        world = self.trainer.world
        self._write_status(Outcome("running"))
        world.keep_verdict(self._record_failure)
        try:
            span = self.config.profile_steps
            with (
                self.trainer.stop,
                collect_garbage_together(world.size) as collect,
                profile_steps(span, self.folder, world.rank, world.device, self.trainer.step) as profile,
            ):
                self.trainer.after_step = [*collect, *profile]
                outcome = self.trainer.fit()
        except BaseException as error:
            self.trainer.checkpoints.abandon()
            self._record_failure(world.explain(error))
            raise
        world.keep_verdict(None)
        if outcome.state == "finished":
            outcome = self._judge_loss()
        self._write_status(outcome)
        return outcome

    def write_sample(self) -> Line:
        """Return a sample by the weights as they are, for a line of metrics: `sample`, or nothing where that fails.

        Every rank calls this; where each rank holds all weights the main one alone writes.
        """
        trainer = self.trainer
        if not (trainer.world.is_main or trainer.parallel.is_sharded):
            return {}
        try:
            return {"sample": generate_sample(self)[:LONGEST_SAMPLE]}
        except ValueError as error:  # the same on every rank, such as logits that are not finite
            if trainer.world.is_main:
                print_warning(f"there is no sample after step {trainer.step:,}: {error}")
            return {}

    def close(self) -> None:
        """End what runs in the background, give the terminal back, and release the folder."""
        self.trainer.loader.close()
        for sink in self.trainer.sinks:
            sink.finish({})  # has no effect after the first time
        if self.guard:
            self.guard.close()
        if self.lock:
            self.lock.release()

    def _warn_of_missing_lines(self) -> None:
        """Say which steps before the checkpoint have no line in metrics.jsonl: a run never writes them again."""
        trainer, origin = self.trainer, self.metadata.get("origin")
        first = origin.get("step", 0) if origin else 0
        written = {line["step"] for line in trainer.metrics.read()} if trainer.metrics else set()
        missing = [step for step in range(first + 1, trainer.step + 1) if step not in written]
        if missing:
            print_warning(
                f"{self.folder}/metrics.jsonl lacks {len(missing):,} of the lines up to step {trainer.step:,}, from "
                f"step {missing[0]:,} to step {missing[-1]:,}: it was changed, and the run goes on without them"
            )

    def _judge_loss(self) -> Outcome:
        """Return the end of a run that has finished, with a reason where it has learnt nothing."""
        lines = self.trainer.metrics.read() if self.trainer.metrics else []
        losses = [line["valid/loss"] for line in lines if "valid/loss" in line]
        if not losses:
            return Outcome("finished")
        reason = explain_unlearned(float(losses[-1]), self.model.vocab_size, self.data.unigram_loss)
        return Outcome("finished", reason)

    def _describe_source(self) -> str:
        if not self.source_checkpoint:
            return ""
        level = self.config.schedule["level"]
        start = "the full learning rate" if level == 1 else f"{level:g} times the learning rate"
        return f" of {self.source_checkpoint}; the learning rate decays from {start} to 0"

    def _start_sinks(self) -> None:
        """Start the sinks. Checkpoints keep the id of the W&B run too, so that it survives the loss of its file."""
        metadata, file = self.trainer.checkpoints.metadata, self.folder / "wandb_id"
        if metadata["wandb_id"] and not file.exists():
            write_atomic(file, metadata["wandb_id"].encode())
        self.trainer.sinks = self.sinks  # `close` ends them from here on, whatever happens
        for sink in self.sinks:
            sink.start(self.folder, self.config.to_dict(), self.trainer.settings.steps)
        if file.exists():
            metadata["wandb_id"] = read_regular(file).decode().strip()

    def _record_failure(self, reason: str) -> None:
        with suppress(OSError):  # the disk may be full, and the error says so
            try:
                self._write_status(Outcome("failed", reason))
            except OSError as error:
                if error.errno != errno.EMFILE or self.guard is None:
                    raise
                self.guard.close()  # which gives a descriptor back
                self._write_status(Outcome("failed", reason))

    def _write_status(self, outcome: Outcome) -> None:
        if self.trainer.world.is_main:
            with self._writing:
                if self.guard:
                    self.guard.check()
                write_status(self.folder, outcome, self.trainer.step, self.trainer.settings.steps)


def generate_sample(run: Run) -> str:
    """Return a short text by the model as it is, from the beginning of a document; no state of training changes.

    Where no rank holds all weights this is a collective call; its passes depend on none of the tokens that are drawn.

    Raises:
        ValueError: the model's logits are not finite.
    """
    trainer, tokenizer = run.trainer, run.data.tokenizer
    run.model.eval()
    try:
        # a compiled block would be compiled again for its cache
        with trainer.autocast(), torch.compiler.set_stance("force_eager"):
            new = generate(run.model, begin_document(tokenizer), run.config.sample_tokens, run.config.seq_len)
    finally:
        run.model.train()
    return tokenizer.decode(new)
