"""The speedrun's GPT: against another way of computing it, its record's numbers, roles, causality, a cache."""

import math

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from muown_train.config.instantiate import bind_target
from muown_train.models.speedrun import Speedrun
from muown_train.optim import parameter_roles
from muown_train.training.optimizers import build_optimizer
from tests.helpers.runs import configured


def small(**changes) -> Speedrun:
    torch.manual_seed(0)
    return Speedrun(**(dict(vocab_size=97, layers=3, dim=48, head_dim=16, seq_len=32) | changes)).eval()


def by_hand(model: Speedrun, ids: Tensor, head_dim: int, base: float) -> Tensor:
    """Logits (T, V) of one row, position by position and head by head; rotations are products of complex numbers."""

    def unit(x: Tensor) -> Tensor:
        return x * (x.pow(2).mean() + 1e-6).rsqrt()

    def turned(x: Tensor, t: int) -> Tensor:  # halves of a head are real and imaginary parts
        half = head_dim // 2
        angles = torch.tensor([t * base ** (-i / half) for i in range(half)], dtype=torch.float64)
        z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((z.real, z.imag))

    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    xs = [weights["embedding.weight"][i] for i in ids.tolist()]
    D = model.dim
    for layer in range(model.layers):
        qkv, out, up, down = (
            weights[f"blocks.{layer}.{name}.weight"] for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.out")
        )
        projected = [qkv @ unit(x) for x in xs]
        heads = []
        for start in range(0, D, head_dim):
            here = slice(start, start + head_dim)
            qs = [turned(p[:D][here], t) for t, p in enumerate(projected)]
            ks = [turned(p[D : 2 * D][here], t) for t, p in enumerate(projected)]
            vs = torch.stack([p[2 * D :][here] for p in projected])
            rows = []
            for t, q in enumerate(qs):
                scores = torch.stack([q @ k for k in ks[: t + 1]]) / math.sqrt(head_dim)
                rows.append(torch.softmax(scores, 0) @ vs[: t + 1])
            heads.append(torch.stack(rows))
        mixed = torch.cat(heads, dim=1)  # (T, D)
        xs = [x + (out @ y) / math.sqrt(2 * model.layers) for x, y in zip(xs, mixed, strict=True)]
        hidden = [up @ unit(x) for x in xs]
        gelu = [h * 0.5 * (1 + torch.erf(h / math.sqrt(2))) for h in hidden]
        xs = [x + down @ h for x, h in zip(xs, gelu, strict=True)]
    return torch.stack([weights["embedding.weight"] @ unit(x) for x in xs])


@pytest.mark.parametrize("head_dim, base", [(16, 10_000.0), (48, 50.0)])
def test_logits_equal_those_by_hand(head_dim, base):
    model = small(head_dim=head_dim, rope_base=base)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)  # attention is then far from even
    ids = torch.randint(97, (11,))
    with torch.no_grad():
        found = model(ids[None])[0].double()
    torch.testing.assert_close(found, by_hand(model, ids, head_dim, base), atol=1e-4, rtol=1e-4)


def test_summed_loss_counts_each_target_once():
    model = small()
    ids = torch.randint(97, (2, 9))
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[0, 3:] = -100
    logits = model(inputs).log_softmax(-1)
    expected = -sum(logits[b, t, targets[b, t]] for b in range(2) for t in range(8) if targets[b, t] >= 0)
    torch.testing.assert_close(model(inputs, targets), expected)


@pytest.mark.parametrize("dim", [384, 768, 1536])
def test_parameters_of_every_width(dim):
    config = configured("model=speedrun", f"model.dim={dim}")
    with torch.device("meta"):
        model = bind_target(dict(config.model), "model")()
    assert sum(p.numel() for p in model.parameters()) == 50_257 * dim + 12 * 12 * dim**2  # no gains, no biases
    assert model.blocks[0].attention.heads == dim // 64
    assert model.flops_per_token() == 6 * (50_257 * dim + 144 * dim**2) + 12 * 12 * dim * 1024


def test_roles():
    roles = parameter_roles(small())
    assert {name: role.role for name, role in roles.items() if role.role != "matrix"} == {
        "embedding.weight": "embedding"
    }
    assert {name.partition(".")[2].partition(".")[2]: role.blocks for name, role in roles.items() if role.blocks} == {
        "attention.qkv.weight": (48, 48, 48)
    }


def test_initialisation_is_that_of_linear_layers():
    model = small(dim=256, head_dim=64, vocab_size=2000)
    for name, p in model.named_parameters():
        bound = 1 / math.sqrt(p.shape[1])
        assert p.abs().max() <= bound and p.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02), name


def test_loss_at_initialisation_is_nearly_that_of_guessing():
    # logits have the variance 1/3: of a normalised x and weights uniform within 1 / sqrt(D)
    model = small(vocab_size=50_257, dim=128, head_dim=64)
    ids = torch.randint(50_257, (8, 33))
    loss = model(ids[:, :-1], ids[:, 1:]).item() / (8 * 32)
    assert loss == pytest.approx(math.log(50_257) + 1 / 6, rel=0.02)


@pytest.mark.parametrize(
    "changes, part",
    [
        (dict(dim=40), "model.dim=40 must be a multiple of model.head_dim=16"),
        (dict(dim=45, head_dim=15), "must be even"),
        (dict(layers=0), "model.layers=0 must be"),
        (dict(head_dim=True), "model.head_dim=True must be"),
    ],
)
def test_impossible_sizes(changes, part):
    with pytest.raises(ValueError, match=part):
        small(**changes)


@pytest.mark.parametrize("optim, scale", [("muon", 0.1), ("muown", 0.2)])
def test_an_experiment_has_the_records_settings(optim, scale):
    overrides = [f"experiment=speedrun_{optim}", "optim.lr=0.01", "model.dim=128", "model.layers=1", "data.path=x"]
    config = configured(*overrides)
    assert round(config.tokens / config.batch_tokens) == 6200
    assert (config.seq_len, config.valid_tokens, config.grad_clip) == (1024, 10_485_760, None)
    assert config.data.tokenizer == "gpt2"
    schedule = bind_target(dict(config.schedule), "schedule", ["step", "steps"])
    assert [schedule(step, 6200) for step in (0, 4400)] == pytest.approx([1, 1])
    assert schedule(4401, 6200) == pytest.approx(1799 / 1800) and schedule(6199, 6200) == pytest.approx(1 / 1800)

    config.model.vocab_size = 100
    resolved = OmegaConf.to_container(config, resolve=True)
    optimizer = build_optimizer(resolved["optim"], bind_target(resolved["model"], "model")())
    matrices, rest = optimizer.optimizers
    assert [(g["lr"], tuple(g["betas"]), g["weight_decay"]) for g in rest.param_groups] == [(0.01, (0.9, 0.95), 0.0)]
    for group in matrices.param_groups:
        assert group["lr"] == 0.01 and (group["weight_decay"], group["momentum"], group["nesterov"]) == (0, 0.95, True)
        longest = [128, 128, 128] if group["blocks"] else [128, 512, 512]
        assert matrices.get_lr_scales(group) == pytest.approx([scale * math.sqrt(side) for side in longest])
