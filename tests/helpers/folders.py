"""Folders of runs as training writes them, with numbers made up for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

BATCH = 100  # tokens of a step


def line(step: int, loss: float | str | None = None, valid: float | str | None = None, **more: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl."""
    found: dict[str, Any] = {"step": step, "tokens": BATCH * step, "time": 0.5 * step}
    if loss is not None:
        found |= {"train/loss": loss, "train/lr": 0.01 / step}
    if valid is not None:
        found |= {"valid/loss": valid, "valid/perplexity": 2.0 * valid if isinstance(valid, float) else valid}
    return found | more


def write(
    folder: Path, lines: Sequence[dict[str, Any]], config: dict[str, Any], state: str | None = "finished", **status: Any
) -> Path:
    """Write a run's folder; without status.json where `state` is None."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    manifest = {"device": "a device", "ranks": 2, "data": {"content": "the text"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if state:
        told = {"state": state, "reason": "", "step": lines[-1]["step"] if lines else 0, "steps": 4} | status
        (folder / "status.json").write_text(json.dumps(told))
    return folder


def settings(seed: int = 0, **optim: Any) -> dict[str, Any]:
    """Return a configuration."""
    return {
        "name": f"of-{seed}",
        "seed": seed,
        "out": "runs",
        "tokens": 400,
        "model": {"_target_": "muown_train.models.gpt.GPT", "dim": 8},
        "optim": {"rest": {"lr": 0.01}, "_target_": "muown_train.optim.Muown", "lr": 0.01, "betas": [0.9, 0.95]}
        | optim,
    }
