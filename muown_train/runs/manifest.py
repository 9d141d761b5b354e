"""What a run was: versions, device, data, and for every parameter the optimizer, its rates and its row blocks."""

import importlib.metadata
import json
import math
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from muown_train.config.schema import TrainerSettings
from muown_train.optim import Combined
from muown_train.optim.core.matrix import MatrixOptimizer
from muown_train.runtime.atomic_files import write_atomic
from muown_train.runtime.distributed import World
from muown_train.runtime.hardware import get_device_name
from muown_train.runtime.redaction import redact_tree

_PACKAGES = (
    "muown-train",
    "torch",
    "numpy",
    "tiktoken",
    "tokenizers",
    "transformers",
    "datasets",
    "safetensors",
    "hydra-core",
)


def describe(
    model: nn.Module,
    optimizer: Combined,
    data: Mapping[str, Any],
    settings: TrainerSettings,
    world: World,
    started: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Facts about a run as JSON.

    Args:
        started: what it started from, if not from scratch.
    """
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "git_commit": _git_commit(),
        "command": sys.argv[1:],
        "device": get_device_name(world.device),
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "settings": asdict(settings),
        "init_from": dict(started) if started else None,
        "data": dict(data),
        "groups": groups(optimizer),
    }


def groups(optimizer: Combined) -> list[dict[str, Any]]:
    """The resolved settings of every group of parameters."""
    return [
        {
            "role": group.get("role", "matrix"),
            "optimizer": type(part).__name__,
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "blocks": group.get("blocks"),
            "patterns": group.get("patterns", {}),
            "scales": sorted(set(part.scales(group))) if isinstance(part, MatrixOptimizer) else [],
            "parameters": {name: list(p.shape) for name, p in zip(group["param_names"], group["params"], strict=True)},
        }
        for part in optimizer.optimizers
        for group in part.param_groups
    ]


def write(folder: Path, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """config.yaml and manifest.json in a run's folder, with *** in place of secrets.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomic(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(redact_tree(config))).encode())
    write_atomic(folder / "manifest.json", (json.dumps(redact_tree(facts), indent=1) + "\n").encode())


def show(facts: Mapping[str, Any], folder: Path) -> None:
    """The head of a run's output."""
    settings = facts["settings"]
    tokens = settings["steps"] * settings["batch_tokens"]
    amount = f"{tokens / 1e6:,.1f}M" if tokens >= 1e5 else f"{tokens:,}"
    precision = "bfloat16" if settings["autocast"] else "float32"
    print(f"{folder}")
    print(
        f"  {facts['parameters']:,} parameters, {settings['steps']:,} updates of {settings['batch_tokens']:,} tokens "
        f"({amount}), {precision} on {facts['ranks']} x {facts['device']}"
    )
    if started := facts["init_from"]:
        padded = f", {started['padded']} rows of the vocabulary added" if started["padded"] else ""
        print(f"  weights at first of {started['path']}, update {started['step']}{padded}")
    for group in facts["groups"]:
        shapes = group["parameters"].values()
        numbers = sum(math.prod(shape) for shape in shapes)
        print(
            f"  {group['role']:<9} {len(shapes):>4} tensors {numbers:>13,} parameters  {group['optimizer']:<7}"
            f" lr {group['lr']:g}  weight decay {group['weight_decay']:g}"
            + (f"  scale {' '.join(f'{scale:.2f}' for scale in group['scales'])}" if group["scales"] else "")
            + (f"  row blocks {'+'.join(map(str, group['blocks']))}" if group["blocks"] else "")
            + "".join(f"\n  {'':<9}   {pattern}: {shown(chosen)}" for pattern, chosen in group["patterns"].items()),
            flush=True,
        )


def shown(settings: Mapping[str, Any]) -> str:
    """Settings as text."""
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Of the checkout that this code lies in, with `+` if it was changed since."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(folder)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + "+" * changed.returncode if commit.returncode == 0 else None
