"""`muown-train compare` as a user meets it: the numbers in its tables, the lines in its figure, what cannot be."""

import csv
import io
import json
import os
import statistics
import subprocess
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from muown_train.cli.commands import compare as command
from muown_train.experiments.compare import compare_runs
from muown_train.experiments.report import curves, style
from muown_train.experiments.report.tables import Table, format_csv, format_mean, format_range, mean_and_deviation
from muown_train.runs.record import read_run
from muown_train.runtime.formatting import format_count
from tests.helpers.folders import line, settings, write
from tests.helpers.paths import COMMAND, ROOT


def call(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*COMMAND, "compare", *words], cwd=cwd, env=environment, capture_output=True, text=True)


def ending_in(valid: float, training: float = 3.0) -> list[dict]:
    """Lines of four updates, each at 200 tokens/s."""
    lines = [line(0, valid=9.0), *(line(i, training) for i in (1, 2, 3))]
    return [*lines, line(4, training, valid, **{"system/tokens_per_second": 200.0})]


def called(monkeypatch, cwd: Path, *words: str) -> object:
    """Return the exit status of the command in this process."""
    monkeypatch.chdir(cwd)
    try:
        return command.main(words)
    except SystemExit as end:
        return end.code


@pytest.fixture
def runs(tmp_path) -> Path:
    """Muown with three seeds; Muon finished, diverged, and going on; AdamW that diverged."""
    folder = tmp_path / "runs"
    for seed, valid in enumerate((3.1, 3.25, 3.0)):
        write(folder / f"muown-{seed}", ending_in(valid), settings(seed))
    muon = {"_target_": "muown_train.optim.Muon", "lr": 0.02}
    write(folder / "muon-0", ending_in(3.5), settings(0, **muon))
    write(folder / "muon-1", ending_in(8.0)[:3], settings(1, **muon), "diverged", reason="too [bold]high[/bold]")
    write(folder / "muon-2", ending_in(8.0)[:2], settings(2, **muon), "running")
    write(folder / "adamw", ending_in(8.0)[:3], settings(0, _target_="torch.optim.AdamW"), "diverged")
    return folder


def cells(text: str, label: str) -> list[str]:
    """Of the first line of a Markdown table that begins with this label."""
    found = next(row for row in text.splitlines() if row.startswith(f"| {label} |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_numbers_of_settings_and_runs(runs, tmp_path):
    done = call(tmp_path, "runs/*")
    assert done.returncode == 0 and not done.stderr
    assert sorted(path.name for path in (tmp_path / "compare").iterdir()) == [
        "compare.csv",
        "compare.md",
        "compare.pdf",
        "compare.png",
    ]
    text = (tmp_path / "compare" / "compare.md").read_text()
    finals = [3.1, 3.25, 3.0]
    mean, deviation = statistics.mean(finals), statistics.stdev(finals)
    loss, perplexity = f"{mean:.4f} ± {deviation:.4f}", f"{2 * mean:.2f} ± {2 * deviation:.2f}"
    training = "3.0000 ± 0.0000"
    assert cells(text, "Muown") == ["Muown", "3", loss, perplexity, training, "4", "400", "200", "0.01", "finished"]
    state = "1 finished, 1 diverged, 1 running"
    assert cells(text, "Muon")[:7] == ["Muon", "1 of 3", "3.5000", "7.00", "3.0000", "1 to 4", "100 to 400"]
    assert cells(text, "Muon")[-1] == state
    assert cells(text, "AdamW")[1:4] == ["1", "diverged", "diverged"] and cells(text, "AdamW")[-1] == "diverged"
    assert cells(text, "optim.lr") == ["optim.lr", "0.01", "0.02", "0.01"]
    assert "diverged, 2 of 4 steps: too [bold]high[/bold]" in text and "running or cut off, 1 of 4 steps" in text
    assert "which leaves out 2 diverged, 1 running" in text
    assert loss in done.stdout and state in done.stdout and "too [bold]high[/bold]" in done.stdout

    with (tmp_path / "compare" / "compare.csv").open() as file:
        rows = {Path(row["run"]).name: row for row in csv.DictReader(file)}
    assert len(rows) == 7
    assert float(rows["muown-1"]["valid_loss"]) == 3.25 and rows["muown-1"]["optim._target_"].endswith("Muown")
    assert rows["muon-1"]["state"] == "diverged" and float(rows["muon-1"]["valid_after_update"]) == 0
    assert rows["muon-2"]["tokens_per_second"] == ""


def test_runs_without_an_evaluation_and_runs_in_progress(tmp_path):
    write(tmp_path / "a", [line(1, 4.0), line(2, 3.0)], settings(0), "stopped", reason="SIGTERM")
    write(tmp_path / "b", ending_in(3.3)[:2], settings(0, lr=0.5), "running")
    comparison = compare_runs([read_run(tmp_path / name) for name in "ab"])
    shown = {row[0]: row for row in comparison.make_overview().rows}
    assert shown["lr=0.01"][1:5] == ["1", "—", "—", "—"] and shown["lr=0.5"][2:4] == ["9.0000 so far", "18.00 so far"]
    assert [row[3:5] for row in comparison.make_run_table().rows] == [["—", "—"], ["9.0000", "0"]]
    comparison.write(tmp_path / "out")


@pytest.mark.parametrize("width", [60, 90, 160])
def test_a_narrow_terminal_shows_fewer_columns_but_whole_numbers(runs, width):
    table = compare_runs(
        [read_run(folder) for folder in sorted(runs.iterdir()) if "muown" in folder.name]
    ).make_overview()
    screen = io.StringIO()
    Console(file=screen, width=width).print(table.format_rich(width))
    said = screen.getvalue()
    assert "3.1167 ± 0.1258" in said and max(map(len, said.splitlines())) <= width
    assert ("perplexity" in said, "training loss" in said) == (width > 60, width > 90)


def test_a_folder_twice_is_one_run_and_a_seed_twice_is_said(runs):
    again = [read_run(runs / name) for name in ("muown-0", "muown-1", "../runs/muown-0")]
    comparison = compare_runs(again)
    assert comparison.make_overview().rows[0][1] == "2" and comparison.labels == ["muown-0"]
    assert not any("several runs" in note for note in comparison.list_notes())
    twin = read_run(write(runs / "twin", ending_in(3.0), settings(1)))
    assert any("several runs of seed 1" in note for note in compare_runs([*again, twin]).list_notes())


def test_labels_are_the_fewest_keys_that_tell_apart(tmp_path):
    grid = [(name, lr) for name in ("Muon", "Muown") for lr in (0.1, 0.2)]
    runs = [
        read_run(write(tmp_path / f"{name}{lr}", [line(1)], settings(_target_=f"x.{name}", lr=lr, rest={"lr": lr})))
        for name, lr in grid
    ]
    assert sorted(compare_runs(runs).labels) == [f"{name} lr={lr}" for name, lr in grid]
    assert sorted(compare_runs(runs[:2]).labels) == ["lr=0.1", "lr=0.2"]
    assert sorted(compare_runs(runs[1:3]).labels) == ["Muon", "Muown"]
    many = [read_run(write(tmp_path / f"m{i}", [line(1)], settings(lr=i))) for i in range(9)]
    table = compare_runs(many).make_differences()
    assert table.head == ["setting", "optim.lr"] and len(table.rows) == 9


def test_the_mean_of_curves_is_over_common_steps(tmp_path):
    short = [line(0, valid=5.0), line(2, 1.0, 4.0, time=7.0)]
    long = [line(0, valid=3.0), line(1, 1.0, 9.0), line(2, 1.0, 1.0, time=9.0), line(3, 1.0, 0.5)]
    runs = [read_run(write(tmp_path / str(i), lines, settings(i))) for i, lines in enumerate((short, long))]
    read_loss = curves._LOSSES["validation"]
    assert [of.tolist() for of in curves.average_losses(runs, read_loss, "time")] == [[0, 8.0], [4.0, 2.5]]
    assert [of.tolist() for of in curves.average_losses(runs, read_loss, "tokens")] == [[0, 200], [4.0, 2.5]]


def test_the_figure_shows_the_numbers(runs, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(style, "save_figure", lambda figure, paths: drawn.append(figure))
    comparison = compare_runs([read_run(folder) for folder in sorted(runs.iterdir())])
    curves.plot_comparison(comparison.groups, comparison.words, [])
    valid, _, training, _ = drawn[0].axes
    means = [each for each in valid.lines if each.get_linewidth() > 1 and len(each.get_xdata())]
    assert [each.get_ydata()[-1] for each in means[:1]] == [pytest.approx(np.mean([3.1, 3.25, 3.0]))]
    assert valid.get_ylim()[1] < 8 and training.get_xlabel() == "tokens"
    crosses = [each for each in valid.lines if each.get_marker() == "x"]
    assert len(crosses) == 2 and all(each.get_ydata()[0] == valid.get_ylim()[1] for each in crosses)
    assert (
        [text.get_text() for text in drawn[0].legends[0].get_texts()] == comparison.labels == ["Muown", "Muon", "AdamW"]
    )


def test_runs_of_several_machines_are_not_drawn_against_time(runs, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(style, "save_figure", lambda figure, paths: drawn.append(figure))
    records = [read_run(folder) for folder in sorted(runs.iterdir())]
    records[0].manifest["device"] = "another device"
    comparison = compare_runs(records)
    curves.plot_comparison(comparison.groups, comparison.words, [])
    assert [axes.get_title() for axes in drawn[0].axes] == ["against tokens", ""]
    assert any("different machines" in note for note in comparison.list_notes())
    assert "different machines" in curves.format_caption(comparison.groups)


def test_budgets_far_apart_are_drawn_on_a_logarithmic_axis(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(style, "save_figure", lambda figure, paths: (figure.canvas.draw(), drawn.append(figure)))
    for name, steps in (("short", 5), ("long", 51), ("middle", 50)):
        lines = [line(i, 3 + 1 / i, 3 + 1 / i) for i in range(1, steps + 1)]
        write(tmp_path / name, lines, settings(tokens=f"{steps}$a$"))
    short, middle, long = (read_run(tmp_path / name) for name in ("short", "middle", "long"))
    for runs in ([short, long], [short, middle]):
        comparison = compare_runs(runs)
        curves.plot_comparison(comparison.groups, comparison.words, [])
    scales = [axes.get_xscale() for figure in drawn for axes in figure.axes]
    assert scales == ["log"] * 4 + ["linear"] * 4
    ticks = [label.get_text() for label in drawn[0].axes[2].get_xticklabels()]
    assert "1k" in ticks and not any("$" in tick for tick in ticks)
    assert r"tokens=5\$a\$" in [text.get_text() for text in drawn[0].legends[0].get_texts()]


@pytest.mark.parametrize("text, shown", [("/a/very/long/path/{}", "…/very/long/path/one"), ("{}" + "/path" * 20,) * 2])
def test_many_settings_are_a_table_below_the_axes(tmp_path, monkeypatch, text, shown):
    """Six keys, each alone different from the first run of twelve: no entry of the legend is lost, cut or covered."""
    drawn = []
    monkeypatch.setattr(
        style, "save_figure", lambda figure, paths: (figure.draw_without_rendering(), drawn.append(figure))
    )
    alone = {
        "_target_": ["x.Muon", "x.AdamW"],
        "lr": [0.0078125, 0.001953125],
        "weight_decay": [0.1, 0.01],
        "betas": [[0.8, 0.9], [0.9, 0.99]],
        "text": [text.format(end) for end in ("one", "two")],
        "adam_eps": [1e-8],
    }
    first = {"_target_": "x.Muown", "lr": 0.00390625, "weight_decay": 0.0, "text": "a$b$", "adam_eps": 1e-6}
    changed = [{}, *({key: value} for key, values in alone.items() for value in values)]
    for i, change in enumerate(changed):
        write(tmp_path / str(i), [line(n, 3 + i / 9, 3 + i / 9) for n in (1, 2, 3)], settings(**(first | change)))
    comparison = compare_runs([read_run(tmp_path / str(i)) for i in range(len(changed))])
    curves.plot_comparison(comparison.groups, comparison.words, [])
    (figure,) = drawn
    (legend,) = figure.legends
    entries = [text.get_text() for text in legend.get_texts()]
    heads = [entry for entry in entries if entry.split() == ["lr", "weight_decay", "adam_eps", "betas", "text"]]
    assert len(heads) in (1, 2) and len(entries) == len(heads) + 12 == len(set(entries)) + len(heads) - 1
    assert entries[1].split() == ["Muown", "0.00391", "0", "1e-06", "[0.9,", "0.95]", r"a\$b\$"]
    assert any(entry.endswith(f"  {shown.format('one')}") for entry in entries)
    assert "Training loss" in legend.get_title().get_text()
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0
    assert all(box.y1 <= axes.get_tightbbox().y0 for axes in figure.axes)
    assert not figure.get_supxlabel()


def test_values_are_shortened_where_they_stay_apart():
    assert style.align_columns([["Muon", "lr=0.00390625"], ["AdamW", "lr=0.5"]]) == [
        "       lr",
        "Muon   0.00391",
        "AdamW  0.5",
    ]
    assert style.align_columns([["lr=0.12345"], ["lr=0.12346"]])[1:] == ["0.12345", "0.12346"]
    ends_alike = [f"{i}{'x' * 30}" for i in range(2)]
    assert style.align_columns([[f"path={value}"] for value in ends_alike])[1:] == ends_alike


def test_one_run_is_a_picture(tmp_path):
    lines = [{"step": i, "tokens": i * 10, "train/loss": 2.0 / (i + 1), "valid/loss": 2.1} for i in range(5)]
    curves.plot_losses([*lines, {"step": 6, "tokens": 60, "train/loss": "nan"}], tmp_path / "loss.png", "$x", 3.0)
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_lines_look_different():
    for labels in (range(28), [i % 7 for i in range(28)], ["a"] * 20, [f"muown {i}" for i in range(28)]):
        looks = [tuple(look.values()) for look in style.choose_styles([str(label) for label in labels])]
        assert len(set(looks)) == len(looks)

    def colours(*labels):
        return [look["color"] for look in style.choose_styles(labels)]

    assert colours("a", "b", "a 2") == [style.BLUE, style.VERMILLION, style.BLUE]
    assert colours("Muon, weight decay 0", "of", "Muown") == [style.VERMILLION, style.GREEN, style.BLUE]
    assert colours("muown lr=1", "muown lr=2") == [style.BLUE, style.VERMILLION]  # of one optimizer alone
    assert colours("soap", "muon", "muon,") == [style.ORANGE, style.VERMILLION, style.VERMILLION]


def test_cells():
    assert mean_and_deviation([1.0, 2.0, 4.0]) == pytest.approx((7 / 3, statistics.stdev([1.0, 2.0, 4.0])))
    assert [format_mean(values, 2) for values in ([], [1.005e3], [1.0, 2.0])] == ["—", "1005.00", "1.50 ± 0.71"]
    assert [format_range(values, ",d") for values in ([], [None, 5], [1000, 7])] == ["—", "5", "7 to 1,000"]
    assert (
        Table("T", ["a", "b"], [["x|y", "1"]]).format_markdown() == "## T\n\n| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n"
    )
    assert format_csv([{"a": 'x,"y"', "b": None}]) == 'a,b\n"x,""y""",\n'
    assert [format_count(n) for n in (0, 500, 79872, 2.5e6, 999.4e6, 999_817_216, 1e10)] == [
        "0", "500", "79.9k", "2.5M", "999M", "1B", "10B"
    ]  # fmt: skip
    assert [style.choose_time_unit(s)[1] for s in (30, 300, 8000)] == ["seconds", "minutes", "hours"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: RUN; see --help"),
        (["nothing"], "there is no folder nothing"),
        (["no*"], "there is no folder no*: give those of runs, such as runs/NAME or 'runs/*'"),
        (["runs"], "runs is no run's folder, it has no config.yaml: did you mean runs/*?"),
        (["empty"], "empty has no lines in metrics.jsonl"),
        (["runs/*", "--ouy", "x"], "unrecognized arguments: --ouy x; see --help"),
        (["runs/*", "--out", "file"], "file: File exists"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence(runs, tmp_path, monkeypatch, capsys, words, message):
    (tmp_path / "file").write_text("")
    write(tmp_path / "empty", [line(1)], settings())
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    assert called(monkeypatch, tmp_path, *words) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and message in said.err and said.err.count("\n") == 1
    assert not said.out


@pytest.mark.slow
def test_what_is_no_run_is_passed_over(runs, tmp_path, monkeypatch, capsys):
    (runs / "notes.txt").write_text("")
    (runs / "multirun.yaml").write_text("")  # Hydra's, of a sweep
    assert called(monkeypatch, tmp_path, "runs/*", "--out", "here") is None
    passed_over = capsys.readouterr().err
    assert "passed over: runs/notes.txt is no folder" in passed_over and "multirun" not in passed_over
    assert (tmp_path / "here" / "compare.png").read_bytes()[:4] == b"\x89PNG"


def test_a_setting_that_only_one_optimizer_has_is_shown_if_it_was_given(tmp_path):
    muown = settings(_target_="x.Muown", ns_steps=5, magnitude_lr=None)
    folders = [
        write(tmp_path / "muown", [line(1)], muown),
        write(tmp_path / "muon", [line(1)], settings(_target_="x.Muon", nesterov=True, ns_steps=5)),
    ]
    keys = [row[0] for row in compare_runs([read_run(folder) for folder in folders]).make_differences().rows]
    assert keys == ["optim._target_"]
    (folders[0] / "manifest.json").write_text(json.dumps({"command": ["optim=muown", "optim.magnitude_lr=null"]}))
    rows = compare_runs([read_run(folder) for folder in folders]).make_differences().rows
    assert [row[0] for row in rows] == ["optim._target_", "optim.magnitude_lr"] and sorted(rows[1][1:]) == ["null", "—"]
