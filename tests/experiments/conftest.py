import pytest

from muown_train.experiments.grid import load_grid


@pytest.fixture(scope="module")
def multiseed():
    """The experiment of three seeds with one learning rate of two series, and its cells."""
    grid = load_grid("500m_multiseed").select(points=2, series=["muown_wd0", "muon_wd0"])
    return grid, grid.expand()
