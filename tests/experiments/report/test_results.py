"""Reports of experiments: tables equal to the paper's, means over seeds, best rates, differences, further axes."""

import csv
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from muown_train.experiments.grid import load_grid
from muown_train.experiments.progress import read_progress
from muown_train.experiments.report import figures as experiment_figures
from muown_train.experiments.report.result_tables import (
    make_best_table,
    make_difference_table,
    make_paper_table,
    make_result_table,
)
from muown_train.experiments.report.results import build_report
from muown_train.experiments.report.tables import Table, escape_latex
from muown_train.experiments.report.write import ReportWriter
from tests.helpers.experiments import fill, match_paper, targets
from tests.helpers.runs import slow_but

TABLES = ("500m_multiseed", "1b", "2_7b", "qwen2_0_5b", "500m_magnitude")  # of the paper


@pytest.mark.parametrize("name", slow_but(["500m_multiseed"], TABLES))
def test_the_papers_own_numbers_make_the_papers_tables(name, tmp_path):
    table = targets()["tables"][name]
    grid = load_grid(name)
    points = grid.expand()
    stated = {key: dict(zip(table["lr"], values, strict=True)) for key, values in table.items() if key != "lr"}
    fill(tmp_path / grid.folder, points, match_paper(stated, grid.seeds))
    made = build_report(grid, read_progress(grid, points, str(tmp_path)))
    paths = ReportWriter(made).write(tmp_path / "report")
    assert [path.name for path in paths] == ["table.md", "table.csv", "table.tex", "figure.png", "figure.pdf"]
    assert all(path.stat().st_size > 100 for path in paths)

    markdown = make_result_table(made)
    columns = {series.key: i for i, series in enumerate(grid.curves, 1) if series.key in stated}
    for row in markdown.rows:
        lr = float(row[0])
        for key, column in columns.items():
            value = stated[key][lr]
            if isinstance(value, list):
                mean, deviation = map(float, row[column].split(" ± "))
                assert [mean, deviation] == value
            else:
                assert row[column] == {None: "—", "diverged": "diverged"}.get(value) or float(row[column]) == value
    for row in make_paper_table(made).rows:
        assert row[3] == row[4] and row[5] in ("+0.00", "—")
    for line in csv.DictReader(paths[1].open()):
        if line["series"] not in stated:
            assert "_split" in line["series"] and line["done"] == "0" and line["paper"] == ""
            continue
        value = stated[line["series"]][float(line["lr"])]
        if isinstance(value, list):
            assert [float(line["valid_perplexity"]), float(line["deviation"])] == pytest.approx(value)
            assert abs(float(line["difference"])) < 1e-9
        elif value == "diverged":
            assert line["valid_perplexity"] == "" and line["diverged"] == "1" and line["paper"] == "diverged"
        elif value is None:
            assert line["valid_perplexity"] == line["paper"] == "" and line["done"] == "0"
        else:
            assert float(line["valid_perplexity"]) == value
    latex = paths[2].read_text()
    assert latex.count(r"\toprule") == len(ReportWriter(made).tables) and "±" not in latex and "—" not in latex
    for row in markdown.rows:
        assert " & ".join(map(escape_latex, row)) + r" \\" in latex


def test_seeds_that_are_missing_or_diverged(multiseed, tmp_path):
    grid, points = multiseed
    ends = {("muown_wd0", 4e-3): [14.0, 15.0, None], ("muon_wd0", 4e-3): ["diverged", "diverged", 20.0],
            ("muown_wd0", 1e-3): ["diverged"] * 3, ("muon_wd0", 1e-3): ["diverged", None, None]}  # fmt: skip
    fill(tmp_path / grid.folder, points, lambda point: ends[point.curve.key, point.lr][point.seed])
    made = build_report(grid, read_progress(grid, points, str(tmp_path)), ["paper_exact=true", "cache=x"])
    assert make_result_table(made).rows == [
        ["4e-3", "14.50 ± 0.707 (1 to come)", "20.00 (2 diverged)"],
        ["1e-3", "diverged", "diverged so far"],
    ]
    assert make_paper_table(made).rows[0][2:] == ["2 of 3", "14.50 ± 0.707 (1 to come)", "14.13 ± 0.004", "+0.37"]
    assert "12 runs: 3 done, 6 diverged, 3 missing." in ReportWriter(made).list_notes()
    assert "Cross: diverged; a mean there is over the other seeds." in experiment_figures._format_caption(made, 30.0)
    drawn = Figure().subplots()
    drawn.set_ylim(10, 30)
    experiment_figures._draw_line(drawn, made.results, {"color": "k", "marker": "o"}, False)
    (crosses,) = (line for line in drawn.lines if line.get_marker() == "x")
    assert sorted(crosses.get_xdata()) == [1e-3, 1e-3, 4e-3]
    assert not any("data" in note for note in ReportWriter(made).list_notes())
    folder = tmp_path / grid.folder / "muown_wd0-lr=0.004-seed=0"
    (folder / "manifest.json").write_text('{"data": {"content": "another text"}}')
    assert any(
        "same data" in note
        for note in ReportWriter(build_report(grid, read_progress(grid, points, str(tmp_path)))).list_notes()
    )
    assert "Besides the experiment's settings: paper_exact=True." in ReportWriter(made).list_notes()


def test_a_report_without_runs(multiseed, tmp_path):
    grid, points = multiseed
    made = build_report(grid, read_progress(grid, points, str(tmp_path)))
    assert {point for row in make_result_table(made).rows for point in row[1:]} == {"—"}
    assert [table.title for table in ReportWriter(made).tables] == ["Beside the paper"]
    assert len(ReportWriter(made).write(tmp_path / "with")) == 5  # the paper's numbers alone
    small = load_grid("500m_multiseed", "tiny").select(points=1, seeds=1, series=["muown_wd0"])
    made = build_report(small, read_progress(small, small.expand(), str(tmp_path)))
    assert len(ReportWriter(made).write(tmp_path / "without")) == 3 and not made.is_comparable
    text = (tmp_path / "without" / "table.md").read_text()
    assert "figure" not in text and "|" not in text and "- 1 run: 1 missing." in text
    assert (tmp_path / "without" / "table.tex").read_text() == ""
    noise = load_grid("gradient_noise_124m")
    made = build_report(noise, read_progress(noise, noise.expand(), str(tmp_path)))
    assert ReportWriter(made).tables == []


def test_empty_tables():
    assert Table("t", ["a", "b"], []).is_empty and Table("t", ["a", "b"], [["x", "—"], ["y", ""]]).is_empty
    assert not Table("t", ["a", "b"], [["x", "—"], ["y", "1"]]).is_empty


def best_of(ends, folder):
    """The table of the best rates, without names, of series of 1b that come to these perplexities, from 3e-3 down."""
    grid = load_grid("1b").select(series=list(ends))
    points = grid.expand()
    rates = grid.curves[0].lr
    fill(folder / grid.folder, points, lambda point: ends[point.curve.key][rates.index(point.lr)])
    return [row[1:] for row in make_best_table(build_report(grid, read_progress(grid, points, str(folder)))).rows]


def test_the_best_learning_rates(tmp_path):
    """Nearly as good is what lies beside the best without a gap; a run that diverged is a gap."""
    ends = {
        "muown_wd0": [10.15, 10.0, 10.19, 10.21],
        "muon_wd0": [10.1, "diverged", 10.0, 10.19],
        "adamw_wd0.1": ["diverged"] * 4,
    }
    assert best_of(ends, tmp_path) == [
        ["2e-3", "10.00", "1e-3 to 3e-3", "≥ 3"],
        ["1e-3", "10.00", "5e-4 to 1e-3", "≥ 2"],
    ]


def test_the_best_beside_rates_that_are_missing_or_no_numbers(tmp_path):
    ends = {
        "muown_wd0": [math.nan, 10.3, 10.0, 10.3],  # both neighbours are known
        "muon_wd0": [10.3, 10.0, None, 10.0],  # nobody knows beyond
        "muon_wd0.1": [math.nan] * 4,
    }
    assert best_of(ends, tmp_path) == [
        ["1e-3", "10.00", "1e-3 to 1e-3", "1"],
        ["5e-4", "10.00", "5e-4 to 5e-4", "≥ 1"],
    ]


def test_a_rate_at_which_a_seed_diverged_is_not_the_best(multiseed, tmp_path):
    grid, points = multiseed
    ends = {("muown_wd0", 4e-3): [14.0, "diverged", "diverged"], ("muown_wd0", 1e-3): [14.5] * 3}
    fill(tmp_path / grid.folder, points, lambda point: ends.get(point.setting[::2], ["diverged"] * 3)[point.seed])
    made = build_report(grid, read_progress(grid, points, str(tmp_path)))
    assert make_best_table(made).rows == [["Muown", "1e-3", "14.50 ± 0.000", "1e-3 to 1e-3", "≥ 1"]]
    assert make_difference_table(made).rows == [] and not any(
        "Differences" in table.title for table in ReportWriter(made).tables
    )


def test_differences_are_those_of_seeds(multiseed, tmp_path):
    """Deviations of differences, seed by seed, and not differences of deviations."""
    grid, points = multiseed
    ends = {
        ("muown_wd0", 4e-3): [14.0, 15.0, 16.0],
        ("muon_wd0", 1e-3): [14.5, None, 16.7],
        ("muown_wd0", 1e-3): [20] * 3,
    }
    fill(tmp_path / grid.folder, points, lambda point: ends.get(point.setting[::2], [21.0] * 3)[point.seed])
    made = build_report(grid, read_progress(grid, points, str(tmp_path)))
    assert make_difference_table(made).title == "Differences from Muown at 4e-3, seed by seed"
    assert make_difference_table(made).rows == [
        ["Muon, weight decay 0", "1e-3", "+0.600", "0.141", "-0.671 to +1.871", "2"]  # 0.6 -+ 12.706 0.1414 / sqrt(2)
    ]
    assert ReportWriter(made).tables[-1] == make_difference_table(made)


@pytest.mark.slow
def test_further_axes_and_panels(tmp_path):
    grid = load_grid("124m_weight_decay").select(points=2, series=["muon"])
    points = grid.expand()
    fill(tmp_path / grid.folder, points, lambda point: 20 + 10 * point.value + point.lr)
    made = build_report(grid, read_progress(grid, points, str(tmp_path)))
    assert make_result_table(made).head == [
        "learning rate",
        *(f"Muon, weight decay {v}" for v in ("0", "0.01", "0.03", "0.1", "0.3")),
    ]
    assert make_result_table(made).rows[0] == ["6e-3", "20.01", "20.11", "20.31", "21.01", "23.01"]
    assert not made.is_comparable and len(ReportWriter(made).write(tmp_path / "report")) == 5
    width = load_grid("width").select(points=3)
    points = width.expand()
    fill(tmp_path / width.folder, points, lambda point: 20.0)
    made = build_report(width, read_progress(width, points, str(tmp_path)))
    assert make_result_table(made).head[1] == "width 512, Muown" and make_result_table(made).rows[0][:2] == [
        "2^-5",
        "2.9957",
    ]


@given(st.lists(st.floats(1e-5, 0.1), min_size=1, max_size=12))
@pytest.mark.slow
def test_labels_of_learning_rates_do_not_touch(rates):
    axes = Figure().subplots()
    axes.set_xscale("log")
    experiment_figures._label_rate_axis(axes, rates)
    left, right = np.log(axes.get_xlim())
    ticks = np.log(axes.get_xticks())
    assert 1 <= len(ticks) <= 7 and all(left <= ticks) and all(ticks <= right)
    if len(set(rates)) > 2:  # two rates may have no round number between them
        assert all(np.diff(ticks) >= 0.9 * (right - left) / 7) or len(ticks) == len(set(rates))
