"""The noise equals that of numpy and autograd, also when it is interrupted, continued, or shared by ranks."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from muown_train.analysis.checkpoints import make_context
from muown_train.analysis.gradient_noise import GradientNoise, compute_nuclear_norms, compute_quartiles, discard_scratch
from muown_train.optim.core.weight_norm import weight_to_direction
from muown_train.runs.saved_run import open_run
from muown_train.runtime.distributed import World
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import HERE, trained

BATCHES = 5


def never(what, done, of):
    raise AssertionError(f"{what} is measured again")


def silent(what, done, of):
    pass


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("noise")
    return {optim: trained(corpus, out / optim, f"optim={optim}").folder for optim in ("muown", "muon")}


def noise(folder: Path, scratch: Path, world: World = HERE, save_every: int = 2) -> GradientNoise:
    saved = open_run(folder)
    return GradientNoise(make_context(saved, world), BATCHES, scratch, "a test", save_every)


@pytest.fixture(scope="module")
def found(runs, tmp_path_factory):
    return {
        optim: noise(folder, tmp_path_factory.mktemp("state") / optim).measure(silent) for optim, folder in runs.items()
    }


def by_hand(folder, name, block):
    """sigma_W, sigma_R and sigma_g of rows `block` of a parameter, from gradients of its own, norms by numpy."""
    saved = open_run(folder)
    context = make_context(saved, HERE)
    model, W = context.model, dict(context.model.named_parameters())[name]
    count = context.batch_tokens // context.seq_len
    magnitudes = context.get_magnitudes().get(name)
    of = {"W": [], "R": [], "g": []}
    for i in range(BATCHES):
        rows = torch.from_numpy(context.get_rows().take(range(i * count, (i + 1) * count))).long()
        model.zero_grad()
        (model(rows[:, :-1], rows[:, 1:]) / context.batch_tokens).backward()
        of["W"].append(W.grad[block].double().numpy().copy())
        if magnitudes:
            g, r = (vector.double()[block] for vector in magnitudes)
            R = weight_to_direction(W.detach().double()[block], g, r).requires_grad_()
            g.requires_grad_()
            composed = R * (g / torch.linalg.vector_norm(R, dim=1))[:, None]
            composed.backward(W.grad[block].double())
            of["R"].append(R.grad.numpy())
            of["g"].append(g.grad.numpy())
    found = {}
    for key, gradients in of.items():
        mean = np.mean(gradients, axis=0) if gradients else None
        norms = [np.linalg.norm(mean - G, "nuc") if G.ndim == 2 else np.abs(mean - G).sum() for G in gradients]
        found[key] = math.sqrt(np.mean(np.square(norms))) if norms else None
    return found


@pytest.mark.parametrize(
    ("name", "parameter", "block", "shape"),
    [
        ("blocks.0.mlp.out.weight", "blocks.0.mlp.out.weight", slice(None), (32, 256)),
        ("blocks.1.attention.qkv.weight:1", "blocks.1.attention.qkv.weight", slice(32, 64), (32, 32)),
        ("blocks.1.mlp.gate_up.weight", "blocks.1.mlp.gate_up.weight", slice(None), (512, 32)),
    ],
)
def test_it_is_what_the_definition_says(runs, found, name, parameter, block, shape):
    expected, numbers = by_hand(runs["muown"], parameter, block), found["muown"]
    for key in ("W", "R", "g"):
        assert numbers[f"{name}/sigma_{key}"] == pytest.approx(expected[key], rel=1e-4)
    m, n = shape
    muon = math.sqrt(min(m, n)) * expected["W"]
    muown = math.sqrt(m) * expected["g"] + math.sqrt(min(m, n)) * expected["R"]
    assert numbers[f"{name}/muon"] == pytest.approx(muon, rel=1e-4)
    assert numbers[f"{name}/muown"] == pytest.approx(muown, rel=1e-4)
    assert numbers[f"{name}/muon/muown"] == pytest.approx(muon / muown, rel=1e-4)


def test_of_muon_there_is_its_own_term_alone(runs, found):
    expected = by_hand(runs["muon"], "blocks.0.mlp.out.weight", slice(None))
    numbers = found["muon"]
    assert numbers["blocks.0.mlp.out.weight/sigma_W"] == pytest.approx(expected["W"], rel=1e-4)
    assert not any("muown" in key or "sigma_R" in key for key in numbers)


def test_quartiles_are_over_matrices(found):
    numbers = found["muown"]
    terms = sorted(
        value for key, value in numbers.items() if key.startswith("blocks.") and key.endswith("weight/muown")
    )
    terms += [value for key, value in numbers.items() if ":" in key and key.partition("/")[2] == "muown"]
    assert len(terms) == 12
    for name, q in (("lower_quartile", 0.25), ("median", 0.5), ("upper_quartile", 0.75)):
        assert numbers[f"{name}/muown"] == pytest.approx(np.quantile(terms, q))
    assert compute_quartiles([{"muon": 1.0}, {"muon": 3.0}])["median/muon"] == 2.0


class Cut(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5, 6])
@pytest.mark.slow
def test_cut_off_and_gone_on_with_it_is_the_same_bit_for_bit(runs, found, tmp_path, after):
    """Cut after a save, of which there are three in each pass."""
    saves = 0

    def cut(what, done, of):
        nonlocal saves
        saves += 1
        if saves == after:
            raise Cut

    with pytest.raises(Cut):
        noise(runs["muown"], tmp_path / "state").measure(cut)
    assert list(tmp_path.iterdir())
    begun = []
    again = noise(runs["muown"], tmp_path / "state").measure(lambda what, done, of: begun.append((what, done)))
    assert len(begun) == 6 - after
    assert again == found["muown"]
    assert noise(runs["muown"], tmp_path / "state").measure(never) == again  # until its result is kept
    discard_scratch(tmp_path / "state")
    assert not list(tmp_path.iterdir())


def test_what_another_measurement_left_does_not_count(runs, found, tmp_path):
    def cut(what, done, of):
        raise Cut

    with pytest.raises(Cut):
        noise(runs["muon"], tmp_path / "state", save_every=3).measure(cut)
    assert noise(runs["muon"], tmp_path / "state").measure(silent) == found["muon"]


def on_this_rank(world, folder, scratch):
    return noise(folder, scratch, world).measure(silent)


def cut_on_this_rank(world, folder, scratch):
    def cut(what, done, of):
        raise Cut

    try:
        noise(folder, scratch, world).measure(cut)
    except Cut:
        return "cut"


@pytest.mark.slow
def test_begun_alone_it_goes_on_on_two_ranks(runs, found, tmp_path):
    """In its first pass, so that both ranks take part in both."""
    assert cut_on_this_rank(HERE, runs["muown"], tmp_path / "state") == "cut"
    first, second = on_ranks(2, on_this_rank, runs["muown"], tmp_path / "state")
    assert first == second
    assert first == pytest.approx(found["muown"], rel=1e-6)


def test_nuclear_norms_of_several_shapes_in_parts(monkeypatch):
    import muown_train.analysis.gradient_noise as module

    monkeypatch.setattr(module, "MAX_BATCH_ELEMENTS", 50)  # two of the larger ones at once
    generator = torch.Generator().manual_seed(0)
    tensors = {i: torch.randn((4, 6) if i % 2 else (3, 3), generator=generator) for i in range(9)}
    tensors[9] = torch.full((4, 6), torch.nan)
    found = compute_nuclear_norms(tensors)
    assert len(found) == 10 and math.isnan(found.pop(9))
    assert found == pytest.approx({i: np.linalg.norm(tensors[i].numpy(), "nuc") for i in found}, rel=1e-5)
