"""Tables of final losses, perplexities or step times, beside the paper's numbers where they can be compared."""

import math
from collections.abc import Iterator
from typing import Any

from muown_train.experiments.report.results import Report, Result
from muown_train.experiments.report.tables import Table
from muown_train.experiments.significance import PairedDifference, compare_seeds
from muown_train.runs.record import ABSENT
from muown_train.runtime.formatting import format_lr

NEAR = 1.02  # a perplexity is nearly as good as the best up to this factor


def make_result_table(report: Report) -> Table:
    """Return a table with learning rates down and settings across, as in the paper."""
    results = {(result.lr, *result.key): result for result in report.results}
    rows = [
        [format_lr(lr), *(format_result(report, results.get((lr, *key))) for key in report.names)]
        for lr in sorted({result.lr for result in report.results}, reverse=True)
    ]
    return Table(report.quantity.title, ["learning rate", *report.names.values()], rows)


def make_paper_table(report: Report) -> Table:
    """Return a table with a line for each setting that the paper reports."""
    head = ("setting", "learning rate", "runs", "here", "paper", "difference")
    digits = report.quantity.digits[0]
    rows = []
    for result in report.results:
        if result.curve.key not in report.grid.paper:
            continue
        runs = f"{len(result.values) + result.count('diverged')} of {len(result.runs)}"
        difference = ABSENT if result.difference is None else f"{result.difference:+z.{digits}f}"
        ours, papers = format_result(report, result), _format_paper(report, result)
        rows.append([report.names[result.key], format_lr(result.lr), runs, ours, papers, difference])
    return Table("Beside the paper", head, rows)


def make_best_table(report: Report) -> Table:
    """Return a table with a line for each setting with runs.

    It shows the best learning rate, and the range of those beside it that are nearly as good.
    """
    rows = []
    for name, results, best in _find_best(report):
        score = results[best].score
        limit = score + math.log(NEAR) if report.grid.quantity == "loss" else score * NEAR
        first = last = best
        while first > 0 and results[first - 1].score <= limit:
            first -= 1
        while last < len(results) - 1 and results[last + 1].score <= limit:
            last += 1
        beyond = [results[i] if 0 <= i < len(results) else None for i in (first - 1, last + 1)]
        is_known = all(result and (result.values or result.diverged) for result in beyond)
        near = f"{format_lr(results[first].lr)} to {format_lr(results[last].lr)}"
        factor = f"{'' if is_known else '≥ '}{results[last].lr / results[first].lr:.3g}"
        rows.append([name, format_lr(results[best].lr), format_result(report, results[best]), near, factor])
    head = ["setting", "best learning rate", report.grid.quantity, "nearly as good", "a factor of"]
    return Table(f"Best learning rates, and those beside them within {NEAR - 1:.0%} of the perplexity", head, rows)


def make_difference_table(report: Report) -> Table:
    """Return a table of the differences of the other settings from the first, seed by seed, each at its best rate.

    It has no lines where no setting has several seeds, or where no other setting has seeds of the first.
    """
    best = [(name, results[i]) for name, results, i in _find_best(report)]
    head = ["setting", "best learning rate", "difference", "deviation", "95 % interval", "seeds"]
    if report.grid.over or not any(len(result.values) > 1 for _, result in best):
        return Table("Differences", head, [])
    (first_name, first), *others = best
    digits, rows = max(report.quantity.digits), []
    for name, result in others:
        if difference := _compare_results(result, first):
            deviation = ABSENT if difference.deviation is None else f"{difference.deviation:.{digits}f}"
            mean, interval, seeds = _format_difference(difference, digits)
            rows.append([name, format_lr(result.lr), mean, deviation, interval, seeds])
    return Table(f"Differences from {first_name} at {format_lr(first.lr)}, seed by seed", head, rows)


def make_claim_table(report: Report) -> Table:
    """Return a table of the experiment's claims, with the difference of the two settings seed by seed and a verdict.

    A claim on best rates waits for the runs that choose them.
    """
    best = {results[i].curve.key: results[i] for _, results, i in _find_best(report)}
    for result in report.results:
        if result.choosing and result.choosing.state not in ("done", "diverged"):
            best.pop(result.curve.key, None)
    at_rate = {(result.curve.key, result.lr): result for result in report.results}
    digits, rows = max(report.quantity.digits), []
    for claim in report.grid.claims:
        sides = claim.lower, claim.higher
        lower, higher = (best.get(key) if claim.lr is None else at_rate.get((key, claim.lr)) for key in sides)
        if lower and higher and (difference := _compare_results(lower, higher)):
            rates = " and ".join(dict.fromkeys((format_lr(lower.lr), format_lr(higher.lr))))
            rows.append([claim.text, rates, *_format_difference(difference, digits), difference.verdict])
    return Table("Claims", ["claim", "learning rates", "difference", "95 % interval", "seeds", "verdict"], rows)


def _compare_results(lower: Result, higher: Result) -> PairedDifference | None:
    seeds = [{status.point.seed for status in result.runs} for result in (lower, higher)]
    diverged = {s.point.seed for s in (*lower.runs, *higher.runs) if s.state == "diverged"} & seeds[0] & seeds[1]
    return compare_seeds(lower.by_seed, higher.by_seed, len(diverged))


def _format_difference(difference: PairedDifference, digits: int) -> tuple[str, str, str]:
    """Return the mean, the interval and the number of seeds as text."""
    interval = ABSENT
    if difference.interval:
        interval = " to ".join(f"{end:+z.{digits}f}" for end in difference.interval)
    seeds = f"{difference.n}" + f", {difference.diverged} diverged" * bool(difference.diverged)
    return f"{difference.mean:+z.{digits}f}", interval, seeds


def _find_best(report: Report) -> Iterator[tuple[str, list[Result], int]]:
    """Yield the name of each setting with finished runs, its results by learning rate, and the index of the best."""
    for key, name in report.names.items():
        results = sorted((result for result in report.results if result.key == key), key=lambda result: result.lr)
        best = min(range(len(results)), key=lambda i: results[i].score)
        if math.isfinite(results[best].score):
            yield name, results, best


def list_records(report: Report) -> list[dict[str, Any]]:
    """Return a line for each setting, unrounded, for a CSV file."""
    return [
        {
            "series": result.curve.key,
            "label": result.curve.label,
            "panel": result.curve.panel,
            **({report.grid.over: result.value} if report.grid.over else {}),
            "lr": result.lr,
            "runs": len(result.runs),
            "done": len(result.values),
            "diverged": result.count("diverged"),
            report.quantity.column: result.mean,
            "deviation": result.deviation,
            "lowest": min(result.values, default=None),
            "highest": max(result.values, default=None),
            **(_make_paper_record(result) if report.is_comparable else {}),
        }
        for result in report.results
    ]


def _make_paper_record(result: Result) -> dict[str, Any]:
    paper = result.paper if isinstance(result.paper, str) else result.paper_mean
    return {"paper": paper, "paper_deviation": result.paper_deviation, "difference": result.difference}


def format_result(report: Report, result: Result | None) -> str:
    """Return a result as text, `14.13 ± 0.004`, with what it leaves out; nothing where the grid has no such setting."""
    if result is None:
        return ""
    if result.diverged:
        return "diverged" if result.count("diverged") == len(result.runs) else "diverged so far"
    if result.mean is None:
        return ABSENT
    text = _format_number(report, result.mean, result.deviation)
    notes = [f"{result.count('diverged')} diverged"] * bool(result.count("diverged"))
    if left := len(result.runs) - len(result.values) - result.count("diverged"):
        notes.append(f"{left} to come")
    return f"{text} ({', '.join(notes)})" if notes else text


def _format_paper(report: Report, result: Result) -> str:
    if isinstance(result.paper, str):
        return result.paper
    return ABSENT if result.paper_mean is None else _format_number(report, result.paper_mean, result.paper_deviation)


def _format_number(report: Report, mean: float, deviation: float | None) -> str:
    """Return a mean and a deviation with the paper's digits."""
    of_mean, of_deviation = report.quantity.digits
    return f"{mean:.{of_mean}f}" + ("" if deviation is None else f" ± {deviation:.{of_deviation}f}")
