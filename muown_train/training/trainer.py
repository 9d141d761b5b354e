"""The training loop: one step reads straight down, everything else happens between steps.

next(loader) -> summed loss / global count of targets -> backward (gradients are reduced with the last micro-batch
only) -> clip -> lr = base * schedule(step) -> optimizer.step() -> zero_grad -> at boundaries log, evaluate, save.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from muown_train.analysis.validation import evaluate
from muown_train.config.schema import Schedule, TrainerSettings
from muown_train.data.loader import Batch, Loader
from muown_train.optim.core.skip_step import step_unless
from muown_train.runs.checkpoint import Checkpoints, ModelState, OptimizerState, State, Stateful
from muown_train.runs.metrics import Line, Metrics, Sink
from muown_train.runs.rng_state import RandomState
from muown_train.runs.status import Outcome
from muown_train.runtime.distributed import World, replicated
from muown_train.runtime.replica_check import differing
from muown_train.runtime.stop_signal import Stop
from muown_train.training.divergence import Guard, Rows
from muown_train.training.step_metrics import Update, first_fault, gradient_norms


class Trainer:
    """Trains a model on the rows of a loader; the same calls on every rank.

    Args:
        model: `model(inputs (B, T), targets (B, T))` gives the summed loss; on world.device, maybe compiled.
        valid: (N,) token ids of the validation text.
        guard: what ends the run or takes it back.
        stop: what asks it to stop.
        metrics: None on all ranks but the main one. `sinks` is set there once the run goes on.
        probe: gives further numbers about the weights as they are, and changes nothing; called on every rank.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: Schedule,
        loader: Loader,
        valid: np.ndarray,
        checkpoints: Checkpoints,
        settings: TrainerSettings,
        guard: Guard,
        stop: Stop,
        metrics: Metrics | None = None,
        probe: Callable[[], Line] | None = None,
    ) -> None:
        self.world, self.model, self.optimizer, self.schedule = world, model, optimizer, schedule
        self.loader, self.valid, self.checkpoints, self.settings = loader, valid, checkpoints, settings
        self.guard, self.stop, self.metrics, self.probe = guard, stop, metrics, probe
        self.random_state = RandomState(world)
        self.sinks: Sequence[Sink] = ()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.replica = model if world.size == 1 else replicated(model, world.device, settings.reduce_in_bfloat16)
        self.step = self.tokens = 0
        self.rolled_back = False  # since the last boundary
        self.unwritten: str | None = None  # why metrics.jsonl lacks lines
        self.seconds = 0.0  # of training, without evaluation and saving, over all restarts
        self.pending: list[Update] = []
        self.resumed_at = time.perf_counter()

    def fit(self) -> Outcome:
        """Train until the budget is spent, a stop is agreed on, or the run has diverged.

        Raises:
            OSError: a checkpoint or the metrics could not be written, or the data failed; on every rank.
            RuntimeError: the weights of the ranks have parted.
        """
        self.begin()
        while self.step < self.settings.steps:
            self.pending.append(self.train_step())
            reason = self.stop.agreed()
            if self.step == self.settings.steps:
                reason = None  # it ends anyhow
            settings = self.settings
            intervals = (settings.log_every, settings.eval_every, settings.save_every, settings.check_every)
            if reason or self.probe_due() or any(self.due(every) for every in intervals if every):
                outcome = self.boundary(reason)
                if outcome:
                    return outcome
                self.resumed_at = time.perf_counter()
        return Outcome("finished")

    def begin(self) -> None:
        """Evaluate and probe where that is still owed: before the first update, and where a stop came before it."""
        written = self.metrics.read()[-1:] if self.metrics else []
        last = written[0] if written and written[0]["step"] == self.step else {}
        evaluation = self.step == 0 or not written or (self.due(self.settings.eval_every) and "valid/loss" not in last)
        probe = self.probe_due() and "probe/seconds" not in last
        evaluation, probe = self.world.gather((evaluation, probe))[0]
        if evaluation or probe:
            line = {"step": self.step, "tokens": self.tokens, "time": self.seconds, **last}
            line |= self.measured(evaluation, probe)
            self.world.on_main(lambda: self.metrics.amend(line) if self.metrics else None)
            self.show([line])
        self.resumed_at = time.perf_counter()

    def boundary(self, stopping: str | None) -> Outcome | None:
        """Bring the numbers of the updates since the last boundary to light, and act on them; a collective call.

        Args:
            stopping: why the run is to stop here.

        Returns:
            How the run ended, if it did.
        """
        self.stop_if_data_failed()
        rows = [update.rows for update in self.pending]
        lines = self.collect()
        too_bad, diverged = self.guard.bad_updates(lines, rows), self.guard.diverged(lines)
        if not (stopping or too_bad or diverged):
            lines[-1] |= self.measured(self.due(self.settings.eval_every), self.probe_due())
        elif diverged:
            lines[-1]["train/diverged"] = True
        self.record(lines)
        if too_bad and self.guard.on_bad_updates == "rollback":
            return self.roll_back(too_bad)
        if too_bad or diverged:
            return self.diverged(too_bad or diverged or "")
        if self.settings.check_every and self.due(self.settings.check_every):
            self.compare_weights()
        last = bool(stopping) or self.step == self.settings.steps
        # what bad updates lead to is not what to go back to
        if last or (self.due(self.settings.save_every) and not self.guard.bad_rows):
            self.unless_unsaved(lambda: self.save(lines[-1].get("valid/loss"), last), fatal=last)
        self.unless_unsaved(self.checkpoints.settle)
        return Outcome("stopped", stopping) if stopping else None

    def roll_back(self, why: str) -> Outcome | None:
        """Go back to the last checkpoint and past the rows of the bad updates; a collective call."""
        updates, rows, before = self.step, list(self.guard.bad_rows), self.guard.rollbacks
        self.guard.bad_rows.clear()
        self.guard.losses.clear()
        if before == self.guard.max_rollbacks:
            return self.diverged(f"{why}, after {before} rollbacks")
        skipped = [*self.loader.skipped, *rows]  # also those that the checkpoint does not know of
        step = self.checkpoints.load(self.stateful())
        if step is None:
            return self.diverged(f"{why}, and there is no checkpoint to go back to")
        self.guard.rollbacks = before + 1
        self.rolled_back = True
        self.loader.skip(skipped)
        self.rewind(step)
        if self.metrics:
            self.metrics.event({"kind": "rollback", "step": updates, "to": step, "rows": rows, "reason": why})
            print(f"{why}: going back to update {step}, and past {len(rows)} batches", flush=True)
        return None

    def rewind(self, step: int) -> None:
        """Take what lies after `step` out of the metrics; a collective call."""
        self.world.on_main(lambda: self.metrics.rewind(step) if self.metrics else None)

    def diverged(self, why: str) -> Outcome:
        """The end of a run that has diverged, which a checkpoint that fails does not change; a collective call."""
        self.checkpoints.settle_or_warn()
        return Outcome("diverged", why)

    def compare_weights(self) -> None:
        """Stop a run whose ranks no longer have the same weights; a collective call."""
        parted = differing(self.model.named_parameters(), self.world)
        if parted:
            raise RuntimeError(f"after update {self.step} {parted}; the same command goes on from the last checkpoint")

    def save(self, loss: float | None = None, wait: bool = False) -> None:
        """Begin to write a checkpoint; a collective call.

        Args:
            loss: of the validation text after this update, if known.
            wait: until it is on the disk.

        Raises:
            OSError: on every rank; also where metrics.jsonl lacks lines: going on from here would never write them.
        """
        self.world.on_main(self.sync_metrics)
        self.checkpoints.save(self.step, self.stateful(), loss, wait)

    def sync_metrics(self) -> None:
        """Bring metrics.jsonl to the disk, which no checkpoint may outlast; on the main rank."""
        if self.unwritten:
            raise OSError(self.unwritten)
        if self.metrics:
            self.metrics.sync()

    def unless_unsaved(self, save: Callable[[], Any], fatal: bool = False) -> None:
        """Save; where that fails the run ends (always if `fatal`) or goes on without, as configured."""
        try:
            save()
        except OSError as error:
            if self.settings.stop_if_unsaved or fatal:
                raise
            if self.metrics:
                print(f"{error}; going on without this checkpoint", file=sys.stderr, flush=True)

    def due(self, every: int) -> bool:
        """Whether this step is a boundary; the last one always is."""
        return self.step % every == 0 or self.step == self.settings.steps

    def probe_due(self) -> bool:
        """Whether there is a probe, and this step is one of its own."""
        return self.probe is not None and self.due(self.settings.probe_every or self.settings.steps)

    def measured(self, evaluation: bool, probe: bool) -> Line:
        """What is asked for of the weights as they are; a collective call."""
        line = self.evaluate() if evaluation else {}
        return line | self.probe() if probe and self.probe else line

    def train_step(self) -> Update:
        """One update of the weights."""
        started = time.perf_counter()
        place = self.loader.state_dict()
        batch, fault = self.next_batch()
        waited = time.perf_counter() - started
        rows = batch.tokens.to(self.world.device, non_blocking=True)  # (B, T+1)
        targets = self.settings.batch_tokens  # of all ranks
        loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        micro_batches = torch.split(rows, self.settings.micro_batch)
        for i, micro_batch in enumerate(micro_batches):
            with self.gradients_reduced(i + 1 == len(micro_batches)), self.autocast():
                summed = self.replica(micro_batch[:, :-1], micro_batch[:, 1:])
                # DDP takes the mean of gradients over ranks: times their number it is the sum
                share = self.world.size / targets
                # what is no number here is none on any rank, so that all learn of the fault without a message a step
                (summed * (math.nan if fault else share)).backward()
            loss += summed.detach().double() / targets
        grad_norm = clip_grad_norm_(self.parameters, self.settings.grad_clip or math.inf)
        multiplier = self.schedule(self.step, self.settings.steps)
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr * multiplier
        line: Line = {"step": self.step + 1, "tokens": self.tokens + targets}
        line["train/lr"] = self.base_lrs[0] * multiplier
        # gradients are reduced, so that every rank decides alike
        step_unless((~torch.isfinite(grad_norm)).float(), self.optimizer)
        self.optimizer.zero_grad(set_to_none=self.replica is self.model)  # see `replicated`
        self.step, self.tokens = line["step"], line["tokens"]
        self.world.reached(self.step)
        # the batch ends here; rows that are skipped may lie before it
        span = (self.loader.place - targets // self.settings.seq_len, self.loader.place)
        return Update(line, loss, grad_norm, batch.hash, span, place, fault, waited)

    def next_batch(self) -> tuple[Batch, str | None]:
        """The next batch of this rank, or one of no meaning and what keeps the data from coming.

        There are no data any more after such a batch until all ranks have learned of it.
        """
        fault = self.pending[-1].fault if self.pending else None
        if not fault:
            try:
                return next(self.loader), None
            except (OSError, ValueError) as error:
                fault = str(error) or type(error).__name__
                self.stop.request(fault)  # at the next boundary all ranks see why
        rows = self.settings.batch_tokens // self.settings.seq_len // self.world.size
        return Batch(torch.zeros(rows, self.settings.seq_len + 1, dtype=torch.int64), 0), fault

    def stop_if_data_failed(self) -> None:
        """Save what was trained before the data failed on any rank, if they did; a collective call.

        Raises:
            OSError: on every rank, with the reason and how to go on.
        """
        found = first_fault(self.pending, self.world)
        if found is None:
            return
        first, fault = found
        undone, self.pending = self.pending[first], self.pending[:first]
        self.step, self.tokens = undone.line["step"] - 1, undone.line["tokens"] - self.settings.batch_tokens
        self.loader.load_state_dict(undone.place)
        if self.pending:
            self.record(self.collect())
        if self.step:
            self.save(wait=True)
        saved = f"after update {self.step}, which is saved" if self.step else "before the first update"
        raise OSError(f"{fault}; stopped {saved}: the same command goes on")

    def gradients_reduced(self, now: bool) -> AbstractContextManager[None]:
        """Gradients are reduced over ranks with this backward pass, or only added up here."""
        if isinstance(self.replica, DistributedDataParallel) and not now:
            return self.replica.no_sync()
        return nullcontext()

    def autocast(self) -> torch.autocast:
        """Forward passes in the run's precision."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.settings.autocast)

    def evaluate(self) -> Line:
        """Validation loss of the weights as they are."""
        settings = self.settings
        with self.autocast():
            loss, count = evaluate(
                self.model, self.valid, settings.valid_tokens, settings.seq_len, settings.micro_batch, self.world
            )
        return {"valid/loss": loss, "valid/perplexity": math.exp(min(loss, 700)), "valid/tokens": count}

    def collect(self) -> list[Line]:
        """Bring the numbers of pending updates to the host; a collective call."""
        losses = torch.zeros(self.world.size, len(self.pending), dtype=torch.float64)
        losses[self.world.rank] = torch.stack([update.loss for update in self.pending])
        losses = self.world.sum(losses)  # of each rank
        norms = gradient_norms(self.pending)
        hashes = self.world.sum(torch.tensor([update.hash for update in self.pending])).tolist()
        seconds = time.perf_counter() - self.resumed_at
        lines = []
        for i, update in enumerate(self.pending):
            line = update.line
            line["time"] = self.seconds + seconds * (i + 1) / len(self.pending)
            line["train/loss"], line["train/grad_norm"] = losses[:, i].sum().item(), norms[i]
            line["data/hash"] = f"{hashes[i] % 2**64:016x}"
            if not math.isfinite(norms[i]):
                line["train/skipped"] = True
                self.tell_of_skipped(line, losses[:, i], update.rows)
            lines.append(line)
        if skipped := sum("train/skipped" in line for line in lines):
            lines[-1]["train/skipped_updates"] = skipped
        if self.rolled_back:
            lines[-1]["train/rolled_back"], self.rolled_back = True, False
        lines[-1] |= self.speed(seconds)
        self.seconds += seconds
        self.pending = []
        return lines

    def tell_of_skipped(self, line: Line, losses: Tensor, rows: Rows) -> None:
        """Record on which ranks the loss was no number; where it was one on all, only a gradient was not."""
        if self.metrics:
            ranks = (~losses.isfinite()).nonzero().flatten().tolist()
            facts = {key: line[key] for key in ("step", "train/loss", "train/grad_norm", "data/hash")}
            self.metrics.event({"kind": "skipped update", **facts, "ranks": ranks, "rows": list(rows)})

    def speed(self, seconds: float) -> Line:
        """What is measured once per log boundary, over the updates since the last one."""
        tokens = len(self.pending) * self.settings.batch_tokens
        line: Line = {
            "system/tokens_per_second": tokens / seconds,
            "system/seconds_left": (self.settings.steps - self.step) * seconds / len(self.pending),
            "data/wait_fraction": sum(update.waited for update in self.pending) / seconds,
        }
        if self.settings.flops_per_token and self.settings.peak_flops:
            peak = self.settings.peak_flops * self.world.size
            line["system/mfu"] = self.settings.flops_per_token * tokens / seconds / peak
        if self.world.device.type == "cuda":
            line["system/peak_memory"] = torch.cuda.max_memory_allocated(self.world.device)
        return line

    def record(self, lines: Sequence[Line]) -> None:
        """Write lines of metrics and show them. Lines that cannot be written wait for the next ones."""
        if self.metrics:
            try:
                self.metrics.append(lines)
                self.unwritten = None
            except OSError as error:
                self.unwritten = str(error)
                print(error, file=sys.stderr, flush=True)
        self.show(lines)

    def show(self, lines: Sequence[Line]) -> None:
        """Hand lines to the sinks."""
        for sink in self.sinks:
            sink.lines(lines)

    def resume(self, origin: Path | None = None) -> bool:
        """Take up the newest checkpoint, if any; whether the run is finished.

        Args:
            origin: a checkpoint of another run to go on from where there is none. It becomes the first one here, so
                that this run never depends on the other again.

        Raises:
            ValueError: the newest checkpoint is of another model or optimizer.
        """
        step = self.checkpoints.load(self.stateful())
        if step is None and origin:
            step = self.checkpoints.load(self.stateful(), origin)
            self.save(wait=True)
        self.rewind(-1 if step is None else step)
        return self.step >= self.settings.steps

    def stateful(self) -> dict[str, Stateful]:
        """All that a checkpoint holds."""
        return {
            "model": ModelState(self.model),
            "optimizer": OptimizerState(self.optimizer, self.model),
            "data": self.loader,
            "random": self.random_state,
            "trainer": self,
        }

    def state_dict(self) -> State:
        """The loop's own counters."""
        return {"step": self.step, "tokens": self.tokens, "seconds": self.seconds, "rollbacks": self.guard.rollbacks}

    def load_state_dict(self, state: State) -> None:
        """The inverse of state_dict."""
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.guard.rollbacks = state["rollbacks"]
