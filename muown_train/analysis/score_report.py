"""The report of an evaluation: the scores of each run in JSON, and a table of all runs with notes on how to read it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from muown_train.analysis.scoring import MIN_INTERVAL_BLOCKS, Score, Scoring, compare_scores, merge_scores
from muown_train.data.text.eval_texts import ALL
from muown_train.runs.saved_run import SavedRun
from muown_train.runtime import hardware
from muown_train.runtime.formatting import format_perplexity

Result = dict[str, Any]  # the scores of one run in JSON, as `describe_scores` makes them
_HEAD = ("run", "source", "tokens", "loss", "perplexity", "bits per byte", "loss minus the first's")


def describe_scores(run: str, saved: SavedRun, scoring: Scoring, device: torch.device, complete: bool) -> Result:
    """Return everything about the evaluation of one run in JSON.

    Args:
        run: the path that the user gave.
        complete: whether the whole text was evaluated.
    """
    sources = {source: score.summarize() for source, score in scoring.scores.items() if score.losses}
    low = hardware.wants_autocast(saved.config.precision, device)
    return {
        "run": run,
        "checkpoint": str(saved.checkpoint),
        "step": saved.step,
        "complete": complete,
        "precision": "bfloat16" if low else "float32",
        "device": hardware.get_device_name(device),
        "tokenizer": scoring.tokenizer.name,
        "tokenizer_hash": scoring.tokenizer.fingerprint,
        "seq_len": scoring.seq_len,
        "text_tokens": scoring.tokens,
        "text_hash": scoring.digest,
        "all": merge_scores(scoring.scores).summarize(),
        "sources": {} if list(scoring.scores) == [ALL] else sources,
    }


def add_differences(result: Result, scores: Mapping[str, Score], first: Mapping[str, Score]) -> None:
    """Add to a result how far its loss is above that of the first run on the same rows, in all and by source."""
    result["all"]["minus_first"] = compare_scores(merge_scores(scores), merge_scores(first))
    for source, numbers in result["sources"].items():
        numbers["minus_first"] = compare_scores(scores[source], first[source])


def replace_nonfinite(tree: Any) -> Any:
    """Return a tree of plain data with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(tree, dict):
        return {key: replace_nonfinite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [replace_nonfinite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def format_table(results: Sequence[Result], labels: Sequence[str]) -> list[str]:
    """Return the lines of the table; columns that say nothing are left out.

    Args:
        labels: the name of each run in the table; there may be fewer results, if the evaluation was interrupted.
    """
    rows = [list(_HEAD)]
    for result, label in zip(results, labels, strict=False):
        label += "" if result["complete"] else " (a part)"
        for source, numbers in [(ALL, result["all"]), *result["sources"].items()]:
            minus = numbers.get("minus_first")
            rows.append(
                [label, source, *_format_numbers(numbers), _format_interval(minus, "loss", "+") if minus else ""]
            )
    used = [k for k in range(len(_HEAD)) if k not in (1, 6) or any(row[k] not in ("", ALL) for row in rows[1:])]
    widths = {k: max(len(row[k]) for row in rows) for k in used}
    lines = ("  ".join(row[k].rjust(widths[k]) if k >= 2 else row[k].ljust(widths[k]) for k in used) for row in rows)
    return [line.rstrip() for line in lines]


def _format_numbers(numbers: Mapping[str, Any]) -> list[str]:
    perplexity, interval = format_perplexity(numbers["perplexity"]), numbers["perplexity_interval"]
    if interval:
        perplexity += f" ({format_perplexity(interval[0])} to {format_perplexity(interval[1])})"
    loss, bits = _format_interval(numbers, "loss"), _format_interval(numbers, "bits_per_byte")
    return [f"{numbers['tokens']:,}", loss, perplexity, bits]


def _format_interval(numbers: Mapping[str, Any], key: str, sign: str = "") -> str:
    """Return a number with half the width of its interval; - if the number is unknown."""
    if key not in numbers:
        return "-"
    interval = numbers[f"{key}_interval"]
    return f"{numbers[key]:{sign}.4f}" + (f" ± {interval[1] - numbers[key]:.4f}" if interval else "")


def format_notes(results: Sequence[Result], own_text: bool) -> list[str]:
    """Return the notes that explain the table.

    Args:
        own_text: whether each run read its own validation tokens.
    """
    blocks = _join_alternatives(result["all"]["blocks"] for result in results)
    lengths = _join_alternatives(result["seq_len"] for result in results)
    notes = [
        f"± and to: 95 % intervals (1.96 standard errors) from the spread over {blocks} blocks of rows, taken "
        f"as independent; none from fewer than {MIN_INTERVAL_BLOCKS}.",
        f"Rows of {lengths} tokens; none sees what lies before it.",
    ]
    if len({result["tokenizer_hash"] for result in results}) > 1:
        notes.append("The tokenizers differ: compare bits per byte; loss and perplexity are per token of each.")
    elif own_text and any(result["text_hash"] != results[0]["text_hash"] for result in results):
        notes.append("Each run read its own validation tokens, which differ: give data= to compare runs.")
    if "or" in lengths:
        notes.append("Longer rows lower the loss by themselves: seq_len= makes them alike.")
    return notes


def _join_alternatives(values: Iterable[int]) -> str:
    return " or ".join(f"{value:,}" for value in sorted(set(values)))
