"""Several runs side by side: final numbers over seeds, what differs in their configurations, curves."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muown_train.experiments.report.curves import caption, plot_comparison
from muown_train.experiments.report.tables import Table, csv_text, mean_and_deviation, spanned, with_deviation
from muown_train.runs.record import ABSENT, RunGroup, RunRecord, find_differing_settings, group_runs, list_devices
from muown_train.runtime.atomic_files import write_atomic
from muown_train.runtime.formatting import format_count, format_duration

_LOSS, _PERPLEXITY = ("valid/loss", 4), ("valid/perplexity", 2)  # with digits after the point
_SIDE_BY_SIDE = 6  # settings that fit beside one another in a table


@dataclass(frozen=True)
class Comparison:
    """Runs in groups of one setting, the lowest validation loss first, what has not finished last."""

    groups: Sequence[RunGroup]
    words: Sequence[Sequence[str]]  # that tell the groups apart, of each as many
    differing: Mapping[str, Sequence[Any]]  # setting -> value in each group

    @property
    def labels(self) -> list[str]:
        """Of the groups, each another."""
        return [" ".join(words) for words in self.words]

    def overview(self) -> Table:
        """A line for each setting: means and standard deviations over the runs that finished."""
        head = (
            "setting",
            "runs",
            "validation loss",
            "perplexity",
            "training loss",
            "updates",
            "tokens",
            "tokens/s",
            "largest lr",
            "state",
        )
        rows = [self._line(label, group) for label, group in zip(self.labels, self.groups, strict=True)]
        return Table("Final numbers", head, rows, ("training loss", "tokens", "largest lr", "tokens/s", "perplexity"))

    def _line(self, label: str, group: RunGroup) -> list[str]:
        runs, finished = group.runs, group.finished
        training = [loss for run in finished if (loss := run.training_loss) is not None]
        tokens = sorted(run.last("tokens") or 0 for run in runs)
        return [
            label,
            str(len(runs)) if len(finished) in (0, len(runs)) else f"{len(finished)} of {len(runs)}",
            _final(group, *_LOSS),
            _final(group, *_PERPLEXITY),
            with_deviation(training, 4),
            spanned([run.step for run in runs], ",d"),
            " to ".join(dict.fromkeys((format_count(tokens[0]), format_count(tokens[-1])))),
            _mean([run.tokens_per_second for run in finished], ",.0f"),
            spanned([run.largest_lr for run in runs], ".3g"),
            runs[0].state if len({run.state for run in runs}) == 1 else states(runs),
        ]

    def differences(self) -> Table:
        """The settings that differ; those with the same values throughout share a line."""
        together: dict[tuple[str, ...], list[str]] = {}
        for key, values in sorted(self.differing.items(), key=lambda item: _importance(item[0])):
            together.setdefault(tuple(map(shown, values)), []).append(key)
        rows = [[", ".join(sorted(keys, key=len)), *values] for values, keys in together.items()]
        if len(self.groups) <= _SIDE_BY_SIDE:
            return Table("What differs", ["key", *self.labels], rows)
        turned = [list(line) for line in zip(["setting", *self.labels], *rows, strict=True)]
        return Table("What differs", turned[0], turned[1:])

    def runs(self) -> Table:
        """A line for each run."""
        head = ("setting", "run", "seed", "validation loss", "after update", "training time", "device", "state")
        rows = []
        for label, group in zip(self.labels, self.groups, strict=True):
            for run in group.runs:
                steps, losses = run.series("valid/loss")
                rows.append(
                    [
                        label,
                        run.name,
                        str(run.seed),
                        f"{losses[-1]:.4f}" if len(losses) else ABSENT,
                        f"{steps[-1]:,.0f}" if len(losses) else ABSENT,
                        format_duration(run.last("time") or 0),
                        run.device or ABSENT,
                        told(run),
                    ]
                )
        return Table("Runs", head, rows)

    def notes(self) -> list[str]:
        """What a reader must know of the numbers."""
        notes = ["Means and sample standard deviations (n - 1) are over runs that finished."]
        if others := [run for group in self.groups for run in group.runs if run.state != "finished"]:
            notes[0] = f"{notes[0][:-1]}, which leaves out {states(others)}."
        for label, group in zip(self.labels, self.groups, strict=True):
            twice = [str(seed) for seed, count in Counter(str(run.seed) for run in group.runs).items() if count > 1]
            if twice:
                notes.append(f"{label}: several runs of seed {', '.join(twice)}, whose deviation is none over seeds.")
        if len(list_devices(self.groups)) > 1:
            notes.append("The runs were trained on different machines: times and tokens/s do not compare them.")
        if any(key.startswith("data (") for key in self.differing):
            notes.append("The runs did not have the same data: their losses may be of different texts.")
        return notes

    def records(self) -> list[dict[str, Any]]:
        """Facts about each run, unrounded, with every setting that differs."""
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
                **{key: shown(values[i]) for key, values in self.differing.items()},
            }
            for i, (label, group) in enumerate(zip(self.labels, self.groups, strict=True))
            for run in group.runs
        ]

    def write(self, folder: Path) -> list[Path]:
        """compare.md, compare.csv, compare.png and compare.pdf.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"compare.{suffix}" for suffix in ("md", "csv", "png", "pdf")]
        tables = [self.overview(), *[self.differences()] * bool(self.differing), self.runs()]
        parts = ["# Comparison of runs\n", "![losses](compare.png)\n", caption(self.groups) + "\n"]
        parts += [table.markdown() for table in tables] + ["\n".join(f"- {note}" for note in self.notes()) + "\n"]
        write_atomic(paths[0], "\n".join(parts).encode())
        write_atomic(paths[1], csv_text(self.records()).encode())
        plot_comparison(self.groups, self.words, paths[2:])
        return paths


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Compare runs, at least one; a folder that is given twice counts once."""
    groups = group_runs([*{run.folder.resolve(): run for run in runs}.values()])
    groups.sort(key=lambda group: _mean_or_infinity(group.finals("valid/loss")))
    return Comparison(groups, telling_apart(groups), find_differing_settings(groups))


def telling_apart(groups: Sequence[RunGroup]) -> list[list[str]]:
    """The fewest words that tell the groups apart: the values of the first keys that do.

    The optimizer comes first, then the model, the matrices' rate and decay, then all else as in the configuration. Of a
    single group the name of its first run.
    """
    if len(groups) == 1:
        return [[groups[0].runs[0].name]]
    found = find_differing_settings(groups)
    chosen: list[str] = []
    apart = 1
    for key in sorted(found, key=_importance):
        now = len(set(zip(*(map(shown, found[k]) for k in (*chosen, key)), strict=True)))
        if now > apart:
            chosen.append(key)
            apart = now
    return [[_word(key, found[key][i], chosen) for key in chosen] for i in range(len(groups))]


def _importance(key: str) -> int:
    first = ("optim._target_", "model._target_", "model.", "optim.lr", "optim.weight_decay")
    place = next((i for i, start in enumerate(first) if key.startswith(start)), len(first))
    return place + key.startswith("optim.rest")


def _word(key: str, value: Any, chosen: Iterable[str]) -> str:
    if key.endswith("_target_"):
        return shown(value).rpartition(".")[2]  # Muown, wsd
    last = key.rpartition(".")[2]
    return f"{key if sum(k.rpartition('.')[2] == last for k in chosen) > 1 else last}={shown(value)}"


def shown(value: Any) -> str:
    """A setting's value as on the command line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def states(runs: Sequence[RunRecord]) -> str:
    """How many are what, such as `2 finished, 1 diverged`."""
    return ", ".join(f"{n} {state}" for state, n in Counter(run.state for run in runs).items())


def told(run: RunRecord) -> str:
    """A run's state, how far it has come where that is no end, and why."""
    text = "running or cut off" if run.state == "running" else run.state
    if run.state != "finished" and run.steps:
        text += f", {run.step:,} of {run.steps:,} updates"
    reason = run.damage or run.status.get("reason")
    return f"{text}: {reason}" if reason else text


def _final(group: RunGroup, key: str, digits: int) -> str:
    """Mean and deviation of a group's runs that finished; or what there is so far; or that all diverged."""
    if group.finished:
        return with_deviation(group.finals(key), digits)
    going = [run.last(key) for run in group.runs if run.state not in ("diverged", "damaged")]
    if not going:
        return "diverged"
    return spanned(going, f".{digits}f") + " so far" * any(value is not None for value in going)


def _mean(values: Sequence[float | None], form: str) -> str:
    there = [value for value in values if value is not None]
    return format(mean_and_deviation(there)[0], form) if there else ABSENT


def _mean_or_infinity(values: Sequence[float]) -> float:
    mean = mean_and_deviation(values)[0] if values else math.inf
    return math.inf if math.isnan(mean) else mean
