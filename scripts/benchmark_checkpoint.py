"""Measure how long training pauses for a checkpoint: `python scripts/benchmark_checkpoint.py [SETTING …]`.

The script saves the weights and the optimizer state of a configuration, given by SETTINGs such as `model=124m
optim=adamw`, as one rank holds them after a step on random gradients. Every round saves three times: synchronously
(training waits until the checkpoint is published), asynchronously with nothing beside, and asynchronously while the
optimizer goes on. Medians are printed. The pause of an asynchronous save is all that training waits for: the copy to
host memory, and later publication.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from muown_train.cli.errors import CommandParser, parse_count, report_errors
from muown_train.cli.process import run_script
from muown_train.config.compose import load_config
from muown_train.models.language_model import build_model
from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.state import ModelState, OptimizerState, Stateful
from muown_train.runtime.benchmark import parse_device, time_call
from muown_train.runtime.distributed import World
from muown_train.training.optimizers import build_optimizer


def build(overrides: list[str], device: torch.device) -> tuple[nn.Module, Optimizer]:
    """Return the model and the optimizer of a configuration, with state and gradients."""
    config = load_config(overrides)
    model: nn.Module = build_model(config.model, config.seq_len).to(device)
    optimizer = build_optimizer(config.optim, model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return model, optimizer


def measure(checkpoints: Checkpoints, state: dict[str, Stateful], optimizer: Optimizer, rounds: int) -> dict[str, Any]:
    """Return the median seconds of each kind of saving, and of an optimizer step alone and beside a save."""
    device, seconds = checkpoints.world.device, defaultdict(list)
    seconds["first"] = [time_call(lambda: checkpoints.save(0, state), device)]
    for step in range(1, 3 * rounds + 1, 3):
        checkpoints.settle(wait=True)
        seconds["synchronous"].append(time_call(partial(checkpoints.save, step, state, wait=True), device))

        started = time.perf_counter()
        copy_seconds = time_call(partial(checkpoints.save, step + 1, state), device)
        while True:
            asked_at = time.perf_counter()
            if checkpoints.settle():
                break
            time.sleep(0.002)
        now = time.perf_counter()
        seconds["copy"].append(copy_seconds)
        seconds["publication"].append(now - asked_at)
        seconds["pause"].append(copy_seconds + now - asked_at)
        seconds["until published"].append(now - started)

        seconds["alone"].append(time_call(optimizer.step, device))
        checkpoints.save(step + 2, state)
        seconds["beside"].append(time_call(optimizer.step, device))
        while checkpoints._writer and checkpoints._writer.is_alive():
            seconds["beside"].append(time_call(optimizer.step, device))
    checkpoints.settle(wait=True)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("overrides", nargs="*", help="as for training: model=124m optim=muown …")
    parser.add_argument("--rounds", type=parse_count(), default=5, help="number of rounds (default 5)")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default that of temporary files)")
    parser.add_argument("--device", type=parse_device, default="auto", help="cpu or cuda")
    arguments = parser.parse_args()
    with report_errors(arguments.overrides):
        device = torch.device(arguments.device)
        model, optimizer = build(arguments.overrides, device)
        state: dict[str, Stateful] = {"model": ModelState(model), "optimizer": OptimizerState(optimizer, model)}
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            medians = measure(Checkpoints(Path(folder), World(0, 1, device)), state, optimizer, arguments.rounds)
            newest = max(Path(folder).glob("step-*"))
            megabytes = sum(path.stat().st_size for path in newest.iterdir()) / 1e6
    print(
        f"{megabytes:.0f} MB, {device.type}, {torch.get_num_threads()} threads, {arguments.rounds} rounds, in {folder}"
    )
    print(f"synchronous save          {medians['synchronous'] * 1e3:8.1f} ms")
    print(
        f"pause of an asynchronous  {medians['pause'] * 1e3:8.1f} ms: copy {medians['copy'] * 1e3:.1f} "
        f"(the first, into fresh memory, {medians['first'] * 1e3:.1f}), publication {medians['publication'] * 1e3:.1f}"
    )
    print(f"ratio                     {medians['synchronous'] / medians['pause']:8.1f}")
    print(f"until published           {medians['until published'] * 1e3:8.1f} ms")
    print(f"optimizer step meanwhile  {medians['beside'] / medians['alone']:8.2f} of one alone")


if __name__ == "__main__":
    run_script(main)
