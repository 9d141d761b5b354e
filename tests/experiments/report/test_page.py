"""Pages that show reports: docs/results.md shows what the kept runs say."""

import re

import pytest

from muown_train.cli.commands import reproduce
from muown_train.experiments.grid import load_grid
from muown_train.experiments.report import style
from muown_train.experiments.report.page import fill_page
from tests.helpers.experiments import fill as fill_runs
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "results.md"
BODY = "#### T\n\n| x |\n\n- note\n"
PARTS = re.findall(r"<!-- report (\S+)", PAGE.read_text())


@pytest.fixture
def made(tmp_path):
    """The files of a report with two figures."""
    (tmp_path / "report").mkdir()
    files = [tmp_path / "report" / name for name in ("table.md", "table.csv", "one.png", "one.pdf", "two.png")]
    for path in files:
        path.write_text(path.name)
    return files


def test_the_part_of_a_report_is_brought_up_to_date_and_nothing_else(made, tmp_path):
    page = tmp_path / "results.md"
    other = "<!-- report b -->\nkeep\n<!-- end -->\n"
    page.write_text(f"# Mine\n\n{other}<!-- report a two -->\nold\n<!-- end -->\nafter\n")
    part = "\n![two](results/a/two.png)\n\n#### T\n\n| x |\n\n- note\n\n"
    expected = f"# Mine\n\n{other}<!-- report a two -->\n{part}<!-- end -->\nafter\n"
    for _ in range(2):
        assert fill_page(page, "a", BODY, made) == tmp_path / "results" / "a"
        assert page.read_text() == expected
    assert sorted(path.name for path in (tmp_path / "results" / "a").iterdir()) == ["table.csv", "two.png"]


def test_a_part_that_does_not_end_takes_nothing_with_it(made, tmp_path):
    page = tmp_path / "results.md"
    page.write_text("<!-- report a -->\nmine\n<!-- report b -->\n<!-- end -->")
    with pytest.raises(ValueError, match=r"results\.md has no part for this report: <!-- report a -->"):
        fill_page(page, "a", BODY, made)
    fill_page(page, "b", BODY, made)
    assert page.read_text().startswith("<!-- report a -->\nmine\n<!-- report b -->\n\n![one]")
    assert page.read_text().endswith("- note\n\n<!-- end -->")


def test_all_figures_where_none_is_named(made, tmp_path):
    page = tmp_path / "results.md"
    page.write_text("<!-- report a -->\n<!-- end -->\n")
    fill_page(page, "a", BODY, made)
    assert page.read_text().count("results/a/") == 2


def test_pages_that_cannot_be_filled(made, tmp_path):
    page = tmp_path / "results.md"
    with pytest.raises(ValueError, match=r"page=.*results.md is no file: give a page"):
        fill_page(page, "a", BODY, made)
    page.write_text("<!-- report b -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match=r"results.md has no part for this report: <!-- report a --> and <!-- end -->"):
        fill_page(page, "a", BODY, made)
    page.write_text("<!-- report a three -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match=r"results.md: a has no figure three yet; it has one, two"):
        fill_page(page, "a", BODY, made)
    assert page.read_text() == "<!-- report a three -->\n<!-- end -->\n" and not (tmp_path / "results").exists()


def test_by_the_command(tmp_path, capsys):
    grid = load_grid("500m_magnitude").select(points=2)
    fill_runs(tmp_path / grid.folder, grid.expand(), lambda point: 14.0)
    page = tmp_path / "page.md"
    page.write_text("<!-- report 500m_magnitude -->\n<!-- end -->\n")
    words = ["experiment=500m_magnitude", "points=2", "action=report", f"out={tmp_path}", f"page={page}"]
    assert reproduce.main(words) == 0
    assert "| 4e-3 | 14.00 | 14.00 | 14.00 |" in page.read_text() and "#### Beside the paper" in page.read_text()
    assert capsys.readouterr().out.endswith(f"{page}: {tmp_path}/page/500m_magnitude\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_the_results_are_those_of_the_kept_runs(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        style, "save_figure", lambda figure, paths: [path.touch() for path in paths]
    )  # seconds a figure
    page = tmp_path / "results.md"
    page.write_text(PAGE.read_text())
    words = [f"experiment={name}", "action=report", f"out={tmp_path}/none", f"page={page}"]
    assert reproduce.main(words) == 0
    assert page.read_text() == PAGE.read_text()
    shown = {path.relative_to(tmp_path / "results") for path in (tmp_path / "results").rglob("*.*")}
    assert shown == {path.relative_to(PAGE.with_suffix("")) for path in (PAGE.with_suffix("") / name).rglob("*.*")}
