"""The model card of an export, made from the run's folder alone."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from muown_train.config.checks import is_number
from muown_train.runs.metrics import read_metrics
from muown_train.runs.saved_run import SavedRun
from muown_train.runtime.atomic_files import read_json

_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- muown
---
"""
_LOAD = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))
```
"""


def render_model_card(saved: SavedRun, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return README.md in Markdown.

    Args:
        summary: what `export_run` returns.
        settings: all settings of the model.

    Raises:
        ValueError: a file of the run's folder cannot be understood.
    """
    try:
        try:
            manifest = read_json(saved.folder / "manifest.json")
        except FileNotFoundError:  # whoever copied the run may have left it out
            manifest = {}
        training = list(_describe_training(saved, manifest))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{saved.folder}: manifest.json or metrics.jsonl holds what no run writes ({error})"
        ) from error
    rows = [
        ("architecture", f"{summary['architecture']}, {_describe_sizes(settings)}"),
        ("parameters", f"{summary['parameters']:,}"),
        ("vocabulary", f"{summary['vocabulary']:,}" + f", {summary['cut']} padded rows cut off" * bool(summary["cut"])),
        *training,
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    origin = (
        f"imported from {_format_code(manifest['imported'])}" if "imported" in manifest else "trained by muown_train"
    )
    title = f"# {saved.folder.name}\n\nA language model {origin}, without instruction tuning or alignment."
    return f"{_HEAD}\n{title}\n\n| | |\n|---|---|\n{table}\n{_LOAD}"


def _describe_sizes(settings: Mapping[str, Any]) -> str:
    kv = f", {settings['kv_heads']} for keys and values" if "kv_heads" in settings else ""
    return (
        f"{settings['layers']} layers, width {settings['dim']}, {settings['heads']} heads{kv}, "
        f"{settings['seq_len']:,} tokens of context, rotation base {settings['rope_base']:,.0f}"
    )


def _describe_training(saved: SavedRun, manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table that say how the model was trained."""
    config, data = saved.config, saved.data
    if saved.step and "settings" in manifest:
        done = f"{saved.step:,} of {manifest['settings']['steps']:,} steps of {config.batch_tokens:,}"
        yield "training", f"{saved.step * config.batch_tokens:,} tokens: {done}, rows of {config.seq_len:,}"
    if average := manifest.get("average_of"):
        yield "average of", _format_code(f"{average['run']}, steps {', '.join(map(str, average['steps']))}")
    if origin := manifest.get("origin"):
        yield "went on from", _format_code(f"{origin['checkpoint']}, step {origin['step']}")
    if started := manifest.get("init_from"):
        yield "started from", _format_code(f"{started['path']}, step {started['step']}")
    if "data" in data:
        counts = f", {data['tokens']:,} tokens in {data['documents']:,} documents" if "documents" in data else ""
        yield "data", f"{_format_code(data['data'])}{counts}; tokenizer {_format_code(data.get('tokenizer'))}"
    for group in _describe_groups(manifest):
        yield "optimizer", group
    if "_target_" in (schedule := saved.config.schedule):
        given = ", ".join(f"{key} {value}" for key, value in schedule.items() if not key.startswith("_"))
        yield "schedule", schedule["_target_"].rpartition(".")[2] + f" ({given})" * bool(given)
    if validation := _find_validation(saved):
        step, loss, count = validation
        when = "" if step == saved.step else f", after step {step:,}"
        # the perplexity of a run that has diverged says no more than its loss
        perplexity = f" (perplexity {math.exp(loss):.2f})" if loss < 20 else ""
        yield "validation loss", f"{loss:.4f}{perplexity} on {count} held-out tokens{when}"
    if manifest.get("git_commit"):
        yield "code", f"muown_train {_format_code(manifest['git_commit'])}"


def _describe_groups(manifest: Mapping[str, Any]) -> Iterator[str]:
    roles: dict[str, list[str]] = {}
    for group in manifest.get("groups", ()):
        settings = f"{group['optimizer']}, lr {group['lr']:g}, weight decay {group['weight_decay']:g}"
        if group["role"] not in roles.setdefault(settings, []):
            roles[settings].append(group["role"])
    for settings, names in roles.items():
        yield f"{settings} ({', '.join(names)})"


def _find_validation(saved: SavedRun) -> tuple[int, float, str] | None:
    """Return the last evaluation up to the checkpoint: its step and loss, and the number of tokens in words."""
    path = saved.folder / "metrics.jsonl"
    lines = read_metrics(path) if path.exists() else []
    known = [line for line in lines if "valid/loss" in line and line["step"] <= saved.step]
    if not known or not is_number(known[-1]["valid/loss"]):
        return None
    held_out = saved.data.get("held_out_tokens")
    return known[-1]["step"], known[-1]["valid/loss"], f"{held_out:,}" if held_out else "the"


def _format_code(value: Any) -> str:
    """Return a value as code in a cell of a table, whatever it holds."""
    return "`" + str(value).replace("`", "'").replace("|", "/").replace("\n", " ") + "`"
