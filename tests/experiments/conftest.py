import pytest

from muown_train.experiments.grid import load_experiment


@pytest.fixture(scope="module")
def multiseed():
    """The experiment of three seeds with one learning rate of two series, and its cells."""
    experiment = load_experiment("500m_multiseed").part(points=2, series=["muown_wd0", "muon_wd0"])
    return experiment, experiment.cells()
