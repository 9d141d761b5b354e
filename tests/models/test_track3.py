"""The model of Track 3: against an independent one, its sizes and initialisation, and its experiments trained."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from muown_train.config.compose import load_config
from muown_train.models.language_model import build_model
from muown_train.models.track3 import Track3
from muown_train.optim import parameter_roles
from muown_train.runs.manifest import describe_groups
from muown_train.runs.saved_run import open_run
from muown_train.runtime.distributed import World
from muown_train.runtime.replica_check import find_divergent_ranks
from muown_train.training.optimizers import build_optimizer
from muown_train.training.schedule import build_schedule
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import built, losses, metrics, trained

EXPERIMENTS = ("track3_muon", "track3_muown")
TINY = ("model.vocab_size=4096", "compile=false", "eval_every=25", "save_every=25", "log_every=25")


def small(noise: float = 0.0, **changes) -> Track3:
    torch.manual_seed(0)
    model = Track3(**(dict(vocab_size=97, layers=3, dim=48, heads=3, seq_len=32) | changes))
    with torch.no_grad():
        for p in model.parameters():  # zeros and ones would hide a mistake
            p.add_(torch.randn_like(p) * noise)
    return model


def reference(model: Track3, ids: torch.Tensor) -> torch.Tensor:
    """The logits in float64, a position and a head at a time, rotations as complex numbers."""
    w = {name: p.detach().double() for name, p in model.named_parameters()}

    def norm(x, gain=1.0):
        return x / (x.pow(2).mean(-1, keepdim=True) + 2**-23).sqrt() * gain

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    T, d = len(ids), model.dim // model.blocks[0].attention.heads
    turning = torch.tensor([1024 ** -(i / (d // 4 - 1)) for i in range(d // 4)] + [0.0] * (d // 4)).double()
    x = norm(w["embedding.weight"][ids], w["embedding_norm.weight"])
    for i in range(model.layers):
        h = norm(x, w[f"blocks.{i}.attention_norm.weight"])
        q, k, v = (linear(h, f"blocks.{i}.attention.{part}") for part in "qkv")
        heads = []
        for start in range(0, model.dim, d):
            turned = []
            for y in (q, k):
                y = norm(y[:, start : start + d])
                z = torch.complex(y[:, : d // 2], y[:, d // 2 :])
                turned.append(z * torch.polar(torch.ones(T, d // 2).double(), -torch.outer(torch.arange(T), turning)))
            rows = []
            for t in range(T):
                scores = torch.stack([(turned[0][t] * turned[1][s].conj()).real.sum() for s in range(t + 1)])
                rows.append((0.12 * scores).softmax(0) @ v[: t + 1, start : start + d])
            heads.append(torch.stack(rows))
        x = x + linear(torch.cat(heads, 1), f"blocks.{i}.attention.out")
        h = norm(x, w[f"blocks.{i}.mlp_norm.weight"])
        x = x + linear(linear(h, f"blocks.{i}.mlp.up").clamp(min=0) ** 2, f"blocks.{i}.mlp.out")
    z = linear(norm(x, w["norm.weight"]), "head")
    return 15 * z / (z**2 + 225).sqrt()


def test_logits_and_loss_equal_an_independent_models():
    model = small(noise=0.3)
    ids = torch.randint(97, (2, 17))
    expected = torch.stack([reference(model, row) for row in ids])
    assert expected.abs().max() > 5  # so that the cap matters
    torch.testing.assert_close(model(ids).double(), expected, atol=1e-4, rtol=1e-4)
    targets = torch.randint(97, (2, 17))
    targets[0, :4] = -100
    loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model(ids, targets).double(), loss, atol=1e-3, rtol=1e-5)


def test_the_size_of_the_benchmark():
    with torch.device("meta"):
        model = Track3()
    # 12 blocks of q, k, v, out, up, down with biases and two norms; two norms more, the embedding, the head
    block = 4 * (768 * 768 + 768) + (768 * 3072 + 3072) + (3072 * 768 + 768) + 2 * 768
    assert sum(p.numel() for p in model.parameters()) == 12 * block + 2 * 768 + 2 * 50304 * 768 + 50304 == 162_354_816
    assert model.blocks[0].attention.heads == 768 // 128
    matrices = 12 * 12 * 768**2 + 50304 * 768
    assert model.flops_per_token() == 6 * matrices + 12 * 12 * 768 * 1024


def test_initialisation():
    model = small(vocab_size=2000, dim=128, heads=1)
    block = model.blocks[2]
    assert model.embedding.weight.dtype == torch.bfloat16
    assert {p.dtype for name, p in model.named_parameters() if "embedding.weight" not in name} == {torch.float32}
    assert model.embedding.weight.float().std().item() == pytest.approx(1, rel=0.01)
    for layer in (block.attention.q, block.attention.k, block.attention.v, block.mlp.up):
        assert layer.weight.std().item() == pytest.approx(math.sqrt(0.33 / 128), rel=0.03)
    for layer in (block.attention.out, block.mlp.out, model.head):
        assert not layer.weight.any()
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert all((p == 1).all() for name, p in model.named_parameters() if name.endswith("norm.weight"))


@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_at_initialisation_is_exactly_that_of_guessing(autocast):
    model, ids = small(), torch.randint(97, (4, 33))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert not model(ids[:, :-1]).any()
        loss = model(ids[:, :-1], ids[:, 1:])
    assert loss.dtype == torch.float32
    assert loss.item() / (4 * 32) == pytest.approx(math.log(97), rel=1e-6)


def test_roles_and_what_tells_the_matrices_apart():
    roles = {name: role.role for name, role in parameter_roles(small()).items()}
    assert roles["embedding.weight"] == "embedding" and roles["head.weight"] == "head"
    assert sum(role == "matrix" for role in roles.values()) == 3 * 6
    assert all(roles[name] == "vector" for name in roles if name.endswith(("bias", "norm.weight")))
    assert set(roles.values()) == {"embedding", "head", "matrix", "vector"}


def test_under_autocast_it_is_close_and_the_stream_is_bfloat16():
    model, ids = small(noise=0.1), torch.randint(97, (2, 32))
    exact = model(ids)
    seen = []
    model.blocks[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids)
        loss = model(ids, ids)
    assert seen == [torch.bfloat16] * 2
    assert (logits - exact).norm() < 0.05 * exact.norm()
    loss.backward()
    assert model.embedding.weight.grad.dtype == torch.bfloat16 and model.embedding.weight.grad.any()


@pytest.mark.parametrize("changes, part", [(dict(heads=5), "model.heads=5"), (dict(layers=0), "model.layers=0")])
def test_impossible_sizes(changes, part):
    with pytest.raises(ValueError, match=part):
        small(**changes)


def made(experiment: str, *overrides: str):
    """Return what an experiment's file makes, with the benchmark's depth but a small width."""
    sizes = ("model.dim=64", "model.heads=1", "model.vocab_size=64")
    config = load_config([f"experiment={experiment}", *sizes, *overrides])
    model = build_model(config.model, config.seq_len)
    schedule = build_schedule(config, sum(p.numel() for p in model.parameters()))
    return config, model, build_optimizer(config.optim, model), schedule


def test_the_muon_experiment_is_the_issues():
    top, model, optimizer, (steps, schedule) = made("track3_muon")
    assert (steps, top.batch_tokens, top.seq_len, top.grad_clip, model.layers) == (3250, 524288, 1024, None, 12)
    assert top.valid_tokens == 10_485_760
    matrix, *rest = describe_groups(optimizer)
    assert (matrix["optimizer"], matrix["lr"], matrix["weight_decay"], matrix["scales"]) == (
        "Muon",
        0.025,
        0.05,
        [1, 2],
    )
    group = optimizer.param_groups[0]
    assert (group["ns_coefficients"], group["ns_steps"]) == ((2, -1.5, 0.5), 12)
    assert (group["momentum"], group["nesterov"]) == (0.95, True)
    assert {group["role"]: group["lr"] for group in rest} == {"embedding": 0.7, "head": 0.004, "vector": 0.015}
    for group in optimizer.optimizers[1].param_groups:
        assert (list(group["betas"]), group["eps"], group["weight_decay"]) == ([0.8, 0.95], 1e-10 / 524288, 0.001)
    assert schedule(0, steps) == schedule(974, steps) == 1
    assert schedule(3249, steps) == pytest.approx(1 / 3250 / 0.7)


def test_the_muown_experiment_is_the_issues():
    _, model, optimizer, (steps, schedule) = made("track3_muown")
    assert steps == 3075
    matrices, projections = optimizer.optimizers[0].param_groups
    assert sorted(projections["param_names"]) == sorted(f"blocks.{i}.mlp.out.weight" for i in range(12))
    for group in (matrices, projections):
        assert (group["lr"], group["direction_scale"], group["ns_steps"]) == (0.00325, 0.2, 12)
        assert (group["orthogonalizer"], group["weight_decay"]) == ("polar_express", 0)
        assert (group["momentum"], group["nesterov"], list(group["betas"])) == (0.95, True, [0.9, 0.95])
        assert group["zero_rows"] == pytest.approx(math.sqrt(0.33), rel=1e-15)
    assert matrices["row_norm_schedule"] == (2.496, 3165, 1.2)
    assert projections["row_norm_schedule"] == (pytest.approx(3.33 * 2.496), 3165, 1.2)
    rest = optimizer.optimizers[1].param_groups
    assert {group["role"]: group["lr"] for group in rest} == {"embedding": 0.6, "head": 0.009375, "vector": 0.03}
    for group in rest:
        assert (list(group["betas"]), group["eps"], group["weight_decay"]) == ([0.8, 0.95], 1e-10 / 524288, 0)
    assert schedule(949, steps) == 1
    assert schedule(3074, steps) == pytest.approx(((1 - 3074 / 3165) / 0.7) ** 0.9)
    assert model.embedding.weight.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_50_updates_learn_and_an_interrupted_run_ends_the_same(experiment, corpus, tmp_path):
    run = (f"experiment={experiment}", *TINY, "tokens=12800")
    whole = trained(corpus, tmp_path / "whole", *run)
    part = built(corpus, tmp_path / "part", *run)
    assert not part.resume()
    fit_step, stop = part.trainer.train_step, part.trainer.stop

    def step_and_stop():
        if part.trainer.step == 29:
            stop.request("a test")
        return fit_step()

    part.trainer.train_step = step_and_stop
    assert part.train().state == "stopped"
    part.close()
    assert part.trainer.step == 30
    again = trained(corpus, tmp_path / "part", *run)
    assert losses(again.folder) == losses(whole.folder) and len(losses(whole.folder)) == 50
    for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert p.dtype == q.dtype and torch.equal(p, q)
    first, last = (line["valid/loss"] for line in (metrics(whole.folder)[0], metrics(whole.folder)[-1]))
    assert first == pytest.approx(math.log(4096), abs=1e-4) and last < first - 1
    assert open_run(whole.folder).load_weights()["embedding.weight"].dtype == torch.bfloat16
    state = whole.trainer.optimizer.state[whole.model.embedding.weight]
    assert state["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("optim", ["adamw", "lion", "soap", "muon", "normuon"])
def test_other_optimizers_take_the_bfloat16_embedding_too_and_gradients_can_be_clipped(optim, corpus, tmp_path):
    run = trained(corpus, tmp_path, "model=track3", f"optim={optim}", *TINY, "tokens=1024", "grad_clip=0.1")
    before = small(vocab_size=4096, layers=2, dim=32, heads=2).embedding.weight
    after = run.model.embedding.weight
    assert after.dtype == torch.bfloat16 and after.isfinite().all() and not torch.equal(after, before)
    assert metrics(run.folder)[-1]["valid/loss"] < math.log(4096)


def test_a_plain_muown_says_what_it_needs_for_the_rows_of_zeros(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"blocks.0.attention.out.weight'?: 32 of 32 rows are zero.*zero_rows=0.57"):
        built(corpus, tmp_path, "model=track3", "optim=muown", *TINY)


def test_row_norms_follow_the_schedule_of_their_pattern(corpus, tmp_path):
    short = "row_norm_schedule:[{},10,1.2]"
    patterns = f"optim.patterns={{blocks.*.mlp.out.weight:{{{short.format(8.0)}}}}}"
    overrides = ("optim.row_norm_schedule=[2.5,10,1.2]", patterns, "schedule.horizon=12")
    run = trained(corpus, tmp_path, "experiment=track3_muown", *TINY, *overrides)
    state = run.trainer.optimizer.state
    for name, p in run.model.named_parameters():
        if parameter_roles(run.model)[name].role == "matrix":
            target = 8.0 if name.endswith("mlp.out.weight") else 2.5
            torch.testing.assert_close(state[p]["row_norm"], torch.full_like(state[p]["row_norm"], target))


def train_here(world: World, corpus: Path, out: Path, shard: str):
    overrides = ("experiment=track3_muown", *TINY, "micro_batch=1", f"shard_optimizer={shard}", "replica_check_every=4")
    run = trained(corpus, out, *overrides, world=world)
    apart = find_divergent_ranks(run.model.named_parameters(), world)
    return apart, {name: p.detach().clone() for name, p in run.model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["node", "none"])
def test_two_ranks_train_the_bfloat16_embedding_alike(shard, corpus, tmp_path):
    built(corpus, tmp_path / "data", "experiment=track3_muown", *TINY).close()  # the tokenizer, once
    (apart, weights), (_, others) = on_ranks(2, train_here, corpus, tmp_path / "two", shard)
    assert apart is None and all(torch.equal(weights[name], others[name]) for name in weights)
    assert weights["embedding.weight"].dtype == torch.bfloat16
    one = trained(corpus, tmp_path / "one", "experiment=track3_muown", *TINY, "micro_batch=1")
    assert losses(tmp_path / "two" / "run") == pytest.approx(losses(one.folder), abs=2e-2)
    norms = [
        [line["train/grad_norm"] for line in metrics(folder)[1:]] for folder in (one.folder, tmp_path / "two" / "run")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=0.1)
    saved = open_run(tmp_path / "two" / "run").load_weights()
    assert all(torch.equal(saved[name], weights[name]) for name in weights)
