import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from muown_train.config.compose import _compose, _compose_with_hydra, compose_config
from muown_train.config.overrides import quote_text


@pytest.mark.parametrize(
    "words",
    [
        ["model=small", "optim=muon", "optim.lr=0.03", "seed=3"],
        ["seed=3", "optim.lr=1e-3", "seed=4", "++model.layers=7", "+model.new=[1,2]"],
        ["experiment=1b", "experiment.seeds=[7]", "model.dim=${seq_len}", "tokens=null"],
        ["optim/rest=lion", "optim.rest.lr=1.5", "data=files", "data.train=[/a/b.txt,c.txt]", "hydra.verbose=true"],
        ["probes=[spectral,effective_rank]", "++probes.new={a: {b: 1}}", "~tracking"],
        ["tracking=[wandb,tensorboard]", "tracking.project=a", "tracking.finish_timeout=5"],
    ],
)
def test_values_are_set_as_hydra_sets_them(words):
    """Those that are set in a copy of a composed configuration, and those that need Hydra."""
    for _ in range(2):  # the first leaves nothing behind for the second
        config, choices = _compose(quote_text(words))
        whole, all_choices = _compose_with_hydra(*quote_text(words))
        assert OmegaConf.to_yaml(config) == OmegaConf.to_yaml(whole) and choices == all_choices
        config.seed = 17


@pytest.mark.parametrize("word", ["optim.l=1", "sed=1", "model=smal", "+seed=1", "seed=1,2", "model.layers.x=1", "a b"])
def test_errors_are_those_of_hydra(word):
    with pytest.raises(HydraException) as error:
        compose_config(["optim=muon", word])
    with pytest.raises(HydraException) as of_hydra:
        _compose_with_hydra("optim=muon", word)
    assert str(error.value) == str(of_hydra.value)
