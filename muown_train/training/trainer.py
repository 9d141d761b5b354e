"""The training loop. One step reads straight down in `Trainer.train_step`; everything else happens at boundaries.

next(loader) -> summed loss / global count of targets -> backward (gradients are reduced with the last micro-batch
only) -> clip -> lr = base * schedule(step) -> optimizer.step() -> zero_grad -> at boundaries log, evaluate, save.
"""

import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from muown_train.analysis.validation import compute_perplexity, evaluate
from muown_train.config.schema import Schedule, TrainerSettings
from muown_train.data.loader import Batch, Loader
from muown_train.models.parallel import ReplicatedModel
from muown_train.optim.core.skip_step import step_or_skip
from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.metrics import FolderChangedError, Line, Metrics, Sink
from muown_train.runs.state import ModelState, OptimizerState, RandomState, State, Stateful
from muown_train.runs.status import Outcome
from muown_train.runtime.distributed import World
from muown_train.runtime.progress import Activity
from muown_train.runtime.replica_check import find_divergent_ranks
from muown_train.runtime.stop_signal import StopRequested, StopSignal
from muown_train.training.divergence import DivergenceMonitor, find_infinite_weight
from muown_train.training.step_hooks import Measurement
from muown_train.training.step_metrics import StepMetrics, StepRecord


class Trainer:
    """Trains a model on the rows of a loader. Every rank makes the same calls.

    Args:
        model: `model(inputs (B, T), targets (B, T))` returns the summed loss; it is on world.device.
        parallel: how the ranks share the model.
        valid: (N,) token ids of the validation text.
        monitor: decides when the run ends as diverged or goes back to a checkpoint.
        stop: asks the run to stop.
        metrics: the run's record, on the main rank only. `sinks` are set there once the run starts.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        parallel: ReplicatedModel,
        optimizer: Optimizer,
        schedule: Schedule,
        loader: Loader,
        valid: np.ndarray,
        checkpoints: Checkpoints,
        settings: TrainerSettings,
        monitor: DivergenceMonitor,
        stop: StopSignal,
        metrics: Metrics | None = None,
    ) -> None:
        self.world, self.model, self.parallel, self.replica = world, model, parallel, parallel.module
        self.optimizer, self.schedule = optimizer, schedule
        self.loader, self.valid, self.checkpoints, self.settings = loader, valid, checkpoints, settings
        self.monitor, self.stop, self.metrics = monitor, stop, metrics
        self.measurements = [Measurement("valid/loss", settings.eval_every, lambda: self.evaluate())]
        self.random_state, self.activity = RandomState(world), Activity()
        self.sinks: Sequence[Sink] = ()
        self.after_step: list[Callable[[int], None]] = []
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.step = self.tokens = 0
        self.step_metrics = StepMetrics(settings, world)
        self.unwritten: str | None = None  # why metrics.jsonl lacks lines
        self.returned_to: int | None = None  # the step of the checkpoint that the last rollback went back to

    def fit(self) -> Outcome:
        """Train until the budget is spent, the ranks agree on a stop, or the run has diverged.

        Raises:
            OSError: a checkpoint or the metrics could not be written, or the data failed; on every rank.
            RuntimeError: the ranks no longer have the same weights.
        """
        self.begin()
        if self.stop.decided:
            return Outcome("stopped", self.stop.decided)
        while self.step < self.settings.steps:
            self.step_metrics.add(self.train_step())
            for call in self.after_step:
                call(self.step)
            if (reason := self.stop.should_stop()) or self.is_boundary():
                if outcome := self.handle_boundary(reason):
                    return outcome
                self.step_metrics.start_clock()
        return Outcome("finished")

    def train_step(self) -> StepRecord:
        """Update the weights once. Nothing here waits for the device."""
        started = time.perf_counter()
        data_state = self.loader.state_dict()
        batch, fault = self.next_batch()
        waited = time.perf_counter() - started
        rows = batch.tokens.to(self.world.device, non_blocking=True)  # (B, T+1)
        targets = self.settings.batch_tokens  # targets of all ranks
        loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        micro_batches = torch.split(rows, self.settings.micro_batch)
        for i, micro_batch in enumerate(micro_batches):
            with self.parallel.reduce_gradients(i + 1 == len(micro_batches)), self.autocast():
                summed = self.replica(micro_batch[:, :-1], micro_batch[:, 1:])
                # Gradients are averaged over ranks; times the number of ranks the mean is the sum.
                share = self.world.size / targets
                # A NaN loss on one rank makes the reduced gradient NaN on all ranks, so the others learn of the fault
                # without an extra collective.
                (summed * (math.nan if fault else share)).backward()
            loss += summed.detach().double() / targets
        grad_norm = self.parallel.clip_gradients(self.settings.grad_clip)
        multiplier = self.schedule(self.step, self.settings.steps)
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr * multiplier
        line: Line = {"step": self.step + 1, "tokens": self.tokens + targets}
        line["train/lr"] = self.base_lrs[0] * multiplier
        # Gradients are reduced already, so every rank decides alike.
        step_or_skip(self.optimizer, (~torch.isfinite(grad_norm)).float())
        self.optimizer.zero_grad(set_to_none=not self.parallel.keeps_gradients)
        self.step, self.tokens = line["step"], line["tokens"]
        self.world.record_step(self.step)
        # The batch ends at the loader's next row. Rows that are skipped may lie before it.
        span = (self.loader.next_row - targets // self.settings.seq_len, self.loader.next_row)
        return StepRecord(line, loss, grad_norm, batch.hash, span, data_state, fault, waited)

    def next_batch(self) -> tuple[Batch, str | None]:
        """Return the next batch of this rank, or a batch of zeros and the reason why there are no data.

        After such a batch there are no data until all ranks have learned of it.
        """
        pending = self.step_metrics.pending
        fault = pending[-1].fault if pending else None
        if not fault:
            try:
                return next(self.loader), None
            except Exception as error:  # readers and tokenizers raise errors of every kind
                if not isinstance(error, OSError | ValueError):  # these say what happened
                    traceback.print_exc()
                fault = str(error) or type(error).__name__
                self.stop.request(fault)  # all ranks see the reason at the next boundary
        rows = self.settings.batch_tokens // self.settings.seq_len // self.world.size
        return Batch(torch.zeros(rows, self.settings.seq_len + 1, dtype=torch.int64), 0), fault

    def autocast(self) -> torch.autocast:
        """Return a context for forward passes in the run's precision."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.settings.autocast)

    def begin(self) -> None:
        """Measure before the first step, and where a stop came before a measurement that was due."""
        line, owed = self.find_owed()
        measured = self.measure([m for m in self.measurements if m.key in owed])  # on the main rank perhaps alone
        self.world.run_on_main(lambda: self.metrics.amend(line | measured) if self.metrics and measured else None)
        if measured:
            self.show([line | measured])
        self.step_metrics.start_clock()

    def find_owed(self) -> tuple[Line, set[str]]:
        """Return the line of this step, and the keys of the measurements that it lacks; a collective call."""
        written = self.metrics.read()[-1:] if self.metrics else []
        last = written[0] if written and written[0]["step"] == self.step else {}
        owed = {m.key for m in self.list_due()} - last.keys()
        owed = self.world.gather(owed if written else owed | {"valid/loss"})[0]
        return {"step": self.step, "tokens": self.tokens, "time": self.step_metrics.seconds, **last}, owed

    def is_boundary(self) -> bool:
        """Return whether this step is followed by logging, a checkpoint, a check or a measurement."""
        intervals = (self.settings.log_every, self.settings.save_every, self.settings.check_every)
        return bool(self.list_due()) or any(self.is_due(every) for every in intervals if every)

    def is_due(self, every: int) -> bool:
        """Return whether this step is a multiple of `every` or the last one."""
        return self.step % every == 0 or self.step == self.settings.steps

    def list_due(self) -> list[Measurement]:
        """Return the measurements that are due after this step."""
        return [m for m in self.measurements if self.is_due(m.every) and (self.step or m.before_training)]

    def handle_boundary(self, stop_reason: str | None) -> Outcome | None:
        """Bring the numbers of the steps since the last boundary to the host, and act on them; a collective call.

        Args:
            stop_reason: why the run is to stop here.

        Returns:
            How the run ended, if it did.
        """
        self.stop_if_data_failed()
        spans = [record.rows for record in self.step_metrics.pending]
        lines = self.collect()
        bad, diverged = self.monitor.find_bad_steps(lines, spans), self.monitor.find_divergence(lines)
        if not self.monitor.bad_rows:  # a stop may make any boundary one that saves
            bad = bad or find_infinite_weight(self.model, self.step, self.world)
        if not (stop_reason or bad or diverged):
            lines[-1] |= self.measure(self.list_due())
            stop_reason = self.stop.decided
        elif diverged:
            lines[-1]["train/diverged"] = True
        self.record(lines)
        if bad and self.monitor.on_bad_updates == "rollback":
            return self.roll_back(bad)
        if bad or diverged:
            return self.end_as_diverged(bad or diverged or "")
        if self.settings.check_every and self.is_due(self.settings.check_every):
            self.compare_replicas()
        last = bool(stop_reason) or self.step == self.settings.steps
        # While steps are being skipped the state is not one to return to.
        if last or (self.is_due(self.settings.save_every) and not self.monitor.bad_rows):
            self.try_to_save(lambda: self.save(lines[-1].get("valid/loss"), last), fatal=last)
        self.try_to_save(self.checkpoints.settle)
        return Outcome("stopped", stop_reason) if stop_reason else None

    def stop_if_data_failed(self) -> None:
        """Save what was trained before the data failed on any rank, if they did; a collective call.

        Raises:
            OSError: the data failed; on every rank, with the reason and how to go on.
        """
        failure = self.step_metrics.find_fault()
        if failure is None:
            return
        first, fault = failure
        pending = self.step_metrics.pending
        undone, self.step_metrics.pending = pending[first], pending[:first]
        self.step, self.tokens = undone.line["step"] - 1, undone.line["tokens"] - self.settings.batch_tokens
        self.loader.load_state_dict(undone.data_state)
        if self.step_metrics.pending:
            self.record(self.collect())
        if self.step:
            self.save(wait=True)
        saved = f"after step {self.step}, which is saved" if self.step else "before the first step"
        raise OSError(f"{fault}; stopped {saved}: the same command goes on")

    def collect(self) -> list[Line]:
        """Return the lines of the pending steps, and record which were skipped; a collective call."""
        lines, skipped = self.step_metrics.collect()
        if self.metrics:
            for event in skipped:
                self.metrics.append_event(event)
        return lines

    def measure(self, due: Sequence[Measurement]) -> Line:
        """Return the numbers of these measurements of the weights as they are; a collective call.

        A stop ends this early: what is not measured then is owed when the run goes on.
        """
        line: Line = {}
        with self.activity("evaluating"), suppress(StopRequested):
            for measurement in due:
                line |= measurement.measure()
        return line

    def evaluate(self) -> Line:
        """Return the validation loss of the weights as they are; a collective call."""
        settings = self.settings
        sizes = settings.valid_tokens, settings.seq_len, settings.micro_batch
        with self.autocast():
            loss, count = evaluate(self.model, self.valid, *sizes, self.world, self.stop.check)
        return {"valid/loss": loss, "valid/perplexity": compute_perplexity(loss), "valid/tokens": count}

    def record(self, lines: Sequence[Line]) -> None:
        """Write lines of metrics and show them. Lines that cannot be written wait for the next ones."""
        if self.metrics:
            try:
                self.metrics.append(lines)
                self.unwritten = None
            except OSError as error:
                self.unwritten = str(error)
                print(error, file=sys.stderr, flush=True)
                if isinstance(error, FolderChangedError):
                    self.stop.request(str(error))
        self.show(lines)

    def show(self, lines: Sequence[Line]) -> None:
        """Hand lines to the sinks."""
        for sink in self.sinks:
            sink.write(lines)

    def roll_back(self, reason: str) -> Outcome | None:
        """Go back to the last checkpoint and leave out the rows of the bad steps; a collective call.

        If training has failed again since the last return to this checkpoint, the one before it is taken.

        Returns:
            The end of the run, if it cannot go back.
        """
        bad_rows, rollbacks, from_step = list(self.monitor.bad_rows), self.monitor.rollbacks, self.step
        self.monitor.restart()
        if rollbacks == self.monitor.max_rollbacks:
            return self.end_as_diverged(f"{reason}, after {rollbacks} rollbacks")
        skipped = [*self.loader.skipped, *bad_rows]  # this includes rows that the checkpoint does not know of
        if self.returned_to is not None:
            self.checkpoints.set_aside_newest(self.returned_to, "training from it has failed twice")
        step = self.returned_to = self.checkpoints.load(self.list_stateful())
        if step is None:
            return self.end_as_diverged(f"{reason}, and there is no checkpoint to go back to")
        self.monitor.rollbacks = rollbacks + 1
        self.step_metrics.rolled_back = True
        self.loader.skip(skipped)
        self.rewind_metrics(step)
        if self.metrics:
            event = {"kind": "rollback", "step": from_step, "to": step, "rows": bad_rows, "reason": reason}
            self.metrics.append_event(event)
            print(f"{reason}: going back to step {step} and leaving out {len(bad_rows)} batches", flush=True)
        return None

    def end_as_diverged(self, reason: str) -> Outcome:
        """End a run that has diverged; a checkpoint that fails does not change that. A collective call."""
        self.checkpoints.settle_or_warn()
        return Outcome("diverged", reason)

    def compare_replicas(self) -> None:
        """Stop a run whose ranks no longer have the same weights; a collective call."""
        difference = find_divergent_ranks(self.model.named_parameters(), self.world, self.parallel.copies)
        if difference:
            raise RuntimeError(
                f"after step {self.step} {difference}; the same command goes on from the last checkpoint"
            )

    def save(self, loss: float | None = None, wait: bool = False) -> None:
        """Begin to write a checkpoint; a collective call.

        Args:
            loss: the validation loss after this step, if known.
            wait: whether to return only when the checkpoint is on the disk.

        Raises:
            OSError: on every rank; with `stop_if_unsaved` also where metrics.jsonl lacks lines, which a run that
                resumes from here would never write.
        """
        with self.activity("saving"):
            self.world.run_on_main(self.sync_metrics)
            self.checkpoints.save(self.step, self.list_stateful(), loss, wait)

    def sync_metrics(self) -> None:
        """Bring metrics.jsonl to the disk, since no checkpoint may outlast it; on the main rank."""
        if self.metrics:
            self.metrics.sync()
        if self.unwritten and self.settings.stop_if_unsaved:
            raise OSError(self.unwritten)

    def rewind_metrics(self, step: int) -> None:
        """Take the lines after `step` out of the metrics; a collective call."""
        self.world.run_on_main(lambda: self.metrics.rewind(step) if self.metrics else None)

    def try_to_save(self, save: Callable[[], Any], fatal: bool = False) -> None:
        """Save. Where that fails the run ends (always if `fatal`) or goes on without the checkpoint, as configured."""
        try:
            save()
        except OSError as error:
            if self.settings.stop_if_unsaved or fatal or isinstance(error, FolderChangedError):
                raise
            if self.metrics:
                print(f"{error}; going on without this checkpoint", file=sys.stderr, flush=True)

    def resume(self, origin: Path | None = None, has_ended: bool = False) -> bool:
        """Load the newest checkpoint, if there is one, and return whether nothing is left to do; a collective call.

        Args:
            origin: a checkpoint of another run, to load where this run has none. It becomes the first checkpoint of
                this run, which then never depends on the other run again.
            has_ended: whether the run has finished before, which then owes no measurement but a lost evaluation.

        Raises:
            ValueError: the newest checkpoint is of another model or optimizer.
        """
        step = self.checkpoints.load(self.list_stateful())
        if step is None and origin:
            step = self.checkpoints.load(self.list_stateful(), origin)
            self.save(wait=True)
        self.rewind_metrics(-1 if step is None else step)
        owed = self.find_owed()[1]
        return self.step >= self.settings.steps and not ("valid/loss" in owed if has_ended else owed)

    def list_stateful(self) -> dict[str, Stateful]:
        """Return all that a checkpoint holds."""
        return {
            "model": ModelState(self.model),
            "optimizer": OptimizerState(self.optimizer, self.model),
            "data": self.loader,
            "random": self.random_state,
            "trainer": self,
        }

    def state_dict(self) -> State:
        """Return the loop's own counters."""
        seconds, rollbacks = self.step_metrics.seconds, self.monitor.rollbacks
        return {"step": self.step, "tokens": self.tokens, "seconds": seconds, "rollbacks": rollbacks}

    def load_state_dict(self, state: State) -> None:
        """Take the counters of a state dict."""
        self.step, self.tokens, self.step_metrics.seconds = state["step"], state["tokens"], state["seconds"]
        self.monitor.rollbacks = state["rollbacks"]
