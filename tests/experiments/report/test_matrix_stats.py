"""What was measured of runs, from their metrics and their analysis folders, as tables and figures."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muown_train.experiments.grid import load_grid
from muown_train.experiments.progress import read_progress
from muown_train.experiments.report import style
from muown_train.experiments.report.matrix_stats import (
    SPECTRAL,
    MatrixPlace,
    MatrixStats,
    list_kinds,
    list_layers,
    locate_matrix,
    read_probe,
)
from muown_train.experiments.report.result_tables import make_paper_table, make_result_table
from muown_train.experiments.report.results import build_report
from muown_train.experiments.report.stat_figures import choose_blocks, plot_effective_rank, plot_singular_values
from muown_train.experiments.report.write import ReportWriter
from muown_train.runs.record import ABSENT, read_run
from tests.helpers.folders import line, settings, write

NAMES = ["blocks.0.attention.qkv.weight:0", "blocks.0.mlp.out.weight", "blocks.1.mlp.out.weight"]


def series(*values):
    return np.arange(len(values), dtype=float), np.array(values, float)


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [
        ("blocks.3.attention.qkv.weight:0", "query", 3),
        ("blocks.12.attention.qkv.weight:2/spectral_norm", "value", 12),
        ("blocks.0.attention.out.weight/muon/muown", "attention out", 0),
        ("blocks.0.mlp.gate_up.weight", "MLP in", 0),
        ("blocks.0.mlp.pair.weight:1", "mlp.pair:1", 0),
        ("bridge.weight", "bridge", None),
    ],
)
def test_where_a_matrix_is(name, kind, layer):
    assert locate_matrix(name) == MatrixPlace(kind, layer)


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_spread_is_that_of_all_matrices_and_runs(values):
    runs = [{f"blocks.{layer}.mlp.out.weight/x": series(*own) for layer, own in enumerate(values)}]
    runs.append({"blocks.0.mlp.out.weight/x": series(*values[0]), "blocks.0.mlp.gate_up.weight/x": series(1e9)})
    found = MatrixStats("", runs).compute_spread("x", "MLP out")
    all_of_them = np.array([*values, values[0]])
    assert found.steps.tolist() == [0, 1, 2]
    assert found.quantiles == pytest.approx(np.quantile(all_of_them, (0, 0.25, 0.5, 0.75, 1), axis=0))
    of_layer = MatrixStats("", runs).compute_spread("x", "MLP out", 0)
    assert of_layer.median == pytest.approx(values[0])


def test_medians_are_of_what_is_shown():
    """The median of roots is not the root of the median."""
    roots = MatrixStats("", [{f"{NAMES[1]}/coherence": series(1.0), f"{NAMES[2]}/coherence": series(9.0)}])
    assert roots.compute_spread(SPECTRAL[2]).median.tolist() == [2.0] and roots.compute_spread(
        "coherence"
    ).median.tolist() == [5.0]


@pytest.mark.parametrize("state", ["running", "stopped", "diverged", "failed"])
def test_runs_that_are_not_done_are_not_shown(tmp_path, state):
    made = filled("effective_rank_124m", tmp_path, lambda key, step: {NAMES[1]: 0.5}, state)
    assert made.stats == () and any("was measured in 0 of them" in note for note in ReportWriter(made).list_notes())


def test_numbers_that_are_none_and_quantities_that_are_not_there():
    found = MatrixStats("", [{f"{NAMES[1]}/x": series(1, np.nan, np.inf, 4), f"{NAMES[2]}/x": series(3)}])
    assert (found.compute_spread("x").steps.tolist(), found.compute_spread("x").median.tolist()) == ([0, 3], [2, 4])
    assert found.compute_spread("y").quantiles.shape == (5, 0) and found.compute_spread("x", "query").median.shape == (
        0,
    )
    assert found.get_singular_values("MLP out")[0].shape == (0,)
    assert list_kinds([found]) == ["MLP out"] and list_layers([found]) == [0, 1]


def test_probes_and_analyses_are_read_as_one(tmp_path):
    lines = [line(step, 3.0) | {f"spectral/{NAMES[0]}/spectral_norm": float(step)} for step in (1, 2)]
    folder = write(tmp_path / "run", [*lines, line(3, 2.0)], settings())
    (folder / "analysis").mkdir()
    analysed = [
        {"step": step, "checkpoint": "a.b", "iterations": None, f"{NAMES[0]}/spectral_norm": value}
        for step, value in ((2, 9.0), (3, "nan"))
    ]
    text = "".join(json.dumps(each) + "\n" for each in analysed)
    (folder / "analysis" / "spectral.jsonl").write_text(text + '{"step": 4, "cut')
    found = read_probe(read_run(folder), "spectral")
    assert list(found) == [f"{NAMES[0]}/spectral_norm"]
    steps, values = found[f"{NAMES[0]}/spectral_norm"]
    assert steps.tolist() == [1, 2, 3] and values[:2].tolist() == [1, 9] and np.isnan(values[2])
    assert read_probe(read_run(folder), "effective_rank") == {}


def test_blocks_that_are_shown():
    def of(layers):
        return [MatrixStats("", [{f"blocks.{layer}.mlp.out.weight": series(0) for layer in range(layers)}])]

    assert choose_blocks(of(22)) == [3, 7, 11, 15]  # the 4th, 8th, 12th and 16th, as in the paper
    assert choose_blocks(of(4)) == [0, 1, 2, 3] and choose_blocks(of(1)) == [0] and choose_blocks([]) == []
    assert all(len(set(choose_blocks(of(layers)))) == 4 for layers in range(9, 60))


def filled(name, tmp_path, numbers, state="finished"):
    """An experiment whose runs have measured `numbers(series key, step)`, but for the first."""
    grid = load_grid(name)
    points = grid.expand()
    for i, point in enumerate(points):
        lines = [line(0, valid=9.0)]
        for step in (1, 2, 3):
            probed = {f"{grid.report}/{key}": value for key, value in numbers(point.curve.key, step).items()}
            lines.append(line(step, 3.0, valid=3.0) | (probed if i else {}))
        write(tmp_path / grid.folder / point.name, lines, dict(point.config), state, steps=3)
    return build_report(grid, read_progress(grid, points, str(tmp_path)))


def drawn(made, folder):
    """The names of the figures, each of them a PNG and a PDF with something in them, and shown in the page."""
    paths = ReportWriter(made).write(folder)[3:]
    assert all(path.stat().st_size > 5000 for path in paths)
    names = [path.stem for path in paths[::2]]
    assert [path.name for path in paths] == [f"{name}.{suffix}" for name in names for suffix in ("png", "pdf")]
    assert re.findall(r"!\[(\w+)\]", (folder / "table.md").read_text()) == names
    return names


@pytest.mark.slow
def test_spectra(tmp_path):
    growth = {"muon_wd0": 4.0, "muown_wd0": 2.0, "muown_fixed": 1.0}

    def numbers(key, step):
        if key not in growth:
            return {}
        norm = growth[key] ** (step - 1)
        quantiles = {f"{name}/singular_value/{q:g}": q * norm for name in NAMES for q in (0, 0.5, 1)}
        factors = {"spectral_norm": norm, "max_row_norm": norm / 2, "coherence": 4.0}
        turned = {f"{NAMES[1]}/negative": 0.25, f"{NAMES[2]}/negative": 0.5} if key == "muown_wd0" else {}
        return {f"{name}/{key}": value for name in NAMES for key, value in factors.items()} | quantiles | turned

    made = filled("spectral_500m", tmp_path, numbers)
    assert [len(each.runs) for each in made.stats] == [1, 1, 1]
    tables = ReportWriter(made).tables[1:]
    assert [table.rows[1] for table in tables[:3]] == [
        ["MLP out", "16.0 (×16.00)", "4.00 (×4.00)", "1.00 (×1.00)"],
        ["MLP out", "8.00 (×16.00)", "2.00 (×4.00)", "0.500 (×1.00)"],
        ["MLP out", *["2.00 (×1.00)"] * 3],
    ]
    assert tables[3].rows == [["query", ABSENT], ["MLP out", "37.5% [25.0%, 50.0%]"]]
    blocks = [f"blocks_{name}" for name in ("spectral_norm", "max_row_norm", "coherence")]
    assert drawn(made, tmp_path / "report") == ["figure", *blocks, "singular_values", "losses"]
    assert "Spectral was measured in 3 of them." in ReportWriter(made).list_notes()
    parts, values = made.stats[0].get_singular_values("MLP out", 1)
    assert (parts.tolist(), values.tolist()) == ([0, 0.5, 1], [0, 8, 16])


def test_what_is_drawn(tmp_path, monkeypatch):
    """The lines of a panel are medians over layers, shaded from the least to the largest."""
    numbers = dict(zip(NAMES[1:], (0.2, 0.6), strict=True))
    numbers = {"muown_wd0": numbers}
    made = filled(
        "effective_rank_124m", tmp_path, lambda key, step: {n: v * step for n, v in numbers.get(key, {}).items()}
    )
    figures = []
    monkeypatch.setattr(style, "save_figure", lambda figure, paths: figures.append(figure))
    assert plot_effective_rank(made, [])
    (axes,) = figures[0].axes
    assert axes.get_title() == "MLP out" and axes.get_xlabel() == "step"
    (line_drawn,) = [each for each in axes.get_lines() if len(each.get_xdata())]
    assert line_drawn.get_xdata().tolist() == [1, 2, 3]
    assert line_drawn.get_ydata() == pytest.approx([0.4, 0.8, 1.2])
    (shade,) = axes.collections
    corners = {tuple(corner) for corner in shade.get_paths()[0].vertices.round(6).tolist()}
    assert {(1, 0.2), (1, 0.6), (3, 0.6), (3, 1.8)} <= corners
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["Muown"]


def test_histograms_have_the_quantiles_area(tmp_path, monkeypatch):
    """Of singular values that lie pick_evenly between 0 and 2 every bin is as high: 1/2."""
    quantiles = {f"{NAMES[1]}/singular_value/{q:g}": 2 * q for q in (0, 0.25, 0.5, 0.75, 1)}
    norms = {f"{NAMES[1]}/{key}": 2.0 for key in ("spectral_norm", "max_row_norm", "coherence")}
    made = filled("spectral_500m", tmp_path, lambda key, step: {} if "split" in key else quantiles | norms)
    figures = []
    monkeypatch.setattr(style, "save_figure", lambda figure, paths: figures.append(figure))
    assert plot_singular_values(made, [])
    above, below = figures[0].axes
    heights = [patch.get_data().values for patch in above.patches]
    assert len(heights) == 3 and np.array(heights) == pytest.approx(0.5, rel=0.02)
    assert [each.get_ydata().tolist() for each in below.get_lines() if len(each.get_xdata())] == [
        [0, 0.5, 1, 1.5, 2]
    ] * 3


def test_effective_ranks(tmp_path):
    made = filled("effective_rank_124m", tmp_path, lambda key, step: {NAMES[1]: 0.2 * step, NAMES[2]: 0.1})
    assert ReportWriter(made).tables[1].rows == [["MLP out", *[f"{np.mean([0.15, 0.25, 0.35]):.3f}"] * 2]]
    assert drawn(made, tmp_path / "report") == ["figure", "losses"]


@pytest.mark.slow
def test_gradient_noise(tmp_path):
    """The paper's ratio is that of each optimizer's own term along its own run, and not at the same weights."""

    def numbers(key, step):
        terms = {"muon": 2.0 * step, "muown": 0.5, "muon/muown": 4.0 * step} if key == "muown_wd0" else {"muon": 3.0}
        return {f"{name}/{key}": value for name in NAMES for key, value in terms.items()} | {"median/muon": 5.0}

    made = filled("gradient_noise_124m", tmp_path, numbers)
    _, terms, ratio = ReportWriter(made).tables
    values = ("3.00", "4.00", "0.500", "8.00")
    assert terms.rows[1] == ["2", *(f"{value} [{value}, {value}]" for value in values)]
    muon, muown = "Muon, q, k, v apart, weight decay 0.1", "Muown"
    assert list(ratio.head) == ["step", f"median along {muon} / median along {muown}"]
    assert ratio.rows == [["1", "6.00"], ["2", "6.00"], ["3", "6.00"]]
    assert drawn(made, tmp_path / "report") == ["figure", "losses"]


def test_nothing_is_measured_yet(tmp_path):
    made = filled("effective_rank_124m", tmp_path, lambda key, step: {})
    assert drawn(made, tmp_path / "report") == ["losses"]
    assert any(re.search(r"was measured in 0 of them", note) for note in ReportWriter(made).list_notes())


def test_step_times(tmp_path):
    """The paper's table from speeds that make its medians, and windows that are slower or faster than those."""
    grid = load_grid("500m_step_time")
    points = grid.expand()
    for point in points:
        seconds = grid.paper[point.curve.key][point.lr]
        speeds = [point.config["batch_tokens"] / (seconds * factor) for factor in (9, 1, 1, 1.01, 0.99)]
        lines = [line(i + 1, 3.0, valid=3.0) | {"system/tokens_per_second": s} for i, s in enumerate(speeds)]
        write(tmp_path / grid.folder / point.name, lines, dict(point.config), steps=5)
    made = build_report(grid, read_progress(grid, points, str(tmp_path)))
    assert make_result_table(made).rows == [["2e-3", "1.34", "1.36", "1.27", "1.27"]]
    assert [row[3:] for row in make_paper_table(made).rows] == [
        [f"{n:.2f}", f"{n:.2f}", "+0.00"] for n in (1.34, 1.36, 1.27, 1.27)
    ]
    assert drawn(made, tmp_path / "report") == ["figure", "losses"]
