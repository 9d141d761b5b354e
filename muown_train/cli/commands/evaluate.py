"""What trained models make of a text: `python scripts/evaluate.py RUN [RUN …] [data=… data.KEY=… KEY=VALUE …]`.

Prints loss (nats per token), perplexity and bits per byte with 95 % intervals, runs side by side; per source where the
text has several. Without data= each run reads the validation text of its training, rebuilt from its configuration.

    RUN              a run's folder, or that of one of its checkpoints
    data=files       a text: data.valid=GLOB (data.train=GLOB works too); data.text names the column or key
    data=NAME        another data configuration, such as stdlib: what that holds out
    valid_tokens     how much of the held-out text, where it is not data=files
    seq_len          tokens of a row, micro_batch rows at a time; by default as in training
    cache            folder of prepared data

Each run reads the same text by its own tokenizer.
"""

import json
import math
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from muown_train.analysis.scoring import FEWEST, Score, Scoring, difference, prepared, together
from muown_train.cli.errors import INTERRUPTED, CommandParser, exit_with, report_errors
from muown_train.config.checks import check_int
from muown_train.config.compose import compose_config
from muown_train.config.overrides import check_overrides, parse_overrides
from muown_train.data.cache import cache_folder
from muown_train.data.text.eval_texts import ALL, Text, text_of
from muown_train.runs.saved_run import SavedRun, open_run
from muown_train.runtime import hardware
from muown_train.runtime.atomic_files import write_atomic
from muown_train.runtime.suggest import suggest_nearest
from muown_train.training.tracking.console import duration, perplexity, rate

OWN = ("valid_tokens", "seq_len", "micro_batch", "cache")
EVERY = 10.0  # seconds between two lines of progress that do not replace each other


def sorted_out(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Runs and settings; a run's default name has equals signs of its own."""
    settings = [word for word in words if re.match(r"[+~]?[a-z_]+(\.\w+)*=", word) and not Path(word).exists()]
    return [word for word in words if word not in settings], settings


def own_settings(settings: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Our own keys, checked, and the overrides that choose the data."""
    check_overrides(settings)
    own: dict[str, Any] = {}
    data: list[str] = []
    for override in parse_overrides(settings):
        key, value = override.key_or_group, override.value()
        if key.split(".")[0] == "data":
            data.append(str(override.input_line))
        elif key == "cache":
            own[key] = str(value)
        elif key in OWN:
            own[key] = check_int(key, value, 1)
        else:
            raise ValueError(f"there is no key {key}{suggest_nearest(key, ['data', *OWN])}; see --help")
    if data and not any(word.startswith("data=") for word in data):
        raise ValueError(f"{data[0]} is of no data: give data=files, or data=stdlib, …, with it")
    if "data=files" in data and "valid_tokens" in own:
        raise ValueError(f"valid_tokens={own['valid_tokens']} is of held-out text; data=files is read as a whole")
    return own, data


def chosen_text(data: list[str], own: dict[str, Any], source: str | None) -> Text | None:
    if not data:
        if source is not None:
            raise ValueError(f"--source {source} is of files: give data=files with data.valid=GLOB")
        return None
    config: dict[str, Any] = OmegaConf.to_container(compose_config(data), resolve=True)  # type: ignore[assignment]
    valid_tokens = own.get("valid_tokens", config["valid_tokens"])
    return text_of(config["data"], source, valid_tokens, cache_folder(own.get("cache")))


class Progress:
    """How far one run is, on standard error: a line that is replaced on a terminal, elsewhere one now and then."""

    def __init__(self, label: str, tokens: int) -> None:
        self.label, self.tokens, self.begun = label, tokens, time.monotonic()
        self.live = sys.stderr.isatty()
        self.shown = self.begun - EVERY + 2  # nothing for what takes less

    def show(self, done: int) -> None:
        now = time.monotonic()
        if now - self.shown < (0.2 if self.live else EVERY):
            return
        self.shown, speed = now, done / (now - self.begun)
        line = f"{self.label}: {done:,} of {self.tokens:,} tokens, {rate(speed)}, "
        line += f"{duration((self.tokens - done) / speed)} left"
        print(
            f"\r\x1b[2K{line[:100]}" if self.live else line, end="" if self.live else "\n", file=sys.stderr, flush=True
        )

    def end(self) -> None:
        if self.live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def evaluate_all(label: str, scoring: Scoring, saved: SavedRun, device: torch.device) -> None:
    progress = Progress(label, scoring.tokens)
    try:
        with saved.autocast(device):
            for done in scoring.blocks(device):
                progress.show(done)
    finally:
        progress.end()


def result(path: str, saved: SavedRun, scoring: Scoring, device: torch.device, complete: bool) -> dict[str, Any]:
    """All about one run in JSON."""
    sources = {source: score.numbers() for source, score in scoring.scores.items() if score.losses}
    low = hardware.wants_autocast(saved.config.precision, device)
    return {
        "run": path,
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
        "all": together(scoring.scores).numbers(),
        "sources": {} if list(scoring.scores) == [ALL] else sources,
    }


def add_differences(found: dict[str, Any], scores: Mapping[str, Score], first: Mapping[str, Score]) -> None:
    """Add to the numbers of a result by how much its loss is above that of the first run, on the same rows."""
    found["all"]["minus_first"] = difference(together(scores), together(first))
    for source, numbers in found["sources"].items():
        numbers["minus_first"] = difference(scores[source], first[source])


def table(results: Sequence[dict[str, Any]], labels: Sequence[str]) -> list[str]:
    rows = [["run", "source", "tokens", "loss", "perplexity", "bits per byte", "loss minus the first's"]]
    for found, label in zip(results, labels, strict=False):  # fewer results where interrupted
        label += "" if found["complete"] else " (a part)"
        for source, numbers in [(ALL, found["all"]), *found["sources"].items()]:
            minus = numbers.get("minus_first")
            rows.append(
                [label, source, f"{numbers['tokens']:,}", *cells(numbers), around(minus, "loss", "+") if minus else ""]
            )
    used = [k for k in range(7) if k not in (1, 6) or any(row[k] not in ("", ALL) for row in rows[1:])]
    widths = {k: max(len(row[k]) for row in rows) for k in used}
    lines = ("  ".join(row[k].rjust(widths[k]) if k >= 2 else row[k].ljust(widths[k]) for k in used) for row in rows)
    return [line.rstrip() for line in lines]


def finite(tree: Any) -> Any:
    """With null in place of numbers that are none, which JSON has not."""
    if isinstance(tree, dict):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def around(numbers: dict[str, Any], key: str, sign: str = "") -> str:
    if key not in numbers:
        return "-"
    interval = numbers[f"{key}_interval"]
    return f"{numbers[key]:{sign}.4f}" + (f" ± {interval[1] - numbers[key]:.4f}" if interval else "")


def cells(numbers: dict[str, Any]) -> list[str]:
    interval = numbers["perplexity_interval"]
    between = f" ({perplexity(interval[0])} to {perplexity(interval[1])})" if interval else ""
    return [around(numbers, "loss"), f"{perplexity(numbers['perplexity'])}{between}", around(numbers, "bits_per_byte")]


def notes(results: Sequence[dict[str, Any]], own_text: bool) -> list[str]:
    """What to know to read the table."""
    blocks = alternatives(found["all"]["blocks"] for found in results)
    lengths = alternatives(found["seq_len"] for found in results)
    found = [
        f"± and to: 95 % intervals (1.96 standard errors) from the spread over {blocks} blocks of rows, taken "
        f"as independent; none from fewer than {FEWEST}.",
        f"Rows of {lengths} tokens; none sees what lies before it.",
    ]
    if len({each["tokenizer_hash"] for each in results}) > 1:
        found.append("The tokenizers differ: compare bits per byte; loss and perplexity are per token of each.")
    elif own_text and any(each["text_hash"] != results[0]["text_hash"] for each in results):
        found.append("Each run read its own validation tokens, which differ: give data= to compare runs.")
    if "or" in lengths:
        found.append("Longer rows lower the loss by themselves: seq_len= makes them alike.")
    return found


def alternatives(values: Iterable[int]) -> str:
    return " or ".join(f"{value:,}" for value in sorted(set(values)))


def main(words: Sequence[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("words", nargs="+", metavar="RUN | KEY=VALUE", help="runs and settings in any order")
    parser.add_argument("--step", type=int, help="the checkpoint after so many updates (default the newest)")
    parser.add_argument(
        "--source", metavar="KEY", help="key or column that names the source of a document of data=files"
    )
    parser.add_argument("--precision", help="auto, bfloat16 or float32 (default the run's)")
    parser.add_argument("--device", help="such as cpu or cuda:1 (default a GPU if there is one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    arguments = parser.parse_intermixed_args()
    runs, settings = sorted_out(arguments.words)
    with report_errors(settings):
        if not runs:
            raise ValueError("no run is given: give its folder, such as runs/NAME")
        own, data = own_settings(settings)
        device = hardware.find_device(arguments.device)
        saved_runs = [open_run(run, arguments.step) for run in runs]
        if arguments.precision:
            saved_runs = [saved.with_precision(arguments.precision) for saved in saved_runs]
        if arguments.json and (arguments.json.is_dir() or not arguments.json.parent.is_dir()):
            raise ValueError(f"--json {arguments.json} must be a file in a folder that is there")
        try:
            text = chosen_text(data, own, arguments.source)
            evaluate(runs, saved_runs, text, own, device, arguments.json)
        except KeyboardInterrupt:
            exit_with("interrupted before there was a result", INTERRUPTED)


def evaluate(
    runs: Sequence[str],
    saved_runs: Sequence[SavedRun],
    text: Text | None,
    own: dict[str, Any],
    device: torch.device,
    file: Path | None,
) -> None:
    labels = [f"{saved.folder.name} @{saved.step}" for saved in saved_runs]
    if len(set(labels)) < len(labels):
        labels = [f"{saved.folder} @{saved.step}" for saved in saved_runs]
    own.setdefault("micro_batch", min(saved.config.micro_batch for saved in saved_runs))  # blocks are alike
    results: list[dict[str, Any]] = []
    first: Scoring | None = None
    complete = False
    for run, saved, label in zip(runs, saved_runs, labels, strict=True):
        scoring = None
        try:
            scoring = prepared(saved, saved.load_model(device), text, **own)
            evaluate_all(label, scoring, saved, device)
            complete = True
        except KeyboardInterrupt:
            complete = False
        if scoring and any(score.losses for score in scoring.scores.values()):
            results.append(result(run, saved, scoring, device, complete))
            if first and scoring.digest == first.digest:
                add_differences(results[-1], scoring.scores, first.scores)
            first = first or scoring
        if not complete:
            break
    if results:
        print(f"text: {text.name if text else 'held out in training'}")
        print("\n".join([*table(results, labels), "", *notes(results, text is None)]))
        if file:
            write_atomic(
                file, (json.dumps(finite({"text": text and text.name, "runs": results}), indent=1) + "\n").encode()
            )
    if not complete:
        exit_with(f"interrupted in {label}" + ", the table has what was done" * bool(results), INTERRUPTED)
