"""Evaluate trained models on a text: `muown-train evaluate RUN [RUN …] [data=… data.KEY=… KEY=VALUE …]`.

Prints loss (nats per token), perplexity and bits per byte with 95 % intervals, runs side by side, and by source if the
text has several. Without data= each run reads the validation text of its training, rebuilt from its configuration.

    RUN              folder of a run, or of one of its checkpoints
    data=files       a text: data.valid=GLOB (data.train=GLOB works too); data.text names the column or key
    data=NAME        the held-out text of another data configuration, such as stdlib
    valid_tokens     tokens of held-out text to read; not for data=files, which is read as a whole
    seq_len          tokens of a row; by default as in training
    micro_batch      rows of a forward pass; by default as in training
    cache            folder of prepared data

Each run reads the same text by its own tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.cli.process import INTERRUPTED, exit_with
from muown_train.config.checks import check_int
from muown_train.config.compose import load_config
from muown_train.config.overrides import split_settings
from muown_train.runtime.atomic_files import write_atomic
from muown_train.runtime.formatting import escape_controls
from muown_train.runtime.progress import Progress, StatusLine

if TYPE_CHECKING:
    import torch

    from muown_train.analysis.scoring import Scoring
    from muown_train.data.text.eval_texts import EvalText
    from muown_train.runs.saved_run import SavedRun

OWN_KEYS = ("valid_tokens", "seq_len", "micro_batch", "cache")


def main(words: Sequence[str]) -> None:
    """Run the command with the words that follow its name."""
    parser = CommandParser(__doc__)
    parser.add_argument("words", nargs="+", metavar="RUN | KEY=VALUE", help="runs and settings in any order")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default the newest)")
    parser.add_argument(
        "--source", metavar="KEY", help="key or column that names the source of a document of data=files"
    )
    parser.add_argument("--precision", help="auto, bfloat16 or float32 (default the run's)")
    parser.add_argument("--device", help="such as cpu or cuda:1 (default a GPU if there is one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    arguments = parser.parse_intermixed_args(words)
    runs, settings = split_words(arguments.words)
    with report_errors(settings):
        if not runs:
            raise ValueError("no run is given: give its folder, such as runs/NAME")
        own, data = parse_settings(settings)
        from muown_train.runs.saved_run import open_run
        from muown_train.runtime import hardware

        device = hardware.find_device(arguments.device)
        saved_runs = [open_run(run, arguments.step) for run in runs]
        if arguments.precision:
            saved_runs = [saved.with_precision(arguments.precision) for saved in saved_runs]
        if arguments.json and (arguments.json.is_dir() or not arguments.json.parent.is_dir()):
            raise ValueError(f"--json {arguments.json} must be a file in a folder that exists")
        try:
            text = find_text(data, own, arguments.source)
            evaluate(runs, saved_runs, text, own, device, arguments.json)
        except KeyboardInterrupt:
            exit_with("interrupted before there was a result", INTERRUPTED)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into runs and settings. The default name of a run has equals signs too."""
    settings = [word for word in words if re.match(r"[+~]?[a-z_]+(\.\w+)*=", word) and not Path(word).exists()]
    return [word for word in words if word not in settings], settings


def parse_settings(settings: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the checked values of OWN_KEYS that are given, and the overrides that choose the data."""
    given, data = split_settings(settings, OWN_KEYS)
    own = {key: str(value) if key == "cache" else check_int(key, value, 1) for key, value in given.items()}
    if data and not any(word.startswith("data=") for word in data):
        raise ValueError(f"{data[0]} has no data to belong to: give data=files, or data=stdlib, …, with it")
    if "data=files" in data and "valid_tokens" in own:
        raise ValueError(f"valid_tokens={own['valid_tokens']} is for held-out text; data=files is read as a whole")
    return own, data


def find_text(data: list[str], own: dict[str, Any], source: str | None) -> EvalText | None:
    """Return the text that the settings choose; None for the validation text of each run.

    Args:
        data: overrides that choose the data.
        source: key or column that names the source of a document.
    """
    from muown_train.data.cache import locate_cache
    from muown_train.data.text.eval_texts import read_eval_text

    if not data:
        if source is not None:
            raise ValueError(f"--source {source} is for files: give data=files with data.valid=GLOB")
        return None
    config = load_config(data)
    valid_tokens = own.get("valid_tokens", config.valid_tokens)
    return read_eval_text(config.data, source, valid_tokens, locate_cache(own.get("cache")))


def evaluate(
    runs: Sequence[str],
    saved_runs: Sequence[SavedRun],
    text: EvalText | None,
    own: dict[str, Any],
    device: torch.device,
    file: Path | None,
) -> None:
    """Evaluate the runs one after the other, print the table and write the results to `file`."""
    from muown_train.analysis import score_report as report
    from muown_train.analysis.scoring import prepare_scoring

    labels = [f"{saved.folder.name} @{saved.step}" for saved in saved_runs]
    if len(set(labels)) < len(labels):
        labels = [f"{saved.folder} @{saved.step}" for saved in saved_runs]
    own.setdefault("micro_batch", min(saved.config.micro_batch for saved in saved_runs))  # all runs have equal blocks
    results: list[report.Result] = []
    first: Scoring | None = None
    complete = False
    for run, saved, label in zip(runs, saved_runs, labels, strict=True):
        scoring = None
        try:
            scoring = prepare_scoring(saved, saved.load_model(device), text, **own)
            score_all(label, scoring, saved, device)
            complete = True
        except KeyboardInterrupt:
            complete = False
        if scoring and any(score.losses for score in scoring.scores.values()):
            results.append(report.describe_scores(run, saved, scoring, device, complete))
            if first and scoring.digest == first.digest:
                report.add_differences(results[-1], scoring.scores, first.scores)
            first = first or scoring
        if not complete:
            break
    if results:
        head = f"text: {text.name if text else 'held out in training'}"
        notes = report.format_notes(results, text is None)
        print(escape_controls("\n".join([head, *report.format_table(results, labels), "", *notes])))
        if file:
            content = report.replace_nonfinite({"text": text and text.name, "runs": results})
            write_atomic(file, (json.dumps(content, indent=1) + "\n").encode())
    if not complete:
        exit_with(f"interrupted in {label}" + ", the table has what was done" * bool(results), INTERRUPTED)


def score_all(label: str, scoring: Scoring, saved: SavedRun, device: torch.device) -> None:
    """Evaluate a run block by block, and show its progress."""
    with StatusLine(first=2.0) as line, saved.autocast(device):
        progress = Progress(line, total=scoring.tokens, label=label)
        for done in scoring.evaluate_blocks(device):
            progress.update(done)
