"""A comparison of runs: final numbers over seeds, the settings that differ, and loss curves.

This module does not load torch.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muown_train.experiments.report.curves import format_caption, plot_comparison
from muown_train.experiments.report.tables import Table, format_csv, format_mean, format_range, mean_and_deviation
from muown_train.runs.record import ABSENT, RunGroup, RunRecord, find_differing_settings, group_runs, list_devices
from muown_train.runtime.atomic_files import write_atomic
from muown_train.runtime.formatting import format_count, format_duration

MAX_SIDE_BY_SIDE = 6  # settings that fit beside one another in a table


@dataclass(frozen=True)
class Comparison:
    """Runs in groups of one setting: the lowest validation loss first, groups without a finished run last."""

    groups: Sequence[RunGroup]
    words: Sequence[Sequence[str]]  # words that tell the groups apart, the same number for each
    differing: Mapping[str, Sequence[Any]]  # setting -> its value in each group

    @property
    def labels(self) -> list[str]:
        """A label for each group; no two are equal."""
        return [" ".join(words) for words in self.words]

    def make_overview(self) -> Table:
        """Return a line for each setting, with means and standard deviations over the runs that finished."""
        head = (
            *("setting", "runs", "validation loss", "perplexity", "training loss"),
            *("steps", "tokens", "tokens/s", "largest lr", "state"),
        )
        rows = [self._make_overview_row(label, group) for label, group in zip(self.labels, self.groups, strict=True)]
        return Table("Final numbers", head, rows, ("training loss", "tokens", "largest lr", "tokens/s", "perplexity"))

    def _make_overview_row(self, label: str, group: RunGroup) -> list[str]:
        runs, finished = group.runs, group.finished
        training = [loss for run in finished if (loss := run.training_loss) is not None]
        speeds = [speed for run in finished if (speed := run.tokens_per_second) is not None]
        tokens = sorted(run.last("tokens") or 0 for run in runs)
        return [
            label,
            str(len(runs)) if len(finished) in (0, len(runs)) else f"{len(finished)} of {len(runs)}",
            _format_final(group, "valid/loss", 4),
            _format_final(group, "valid/perplexity", 2),
            format_mean(training, 4),
            format_range([run.step for run in runs], ",d"),
            " to ".join(dict.fromkeys((format_count(tokens[0]), format_count(tokens[-1])))),
            f"{mean_and_deviation(speeds)[0]:,.0f}" if speeds else ABSENT,
            format_range([run.largest_lr for run in runs], ".3g"),
            runs[0].state if len({run.state for run in runs}) == 1 else count_states(runs),
        ]

    def make_differences(self) -> Table:
        """Return the settings that differ; settings with the same values throughout share a line.

        A setting that some groups do not have, such as one of another optimizer, is left out unless it was given.
        """
        given = _list_given_keys(self.groups)
        keys_by_values: dict[tuple[str, ...], list[str]] = {}
        for key, values in sorted(self.differing.items(), key=lambda item: _rank_key(item[0])):
            if ABSENT in values and key not in given:
                continue
            keys_by_values.setdefault(tuple(map(format_value, values)), []).append(key)
        rows = [[", ".join(sorted(keys, key=len)), *values] for values, keys in keys_by_values.items()]
        if len(self.groups) <= MAX_SIDE_BY_SIDE:
            return Table("What differs", ["key", *self.labels], rows)
        head, *turned = (list(line) for line in zip(["setting", *self.labels], *rows, strict=True))
        return Table("What differs", head, turned)

    def make_run_table(self) -> Table:
        """Return a line for each run."""
        head = ("setting", "run", "seed", "validation loss", "after step", "training time", "device", "state")
        rows = []
        for label, group in zip(self.labels, self.groups, strict=True):
            for run in group.runs:
                steps, losses = run.series("valid/loss")
                final = [f"{losses[-1]:.4f}", f"{steps[-1]:,.0f}"] if len(losses) else [ABSENT, ABSENT]
                seconds = format_duration(run.last("time") or 0)
                rows.append(
                    [label, run.name, str(run.seed), *final, seconds, run.device or ABSENT, describe_state(run)]
                )
        return Table("Runs", head, rows)

    def list_notes(self) -> list[str]:
        """Return what a reader must know about the numbers."""
        notes = ["Means and sample standard deviations (n - 1) are over runs that finished."]
        if others := [run for group in self.groups for run in group.runs if run.state != "finished"]:
            notes[0] = f"{notes[0][:-1]}, which leaves out {count_states(others)}."
        for label, group in zip(self.labels, self.groups, strict=True):
            twice = [str(seed) for seed, count in Counter(str(run.seed) for run in group.runs).items() if count > 1]
            if twice:
                notes.append(f"{label}: several runs of seed {', '.join(twice)}, whose deviation is none over seeds.")
        if len(list_devices(self.groups)) > 1:
            notes.append("The runs were trained on different machines: times and tokens/s do not compare them.")
        if any(key.startswith("data (") for key in self.differing):
            notes.append("The runs did not have the same data: their losses may be of different texts.")
        return notes

    def list_records(self) -> list[dict[str, Any]]:
        """Return the numbers of each run, unrounded, with every setting that differs."""
        return [
            {
                "setting": label,
                "run": str(run.folder),
                "seed": run.seed,
                "state": run.state,
                "reason": run.status.get("reason", ""),
                "updates": run.step,
                "updates_planned": run.steps,
                "tokens_trained": run.last("tokens"),
                "training_seconds": run.last("time"),
                "valid_loss": run.last("valid/loss"),
                "valid_perplexity": run.last("valid/perplexity"),
                "valid_after_update": next(iter(run.series("valid/loss")[0][::-1]), None),
                "train_loss": run.training_loss,
                "tokens_per_second": run.tokens_per_second,
                "largest_lr": run.largest_lr,
                "device": run.device,
                **{key: format_value(values[i]) for key, values in self.differing.items()},
            }
            for i, (label, group) in enumerate(zip(self.labels, self.groups, strict=True))
            for run in group.runs
        ]

    def write(self, folder: Path) -> list[Path]:
        """Write compare.md, compare.csv, compare.png and compare.pdf.

        Returns:
            The files.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"compare.{suffix}" for suffix in ("md", "csv", "png", "pdf")]
        tables = [self.make_overview(), *[self.make_differences()] * bool(self.differing), self.make_run_table()]
        parts = ["# Comparison of runs\n", "![losses](compare.png)\n", format_caption(self.groups) + "\n"]
        parts += [table.format_markdown() for table in tables]
        parts.append("\n".join(f"- {note}" for note in self.list_notes()) + "\n")
        write_atomic(paths[0], "\n".join(parts).encode())
        write_atomic(paths[1], format_csv(self.list_records()).encode())
        plot_comparison(self.groups, self.words, paths[2:])
        return paths


def compare_runs(runs: Sequence[RunRecord]) -> Comparison:
    """Compare runs, at least one; a folder that is given twice counts once."""
    groups = group_runs([*{run.folder.resolve(): run for run in runs}.values()])
    groups.sort(key=_get_mean_loss)
    return Comparison(groups, choose_words(groups), find_differing_settings(groups))


def _get_mean_loss(group: RunGroup) -> float:
    """Return the mean of the final validation losses; infinity if there is none, or no number."""
    losses = group.finals("valid/loss")
    mean = mean_and_deviation(losses)[0] if losses else math.inf
    return math.inf if math.isnan(mean) else mean


def choose_words(groups: Sequence[RunGroup]) -> list[list[str]]:
    """Return the fewest words that tell the groups apart: the values of the first keys that do.

    The optimizer comes first, then the model, the learning rate and the weight decay of matrices, then all other keys
    as in the configuration. A single group is named by its first run.
    """
    if len(groups) == 1:
        return [[groups[0].runs[0].name]]
    differing = find_differing_settings(groups)
    chosen: list[str] = []
    told_apart = 1
    for key in sorted(differing, key=_rank_key):
        now = len(set(zip(*(map(format_value, differing[k]) for k in (*chosen, key)), strict=True)))
        if now > told_apart:
            chosen.append(key)
            told_apart = now
    return [[_format_word(key, differing[key][i], chosen) for key in chosen] for i in range(len(groups))]


def _list_given_keys(groups: Sequence[RunGroup]) -> set[str]:
    """Return the keys of all words that runs were last started with."""
    words = (word for group in groups for run in group.runs for word in run.manifest.get("command", []))
    return {word.partition("=")[0].lstrip("+~") for word in words}


def _rank_key(key: str) -> int:
    first = ("optim._target_", "model._target_", "model.", "optim.lr", "optim.weight_decay")
    place = next((i for i, start in enumerate(first) if key.startswith(start)), len(first))
    return place + key.startswith("optim.rest")


def _format_word(key: str, value: Any, chosen: Iterable[str]) -> str:
    if key.endswith("_target_"):
        return format_value(value).rpartition(".")[2]  # gives Muown or wsd
    last = key.rpartition(".")[2]
    return f"{key if sum(k.rpartition('.')[2] == last for k in chosen) > 1 else last}={format_value(value)}"


def format_value(value: Any) -> str:
    """Return the value of a setting as on the command line."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def count_states(runs: Sequence[RunRecord]) -> str:
    """Return how many runs are in each state, such as `2 finished, 1 diverged`."""
    return ", ".join(f"{n} {state}" for state, n in Counter(run.state for run in runs).items())


def describe_state(run: RunRecord) -> str:
    """Return a run's state, its progress if it has not finished, and the reason."""
    text = "running or cut off" if run.state == "running" else run.state
    if run.state != "finished" and run.steps:
        text += f", {run.step:,} of {run.steps:,} steps"
    reason = run.damage or run.status.get("reason")
    if run.state == "unknown":
        reason = "its status.json is missing or damaged"
    return f"{text}: {reason}" if reason else text


def _format_final(group: RunGroup, key: str, digits: int) -> str:
    """Return mean and deviation of the runs that finished; or the numbers so far; or that all diverged."""
    if group.finished:
        return format_mean(group.finals(key), digits)
    last = [run.last(key) for run in group.runs if run.state not in ("diverged", "damaged")]
    if not last:
        return "diverged"
    return format_range(last, f".{digits}f") + " so far" * any(value is not None for value in last)
