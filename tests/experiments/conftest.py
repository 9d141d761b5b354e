import pytest

from muown_train.experiments.grid import load_grid


@pytest.fixture(scope="module")
def multiseed():
    """The grid of three seeds with two learning rates of two series, and its points."""
    grid = load_grid("500m_multiseed").select(points=2, series=["muown_wd0", "muon_wd0"])
    return grid, grid.expand()
