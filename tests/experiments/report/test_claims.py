"""Claims of an experiment and their verdicts, rates chosen by a seed of their own, and who learned to copy."""

import shutil

import pytest

from muown_train.experiments.grid import load_grid
from muown_train.experiments.progress import read_progress
from muown_train.experiments.report.result_tables import make_claim_table, make_difference_table, make_result_table
from muown_train.experiments.report.results import build_report
from muown_train.experiments.report.stat_tables import find_copying, make_copying_tables
from muown_train.experiments.report.write import ReportWriter
from muown_train.runs.record import read_run
from tests.helpers.folders import line, write

NAME = "corpus_copying"
# By series and exponent of the rate: the losses of seeds 0 to 5. Seed 0 chooses 2^-7 for Muown and 2^-6 for Muon, where
# the others would choose 2^-5 for both.
LOSSES = {
    ("muown", -7): [3.0, 3.40, 3.41, 3.42, 3.43, 3.44],
    ("muown", -6): [3.1, 3.50, 3.60, 3.50, 3.60, 3.50],
    ("muown", -5): [3.2, 3.0, 3.0, 3.0, 3.0, 3.0],
    ("muon", -7): [3.1, 3.6, 3.6, 3.6, 3.6, 3.6],
    ("muon", -6): [3.0, 3.50, 3.56, 3.52, 3.58, 3.54],
    ("muon", -5): [3.1, 3.1, 3.1, 3.1, 3.1, 3.1],
    ("signum", -6): [None, 3.6, 3.7, 3.6, 3.7, 3.6],
    ("adam_0.1", -6): [None, 3.4, "diverged", 3.4, 3.5, 3.4],
}


def copying(step, gain, loss):
    gains = {"copying/second_minus_first": gain, "copying/late_minus_early": gain / 10}
    return line(step, 1.0, **gains) | {"valid/loss": loss}


@pytest.fixture
def made(tmp_path):
    grid = load_grid(NAME).select(series=["muown", "muon", "signum", "adam_0.1"])
    points = grid.expand()
    for point in points:
        loss = LOSSES[point.curve.key, {2**-7: -7, 2**-6: -6, 2**-5: -5}[point.lr]][point.seed]
        state = "finished"
        if loss == "diverged":
            state, loss = "diverged", 9.0
        # with a loss of 3.5 or less a run copies from step 2 on; others of seed 4 do so at step 2 only
        gain = -3.0 if loss <= 3.5 else 0.2
        lines = [copying(1, 0.1, 8.0), copying(2, -2.0 if point.seed == 4 else gain, 4.0), copying(3, gain, loss)]
        write(tmp_path / grid.folder / point.name, lines, dict(point.config), state, steps=3)
    return build_report(grid, read_progress(grid, points, str(tmp_path)))


def test_the_rate_is_chosen_by_a_seed_that_enters_no_mean(made):
    rows = {row[0]: row[1:] for row in make_result_table(made).rows}
    assert rows["2^-7"][:2] == ["3.4200 ± 0.0158", "3.6000 ± 0.0000"]
    assert make_difference_table(made).title == "Differences from Muown at 2^-7, seed by seed"
    # 0.10, 0.15, 0.10, 0.15, 0.10 have the mean 0.12 and the deviation 0.02739, and 2.776 / sqrt(5) is 1.2415
    assert make_difference_table(made).rows[0] == [
        *("Muon, weight decay 0.1", "2^-6", "+0.1200", "0.0274", "+0.0860 to +0.1540", "5"),
    ]
    notes = list(ReportWriter(made).list_notes())
    assert "46 runs: 45 done, 1 diverged." in notes and "Best rates are those of seed 0, which enters no mean." in notes


def test_verdicts(made):
    table = make_claim_table(made)
    assert [row[1:] for row in table.rows] == [
        ["2^-7 and 2^-6", "-0.1200", "-0.1540 to -0.0860", "5", "held"],
        ["2^-6", "+0.0000", "-0.0393 to +0.0393", "5", "undecided"],  # 0, 0.04, -0.02, 0.02, -0.04
        ["2^-6", "+0.1000", "+0.1000 to +0.1000", "5", "not held"],
        ["2^-6", "-0.1000", "-0.1000 to -0.1000", "4, 1 diverged", "undecided"],
    ]
    assert all("embedding" not in row[0] for row in table.rows)  # these series were left out


def test_a_claim_on_best_rates_waits_for_the_runs_that_choose_them(made, tmp_path):
    grid = made.grid
    points = grid.expand()
    shutil.rmtree(tmp_path / grid.folder / "muon-lr=0.03125-seed=0")
    table = make_claim_table(build_report(grid, read_progress(grid, points, str(tmp_path))))
    assert [row[1] for row in table.rows] == ["2^-6"] * 3


def test_who_learned_to_copy(made):
    (table,) = make_copying_tables(made)
    rows = {tuple(row[:2]): row[2:] for row in table.rows}
    assert rows["Muown", "2^-6"] == ["3 of 5", "2", "3.5000 ± 0.0000", "3.6000 ± 0.0000"]
    assert rows["Muown", "2^-7"] == ["5 of 5", "2", "3.4200 ± 0.0158", "—"]
    assert rows["Muon, weight decay 0.1", "2^-7"] == ["0 of 5", "—", "—", "3.6000 ± 0.0000"]
    assert "0.3 nat" in table.title


def test_copying_counts_from_where_it_stays(tmp_path):
    def start(*gains):
        folder = tmp_path / str(gains)
        return find_copying(
            read_run(write(folder, [copying(10 * i, g, 3.0) for i, g in enumerate(gains, 1)], {"seed": 0}))
        )

    assert start(0.0, -2.0, -0.2, -1.5, -4.0) == 40 and start(-2.0, -2.0) == 10
    assert start(0.0, -2.0, -0.3) is None and start(0.0) is None
    assert find_copying(read_run(write(tmp_path / "none", [line(1, 1.0)], {"seed": 0}))) is None


def test_its_files(made, tmp_path):
    names = [path.name for path in ReportWriter(made).write(tmp_path / "report")]
    assert [name for name in names if name.endswith(".png")] == ["figure.png", "rates.png", "losses.png"]
    text = (tmp_path / "report" / "table.md").read_text()
    assert "## Claims" in text and "## Runs that learned to copy" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("lower: signum", "lower: signom"), "there is no series of a claim signom"),
        (("higher: muown, lr: 0.0078125", "higher: muown, lr: 0.1"), "lr=0.1 is no learning rate of"),
        (("rate_seed: 0", "rate_seed: -1"), "rate_seed=-1 must be"),
        (
            ("rate_seed: 0", "over: {optim.momentum: [0.9]}"),
            "claims compare series, and cannot be made with over.optim",
        ),
        (("seeds: [1, 2, 3]}", "seeds: [1, x]}"), "series.muown_rest.seeds='x' must be"),
        (('text: "Signum ends', 'txt: "Signum ends'), "there is no claims.txt"),
    ],
    ids=str,
)
def test_a_wrong_file_is_said(tmp_path, monkeypatch, change, message):
    from muown_train.experiments import grid

    text = (grid.CONFIG_DIR / "experiment" / f"{NAME}.yaml").read_text()
    assert change[0] in text
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / f"{NAME}.yaml").write_text(text.replace(*change, 1))
    monkeypatch.setattr(grid, "CONFIG_DIR", tmp_path)
    with pytest.raises(ValueError, match=message):
        load_grid(NAME)
