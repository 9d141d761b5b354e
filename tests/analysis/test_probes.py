"""Probes in a run: what they write, and that training does not notice."""

import json
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from muown_train.analysis.context import Magnitudes
from muown_train.analysis.probes import Spectral, measure_effective_rank, select_gradient
from muown_train.analysis.spectral import compute_normalised_effective_rank, compute_singular_values, derive_factors
from muown_train.config.compose import compose_config
from muown_train.config.run_name import default_run_name
from muown_train.optim.core.weight_norm import weight_to_direction
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import built, find_probes, losses, metrics, slow_but, trained

ALL = "probes=[spectral,effective_rank,attention_logits,copying]"
SOME = (
    *(ALL, "probe_every=4", "probes.effective_rank.gradients=2", "probes.attention_logits.rows=4"),
    *("probes.copying.rows=3", "probes.copying.tokens=150"),
)
COPYING = {f"copying/{key}" for key in ("first_half", "second_half", "early", "late")}


def weights(run):
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def state(run):
    """All that a checkpoint holds, in the order of saving."""
    from muown_train.runs.state import flatten

    return flatten(
        {name: stateful.state_dict() for name, stateful in run.trainer.list_stateful().items() if name != "trainer"}
    )


def probed(folder):
    return {line["step"]: line for line in metrics(folder) if "probe/seconds" in line}


@pytest.mark.parametrize("optim", slow_but(["muown"], ["muown", "muon", "soap"]))
def test_training_is_bit_equal_with_and_without(corpus, tmp_path, optim):
    plain = trained(corpus, tmp_path / "plain", f"optim={optim}")
    watched = trained(corpus, tmp_path / "watched", f"optim={optim}", *SOME)
    assert losses(plain.folder) == losses(watched.folder)
    one, other = state(plain), state(watched)
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key], key
    assert [line.get("data/hash") for line in metrics(plain.folder)] == [
        line.get("data/hash") for line in metrics(watched.folder)
    ]
    assert [line.get("valid/loss") for line in metrics(plain.folder)] == [
        line.get("valid/loss") for line in metrics(watched.folder)
    ]


def test_lines_have_the_numbers(corpus, tmp_path):
    run = trained(corpus, tmp_path, *SOME)
    lines = probed(run.folder)
    assert list(lines) == [0, 4, 8, 12]
    last, names = lines[12], [f"blocks.{i}.mlp.out.weight" for i in range(2)]
    for name in (*names, "blocks.1.attention.qkv.weight:2"):
        whole, _, block = name.partition(":")
        W = dict(run.model.named_parameters())[whole].detach()
        W = W[64:96] if block else W
        found = derive_factors(compute_singular_values(W)[0], W)
        for key in ("spectral_norm", "max_row_norm", "coherence"):
            assert last[f"spectral/{name}/{key}"] == pytest.approx(float(getattr(found, key)))
        assert 0 < last[f"effective_rank/{name}"] <= 1
    assert {key for key in last if key.startswith("attention_logits/")} == {"attention_logits/0", "attention_logits/1"}
    assert all(line["probe/seconds"] > 0 for line in lines.values())


def test_gradients_are_those_that_training_meets_next(corpus, tmp_path):
    """The mean gradient of the next minibatch is what the next update finds in p.grad."""
    run = built(corpus, tmp_path, *SOME, "grad_clip=null")
    run.resume()
    trainer = run.trainer
    context = find_probes(trainer).probes["effective_rank"].context
    for _ in range(2):
        trainer.train_step()
    (found,) = context.compute_minibatch_gradients(1, context.batch_tokens)
    seen = {}
    parameters = dict(run.model.named_parameters())
    trainer.optimizer.zero_grad = lambda **_: seen.update({name: parameters[name].grad.clone() for name in found})
    trainer.train_step()
    run.close()
    assert len(found) == 8
    for name, gradient in found.items():
        assert torch.allclose(gradient, seen[name], rtol=1e-5, atol=1e-8)


def test_the_effective_rank_is_of_the_gradient_of_R_for_muown(corpus, tmp_path):
    """Against autograd through W = Diag(g / ||R||_row) R."""
    run = built(corpus, tmp_path, *SOME)
    run.resume()
    trainer = run.trainer
    for _ in range(3):
        trainer.train_step()
    context = find_probes(trainer).probes["effective_rank"].context
    magnitudes = context.get_magnitudes()
    (gradients,) = context.compute_minibatch_gradients(1, context.batch_tokens)
    run.close()
    matrix = next(m for m in context.matrices if m.name == "blocks.1.attention.qkv.weight:1")
    W, G = matrix.take_rows(matrix.parameter.detach()), matrix.take_rows(gradients[matrix.parameter_name])
    g, r = (matrix.take_rows(vector) for vector in magnitudes[matrix.parameter_name])
    R = weight_to_direction(W, g, r).requires_grad_()
    (R * (g / torch.linalg.vector_norm(R, dim=1))[:, None]).backward(G)
    assert torch.allclose(select_gradient(matrix, W, G, magnitudes), R.grad, rtol=1e-4, atol=1e-8)
    rank_R, rank_W = (measure_effective_rank(matrix, W, G, given) for given in (magnitudes, {}))
    assert rank_R == pytest.approx(float(compute_normalised_effective_rank(R.grad)), rel=1e-5)
    assert rank_W == pytest.approx(float(compute_normalised_effective_rank(G)), rel=1e-5)
    assert rank_W != rank_R


@pytest.mark.slow
def test_switched_on_and_off_on_resume(corpus, tmp_path):
    through = trained(corpus, tmp_path / "through", *SOME)
    trained(corpus, tmp_path / "parts", "tokens=1024", "schedule=constant")
    trained(corpus, tmp_path / "whole", "schedule=constant")
    run = trained(corpus, tmp_path / "parts", *SOME, "schedule=constant")  # from update 4 on
    assert list(probed(run.folder)) == [4, 8, 12]
    assert losses(run.folder) == losses(tmp_path / "whole" / "run")
    off = built(corpus, tmp_path / "through")
    assert off.resume() and find_probes(off.trainer) is None
    off.close()
    assert list(probed(through.folder)) == [0, 4, 8, 12]


@pytest.mark.slow
def test_killed_between_probes_it_ends_with_the_same_numbers(corpus, tmp_path):
    whole = trained(corpus, tmp_path / "whole", *SOME)
    cut = built(corpus, tmp_path / "cut", *SOME)
    cut.resume()
    with pytest.raises(RuntimeError, match="cut off"):
        step = cut.trainer.train_step

        def fails():
            if cut.trainer.step == 10:
                raise RuntimeError("cut off")
            return step()

        cut.trainer.train_step = fails
        cut.train()
    cut.close()
    run = trained(corpus, tmp_path / "cut", *SOME)
    one, other = probed(whole.folder), probed(run.folder)
    assert list(one) == list(other)
    for step in one:
        for key, value in one[step].items():
            if key.split("/")[0] in ("spectral", "effective_rank", "attention_logits", "copying"):
                assert other[step][key] == value, (step, key)


def train_on_this_rank(world, corpus, out, *overrides):
    run = trained(corpus, out, "micro_batch=1", *overrides, world=world)
    return weights(run)


@pytest.mark.slow
def test_two_ranks_sharded(corpus, tmp_path):
    plain = on_ranks(2, train_on_this_rank, corpus, tmp_path / "plain")
    watched = on_ranks(2, train_on_this_rank, corpus, tmp_path / "watched", *SOME)
    assert all(torch.equal(plain[0][name], watched[rank][name]) for name in plain[0] for rank in (0, 1))
    one = trained(corpus, tmp_path / "one", "micro_batch=1", *SOME)
    found, expected = probed(tmp_path / "watched" / "run"), probed(one.folder)
    assert list(found) == [0, 4, 8, 12]
    for step in found:
        assert found[step].keys() >= {
            key for key in expected[step] if key.split("/")[0] in ("spectral", "effective_rank")
        }
        for key, value in expected[step].items():
            if key.startswith(("spectral/", "effective_rank/", "attention_logits/")) or key in COPYING:
                assert found[step][key] == pytest.approx(value, rel=1e-2), (step, key)
    measured = ("spectral/", "effective_rank/", "copying/")
    first = {key: value for key, value in expected[0].items() if key.startswith(measured)}
    assert first.keys() >= COPYING
    assert {key: found[0][key] for key in first} == pytest.approx(first, rel=1e-5, abs=1e-6)


def test_numbers_that_are_none_are_written(corpus, tmp_path):
    run = built(corpus, tmp_path, *SOME)
    run.resume()
    with torch.no_grad():
        run.model.blocks[0].mlp.out.weight[0, 0] = torch.nan
    numbers = find_probes(run.trainer)()
    run.close()
    assert str(numbers["spectral/blocks.0.mlp.out.weight/spectral_norm"]) == "nan"
    assert numbers["spectral/blocks.0.mlp.gate_up.weight/spectral_norm"] > 0
    assert str(numbers["effective_rank/blocks.0.mlp.gate_up.weight"]) == "nan"
    assert str(numbers["attention_logits/1"]) == "nan" and numbers["attention_logits/0"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_compiled(corpus, tmp_path):
    small = ("compile=true", "model.layers=1", "tokens=1024")
    plain = trained(corpus, tmp_path / "plain", *small)
    watched = trained(corpus, tmp_path / "watched", *small, *SOME, "probe_every=2")
    assert losses(plain.folder) == losses(watched.folder)
    assert list(probed(watched.folder)) == [0, 2, 4]


@pytest.mark.slow  # it imports the compiler, which takes seconds
def test_a_probe_that_tries_the_model_compiles_nothing(corpus, tmp_path):
    counters.clear()
    run = built(corpus, tmp_path, "compile=true", "probes=attention_logits", "probes.attention_logits.rows=4")
    assert "total" not in counters["frames"] and run.model.blocks[0]._compiled_call_impl is not None
    run.close()


def test_power_iteration_and_quantiles(corpus, tmp_path):
    run = built(corpus, tmp_path, "probes=spectral", "probes.spectral.quantiles=3")
    numbers, context = find_probes(run.trainer)(), find_probes(run.trainer).probes["spectral"].context
    run.close()
    name = "blocks.0.mlp.out.weight"
    values = torch.linalg.svdvals(dict(run.model.named_parameters())[name].detach().double())
    expected = torch.quantile(values, torch.tensor([0, 0.5, 1], dtype=values.dtype))
    found = [numbers[f"spectral/{name}/singular_value/{q}"] for q in ("0", "0.5", "1")]
    assert found == pytest.approx(expected.tolist()) and found[0] < found[1] < found[2]
    rough = Spectral(context, iterations=20)()
    assert abs(rough[f"{name}/spectral_norm"] - found[2]) <= max(rough[f"{name}/error"], 0.05 * found[2])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["probes=spectral", "+probes.spectral.every=3"], "probes.spectral.every is no setting of Spectral"),
        (["probes=spectral", "probes.spectral.iterations=0"], "spectral: iterations=0 must be a whole number"),
        (["probes=effective_rank", "probes.effective_rank.tokens=100"], "tokens=100 must be a multiple of seq_len=32"),
        (["probes=attention_logits", "probes.attention_logits.rows=0"], "attention_logits: rows=0 must be"),
        (["probes=copying", "probes.copying.rows=0"], "copying: rows=0 must be a whole number"),
        (["probes=copying", "seq_len=2"], "copying: seq_len=2 must be 4 or more"),
        (["probe_every=0"], "probe_every=0 must be a whole number"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_said_before_training(corpus, tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        built(corpus, tmp_path, *words)
    assert not (tmp_path / "run").exists()


def test_probes_are_no_part_of_a_run_s_name():
    assert default_run_name({"model": "tiny", "optim": "muon"}, [ALL, "probe_every=3"], 0) == "tiny-muon-seed=0"
    assert "probes" not in json.dumps(sorted(compose_config([]).keys()))


@pytest.mark.parametrize("iterations", [None, 2])
def test_the_share_of_negative_magnitudes(corpus, tmp_path, iterations):
    run = built(corpus, tmp_path, "probes=spectral", f"probes.spectral.iterations={iterations or 'null'}")
    run.resume()
    name = "blocks.1.attention.qkv.weight"
    p = dict(run.model.named_parameters())[name]
    muown = run.trainer.optimizer.optimizers[0]
    muown.state[p] = muown.create_state(p.detach(), muown.param_groups[0])
    muown.state[p]["magnitude"][: 32 + 8] *= -1  # all of q, a quarter of k
    numbers = find_probes(run.trainer)()
    run.close()
    assert [numbers[f"spectral/{name}:{block}/negative"] for block in range(3)] == [1, 0.25, 0]
    assert numbers["spectral/blocks.0.mlp.out.weight/negative"] == 0


def test_only_what_is_reparameterized_has_magnitudes(corpus, tmp_path):
    run = built(corpus, tmp_path, "probes=spectral", "optim=muon")
    numbers = find_probes(run.trainer)()
    run.close()
    assert numbers and not any(key.endswith("/negative") for key in numbers)


def test_magnitudes_of_a_fused_parameter_divide_with_its_rows(corpus, tmp_path):
    run = built(corpus, tmp_path, *SOME)
    context = find_probes(run.trainer).probes["spectral"].context
    run.close()
    found = context.get_magnitudes()["blocks.0.attention.qkv.weight"]
    assert isinstance(found, Magnitudes) and found.g.shape == (96,)
    blocks = [m.take_rows(found.g) for m in context.matrices if m.parameter_name == "blocks.0.attention.qkv.weight"]
    assert torch.equal(torch.cat(blocks), found.g)
