"""Experiments beside the paper's numbers train what the paper trained, with a fair series beside it."""

import functools

import pytest
import torch

from muown_train.cli.commands import reproduce
from muown_train.experiments.grid import load_grid
from muown_train.experiments.progress import same_settings
from muown_train.models.language_model import build_model
from muown_train.runs.record import get_defining_settings
from muown_train.training.optimizers import build_optimizer
from tests.helpers.runs import slow_but

# of the experiments that the paper has numbers for, those with a fused matrix that its baselines took as one
FUSED = (
    *("124m_learning_rate", "124m_weight_decay", "width", "500m_multiseed", "1b", "2_7b", "normuon_124m"),
    *("spectral_500m", "effective_rank_124m", "gradient_noise_124m"),
)
SMALL = ("model.dim=32", "model.heads=2", "model.layers=1", "model.vocab_size=64", "optim.ns_dtype=float64")
STEPS = 12


@functools.cache
def first_configs(name):
    """The configuration of the first run of each series."""
    configs = {}
    for point in load_grid(name).select(points=1, seeds=1).expand():
        configs.setdefault(point.curve.key, point.config)
    return configs


def make_gradients(model):
    generator = torch.Generator().manual_seed(1)
    return [
        {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in model.named_parameters()}
        for _ in range(STEPS)
    ]


def train_series(key):
    """Return a small model's weights after 12 updates in float64 by the optimizer of a series, and those at first."""
    (point,) = load_grid("124m_learning_rate").select(points=1, seeds=1, series=[key]).expand(SMALL)
    torch.manual_seed(0)
    model = build_model(point.config["model"], 16).double()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(point.config["optim"], model)
    for gradients in make_gradients(model):
        for name, p in model.named_parameters():
            p.grad = gradients[name]
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, start, model, point.lr


def train_as_the_authors(start, model, lr, monkeypatch):
    """Return the weights after the same updates by torch's Muon on each matrix as it is stored, and torch's AdamW."""
    weights = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    matrices = [name for name in weights if weights[name].ndim == 2 and "embed" not in name]
    assert any(name.endswith("qkv.weight") and weights[name].shape == (96, 32) for name in matrices)
    others = [weights[name] for name in weights if name not in matrices]
    muon = torch.optim.Muon(
        [weights[name] for name in matrices],
        lr=lr,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
        eps=1e-8,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    # torch's Newton-Schulz iteration casts to bfloat16, whose rounding would hide every difference
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    for gradients in make_gradients(model):
        for name, p in weights.items():
            p.grad = gradients[name].clone()
        muon.step()
        adamw.step()
    return {name: p.detach() for name, p in weights.items()}


def test_muon_of_the_experiment_is_the_authors_to_rounding(monkeypatch):
    ours, start, model, lr = train_series("muon_wd0.1")
    split = train_series("muon_split_wd0.1")[0]
    theirs = train_as_the_authors(start, model, lr, monkeypatch)
    for name, value in theirs.items():
        assert value.dtype == torch.float64 and (value - start[name]).abs().max() > 1e-3
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-12)
        # the fair series differs in the fused matrix, and in nothing else
        assert ((split[name] - value).abs().max() > 1e-4) == name.endswith("qkv.weight"), name


@pytest.mark.parametrize("name", slow_but(["1b", "normuon_124m"], FUSED))
def test_the_papers_setting_and_a_fair_one_beside_it(name):
    configs = first_configs(name)
    split = {key for key in configs if "_split" in key}
    assert split and load_grid(name).paper_exact
    assert not split & set(load_grid(name).paper)  # no number of the paper is theirs
    for key, config in configs.items():
        assert config["data"]["bos"] is True and config["paper_exact"] == (key not in split)
        is_fused = config["optim"]["_target_"].endswith((".Muon", ".NorMuon", ".SOAP")) and key not in split
        assert config["optim"]["row_blocks"] == (not is_fused), key
    for key in split:
        assert key.replace("_split", "") in configs


@pytest.mark.parametrize("name", ["qwen2_0_5b", "500m_step_time", "speedrun_width"])
def test_experiments_without_a_matrix_that_is_fused_in_the_paper(name):
    for config in first_configs(name).values():
        assert config["optim"]["row_blocks"] is True and config["data"]["bos"] is False


def test_normuon_of_the_paper():
    optim = {key: config["optim"] for key, config in first_configs("normuon_124m").items() if "normuon" in key}
    assert {key: (each["adjust_lr_fn"], each["row_blocks"]) for key, each in optim.items()} == {
        "normuon_wd0.1": ("original", False),
        "normuon_split_wd0.1": ("match_rms_adamw", True),
    }


def test_paper_exact_tells_runs_apart_only_where_it_has_an_effect():
    def settings(series, *words):
        (point,) = load_grid("1b").select(points=1, series=[series]).expand(words)
        return get_defining_settings(point.config)

    for series, is_same in (("muown_wd0", True), ("adamw_wd0.1", True), ("muon_wd0", False)):
        assert same_settings(settings(series), settings(series, "paper_exact=false")) == is_same
    assert same_settings(settings("muon_wd0", "paper_exact=false"), settings("muon_split_wd0"))


def test_list_plan_and_report_say_which_series_is_which(capsys, tmp_path):
    words = ["experiment=500m_multiseed", "points=1", "seeds=1", f"out={tmp_path}"]
    lines = [
        "Series with the paper's setting (paper_exact=true): muown_wd0, muon_wd0",
        "Series with the fair setting, q, k and v apart (paper_exact=false): muon_split_wd0",
    ]
    for action in ("list", "plan", "report"):
        assert reproduce.main([*words, "series=muown_wd0,muon_wd0,muon_split_wd0", f"action={action}"]) == 0
        said = capsys.readouterr().out
        assert all(line in said for line in lines), said
    reproduce.main(["experiment=500m_magnitude", f"out={tmp_path}"])
    assert "Series with" not in capsys.readouterr().out


def test_the_list_writes_rates_as_powers_of_two(capsys, tmp_path):
    reproduce.main(["experiment=width", "points=2", "series=muon_67m", f"out={tmp_path}"])
    said = capsys.readouterr().out
    assert "muon_67m-lr=0.03125-seed=0 (2^-5)  " in said and "muon_67m-lr=1.52588e-05-seed=0 (2^-16)  " in said
    reproduce.main(["experiment=1b", "points=1", "series=muon_wd0", f"out={tmp_path}"])
    assert "\nmuon_wd0-lr=0.001-seed=0  missing\n" in capsys.readouterr().out
