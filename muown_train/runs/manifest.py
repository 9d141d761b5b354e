"""The manifest of a run: versions, device, data, and each parameter's optimizer, learning rate and row blocks."""

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
from omegaconf.errors import OmegaConfBaseException

from muown_train.config.schema import TrainerSettings
from muown_train.models.language_model import LanguageModel
from muown_train.models.parallel import ReplicatedModel
from muown_train.optim import Combined
from muown_train.optim.core.matrix import MatrixOptimizer
from muown_train.runtime.atomic_files import write_atomic
from muown_train.runtime.distributed import World
from muown_train.runtime.formatting import escape_controls
from muown_train.runtime.hardware import get_device_name
from muown_train.runtime.network import NcclNetwork, read_nccl_network
from muown_train.runtime.redaction import redact_tree

_PACKAGES = (
    *("muown-train", "torch", "numpy", "tiktoken", "tokenizers"),
    *("transformers", "datasets", "safetensors", "hydra-core"),
)


def describe(
    model: LanguageModel,
    optimizer: Combined,
    data: Mapping[str, Any],
    settings: TrainerSettings,
    world: World,
    parallel: ReplicatedModel,
    initial_weights: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the manifest of a run as JSON.

    Args:
        data: metadata of the data.
        parallel: how the ranks share the model.
        initial_weights: metadata of the weights that the run started with, if not from scratch.
    """
    network = read_nccl_network() if world.size > 1 and world.device.type == "cuda" else None
    return {
        "versions": {"python": platform.python_version()} | {name: _find_version(name) for name in _PACKAGES},
        "git_commit": _find_git_commit(),
        "command": sys.argv[1:],
        "device": get_device_name(world.device),
        "device_type": world.device.type,
        "ranks": world.size,
        "parallel": parallel.describe(),
        "attention": model.name_attention(settings.seq_len, settings.autocast),
        "network": network._asdict() if network else None,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "settings": asdict(settings),
        "init_from": dict(initial_weights) if initial_weights else None,
        "data": dict(data),
        "groups": describe_groups(optimizer),
    }


def describe_groups(optimizer: Combined) -> list[dict[str, Any]]:
    """Return the resolved settings of every parameter group."""
    return [
        {
            "role": group.get("role", "matrix"),
            "optimizer": type(part).__name__,
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "blocks": group.get("blocks"),
            "patterns": group.get("patterns", {}),
            "scales": sorted(set(part.get_lr_scales(group))) if isinstance(part, MatrixOptimizer) else [],
            "parameters": {name: list(p.shape) for name, p in zip(group["param_names"], group["params"], strict=True)},
        }
        for part in optimizer.optimizers
        for group in part.param_groups
    ]


def write(folder: Path, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Write config.yaml and manifest.json in a run's folder, with *** in place of secrets.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomic(folder / "config.yaml", encode_config(redact_tree(config)))
    write_atomic(folder / "manifest.json", (json.dumps(redact_tree(manifest), indent=1) + "\n").encode())


def encode_config(config: Mapping[str, Any]) -> bytes:
    """Return the content of config.yaml. Text such as ${seed} in a stored configuration stays text.

    Raises:
        ValueError: a text in it begins like an interpolation and is none, which OmegaConf cannot write.
    """
    try:
        return OmegaConf.to_yaml(OmegaConf.create(dict(config))).encode()
    except OmegaConfBaseException as error:
        raise ValueError(f"a setting cannot be written to config.yaml: {str(error).splitlines()[0]}") from None


def show(manifest: Mapping[str, Any], folder: Path) -> None:
    """Print the head of a run's output."""
    settings = manifest["settings"]
    tokens = settings["steps"] * settings["batch_tokens"]
    amount = f"{tokens / 1e6:,.1f}M" if tokens >= 1e5 else f"{tokens:,}"
    precision = "bfloat16" if settings["autocast"] else "float32"
    print(f"{folder}")
    print(
        f"  {manifest['parameters']:,} parameters, {settings['steps']:,} steps of {settings['batch_tokens']:,} tokens "
        f"({amount}), {precision} on {manifest['ranks']} x {manifest['device']}"
    )
    print(f"  {_describe_device(manifest)}")
    if "parts" in manifest["parallel"]:
        print(f"  {_describe_parallel(manifest['parallel'])}")
    of = manifest["data"].get("tokens")
    if of and tokens >= 1.05 * of:
        print(f"  {tokens / of:.1f} epochs: there are {of:,} tokens to train on, which are passed several times")
    for name, source in manifest["data"].get("sources", {}).items():
        drawn, of = manifest["data"]["drawn_tokens"][name], source.get("tokens")
        epochs = f", {drawn / of:.1f} epochs" if of and drawn >= 1.05 * of else ""
        print(f"  {name}: {drawn:,} tokens" + (f" of {of:,}" if of else "") + epochs)
    if initial := manifest["init_from"]:
        padded = f", {initial['padded']} rows of the vocabulary added" if initial["padded"] else ""
        print(escape_controls(f"  starts with the weights of {initial['path']} after step {initial['step']}{padded}"))
    for group in manifest["groups"]:
        shapes = group["parameters"].values()
        numbers = sum(math.prod(shape) for shape in shapes)
        print(
            f"  {group['role']:<9} {len(shapes):>4} tensors {numbers:>13,} parameters  {group['optimizer']:<7}"
            f" lr {group['lr']:g}  weight decay {group['weight_decay']:g}"
            + (f"  scale {' '.join(f'{scale:.2f}' for scale in group['scales'])}" if group["scales"] else "")
            + (f"  row blocks {'+'.join(map(str, group['blocks']))}" if group["blocks"] else "")
        )
        for pattern, own in group["patterns"].items():
            print(f"  {'':<9}   {pattern}: " + ", ".join(f"{key} {value}" for key, value in own.items()))
    sys.stdout.flush()


def _describe_device(manifest: Mapping[str, Any]) -> str:
    """Return one line on the kind of device, what computes attention, and the network that ranks send over."""
    parts = [f"device {manifest['device_type']}"]
    if manifest["attention"]:
        parts.append(f"attention by {manifest['attention']}")
    if manifest["network"]:
        network = NcclNetwork(**manifest["network"])
        parts.append(f"NCCL over {network.name}")
        if network.is_slow:
            parts[-1] += f" (TCP) between {network.nodes} nodes, which is slow: see NCCL_NET in slurm/train.sbatch"
    return ", ".join(parts)


def _describe_parallel(parallel: Mapping[str, Any]) -> str:
    """Return one line on a model whose rows lie on several ranks, with what is rounded where ddp rounds nothing."""
    copies = "the model is" if parallel["copies"] == 1 else f"{parallel['copies']} copies of the model are each"
    rounded = f"; unlike ddp it rounds to bfloat16 {' and '.join(parallel['rounds'])}" if parallel["rounds"] else ""
    return f"{parallel['kind']}: {copies} spread over {parallel['parts']} ranks, whatever shard_optimizer is{rounded}"


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_git_commit() -> str | None:
    """Return the commit of the checkout that this code lies in, with `+` if the code was changed since."""
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
