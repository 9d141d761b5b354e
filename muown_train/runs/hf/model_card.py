"""The model card of an export: what the run's folder tells, and nothing else."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from muown_train.config.instantiate import is_number
from muown_train.runs.metrics import read_metrics
from muown_train.runs.saved_run import SavedRun

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


def card(saved: SavedRun, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """README.md in Markdown.

    Args:
        facts: of the export; settings: of the model.
    """
    try:
        manifest = json.loads((saved.folder / "manifest.json").read_text())
    except (OSError, ValueError):  # who copied a run may have left it
        manifest = {}
    try:
        training = list(_training(saved, manifest))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{saved.folder}: manifest.json or metrics.jsonl holds what no run writes ({error})"
        ) from error
    rows = [
        ("architecture", f"{facts['architecture']}, {_sizes(settings)}"),
        ("parameters", f"{facts['parameters']:,}"),
        ("vocabulary", f"{facts['vocabulary']:,}" + f", {facts['cut']} padded rows cut off" * bool(facts["cut"])),
        *training,
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    made = f"imported from {_inline(manifest['imported'])}" if "imported" in manifest else "trained by muown_train"
    title = f"# {saved.folder.name}\n\nA language model {made}, without instruction tuning or alignment."
    return f"{_HEAD}\n{title}\n\n| | |\n|---|---|\n{table}\n{_LOAD}"


def _sizes(settings: Mapping[str, Any]) -> str:
    kv = f", {settings['kv_heads']} for keys and values" if "kv_heads" in settings else ""
    return (
        f"{settings['layers']} layers, width {settings['dim']}, {settings['heads']} heads{kv}, "
        f"{settings['seq_len']:,} tokens of context, rotation base {settings['rope_base']:,.0f}"
    )


def _training(saved: SavedRun, manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    top, data = saved.top, saved.data
    if saved.step and "settings" in manifest:
        done = f"{saved.step:,} of {manifest['settings']['steps']:,} updates of {top.batch_tokens:,}"
        yield "training", f"{saved.step * top.batch_tokens:,} tokens: {done}, rows of {top.seq_len:,}"
    if average := manifest.get("average_of"):
        yield "average of", _inline(f"{average['run']}, updates {', '.join(map(str, average['steps']))}")
    if origin := manifest.get("origin"):
        yield "went on from", _inline(f"{origin['checkpoint']}, update {origin['step']}")
    if started := manifest.get("init_from"):
        yield "started from", _inline(f"{started['path']}, update {started['step']}")
    if "data" in data:
        counts = f", {data['tokens']:,} tokens in {data['documents']:,} documents" if "documents" in data else ""
        yield "data", f"{_inline(data['data'])}{counts}; tokenizer {_inline(data.get('tokenizer'))}"
    for group in _groups(manifest):
        yield "optimizer", group
    if "_target_" in (schedule := saved.config.get("schedule") or {}):
        given = ", ".join(f"{key} {value}" for key, value in schedule.items() if not key.startswith("_"))
        yield "schedule", schedule["_target_"].rpartition(".")[2] + f" ({given})" * bool(given)
    if found := _validation(saved):
        step, loss, count = found
        when = "" if step == saved.step else f", of update {step:,}"
        # above, as of a run that has diverged, it says no more than the loss
        perplexity = f" (perplexity {math.exp(loss):.2f})" if loss < 20 else ""
        yield "validation loss", f"{loss:.4f}{perplexity} on {count} held-out tokens{when}"
    if manifest.get("git_commit"):
        yield "code", f"muown_train {_inline(manifest['git_commit'])}"


def _groups(manifest: Mapping[str, Any]) -> Iterator[str]:
    roles: dict[str, list[str]] = {}
    for group in manifest.get("groups", ()):
        how = f"{group['optimizer']}, lr {group['lr']:g}, weight decay {group['weight_decay']:g}"
        if group["role"] not in roles.setdefault(how, []):
            roles[how].append(group["role"])
    for how, names in roles.items():
        yield f"{how} ({', '.join(names)})"


def _validation(saved: SavedRun) -> tuple[int, float, str] | None:
    """The last evaluation up to the checkpoint: its update and loss, and the number of tokens."""
    path = saved.folder / "metrics.jsonl"
    lines = read_metrics(path) if path.exists() else []
    known = [line for line in lines if "valid/loss" in line and line["step"] <= saved.step]
    if not known or not is_number(known[-1]["valid/loss"]):
        return None
    held_out = saved.data.get("held_out_tokens")
    return known[-1]["step"], known[-1]["valid/loss"], f"{held_out:,}" if held_out else "the"


def _inline(value: Any) -> str:
    """As code in a cell of a table, whatever it holds."""
    return "`" + str(value).replace("`", "'").replace("|", "/").replace("\n", " ") + "`"
