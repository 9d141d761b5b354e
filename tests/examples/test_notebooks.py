"""The notebooks in examples/ run from start to end, and keep small outputs, of the same kinds as those of a new run."""

import itertools
import json

import pytest

from tests.helpers.commands import put_programs_on_path
from tests.helpers.paths import ROOT

every_notebook = pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem
)


def list_outputs(cells):
    """Return the kinds of content that each cell of code shows, in order; a text may come in several pieces."""
    outputs = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
    kinds = [
        [kind for output in own for kind in sorted(output.get("data", [output["output_type"]]))] for own in outputs
    ]
    return [[kind for kind, _ in itertools.groupby(own)] for own in kinds]


@pytest.mark.slow
@pytest.mark.timeout(900)
@every_notebook
def test_it_runs_and_shows_what_it_keeps(path, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    put_programs_on_path(monkeypatch, tmp_path / "bin")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    kept = list_outputs(notebook.cells)
    (training,) = (cell for cell in notebook.cells if " tokens=100000 " in cell.source)
    training.source = training.source.replace(" tokens=100000 ", " tokens=20480 ")
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    assert list_outputs(notebook.cells) == kept


@every_notebook
def test_what_it_keeps_is_one_small_figure(path):
    kinds = [kind for cell in list_outputs(json.loads(path.read_text())["cells"]) for kind in cell]
    assert kinds.count("image/png") == 1 and "error" not in kinds
    assert path.stat().st_size < 100_000
