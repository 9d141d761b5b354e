"""GPT: against transformers' Llama, the paper's parameter counts, causality, shorter inputs."""

import math

import pytest
import torch
from omegaconf import OmegaConf

from muown_train.models.gpt import GPT, compute_mlp_hidden
from tests.helpers.paths import FIXTURES, ROOT

CONFIGS = ROOT / "configs"
# numbers of parameters, which follow from the paper's description of the models
PAPER = {
    "67m": 66_650_624,
    "124m": 123_568_896,
    "308m": 308_184_320,
    "500m": 511_371_520,
    "1b": 1_026_043_648,
    "2_7b": 2_666_437_120,
}


def small(**changes) -> GPT:
    torch.manual_seed(0)
    return GPT(**(dict(vocab_size=97, layers=3, dim=48, heads=4, seq_len=32) | changes))


def as_llama(model: GPT):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.blocks[0].mlp.out.in_features,
        num_hidden_layers=model.layers,
        num_attention_heads=model.blocks[0].attention.heads,
        max_position_embeddings=model.seq_len,
        rms_norm_eps=1e-6,
        rope_theta=500_000.0,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    weights = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    for i, block in enumerate(model.blocks):
        q, k, v = block.attention.qkv.weight.chunk(3)
        gate, up = block.mlp.gate_up.weight.chunk(2)
        weights |= {
            f"model.layers.{i}.{name}.weight": weight
            for name, weight in {
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": block.attention.out.weight,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": block.mlp.out.weight,
                "input_layernorm": block.attention_norm.weight,
                "post_attention_layernorm": block.mlp_norm.weight,
            }.items()
        }
    missing, unexpected = llama.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    llama.tie_weights()
    return llama


@pytest.mark.parametrize("length", [1, 7, 32])
def test_logits_equal_llamas(length):
    model = small()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)  # gains are ones at first and would hide a mistake
        ids = torch.randint(0, 97, (2, length))
        torch.testing.assert_close(model(ids), as_llama(model)(ids).logits, atol=1e-5, rtol=1e-5)


def test_summed_loss_counts_each_target_once():
    model = small()
    ids = torch.randint(0, 97, (2, 9))
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[0, 3:] = -100
    logits = model(inputs).log_softmax(-1)
    expected = -sum(logits[b, t, targets[b, t]] for b in range(2) for t in range(8) if targets[b, t] >= 0)
    torch.testing.assert_close(model(inputs, targets), expected)


COUNTS = PAPER | {"7b": 6_682_218_496}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    OmegaConf.register_new_resolver("not", lambda value: not value, replace=True)
    arguments = OmegaConf.load(CONFIGS / "model" / f"{name}.yaml").model
    arguments = {key: value for key, value in OmegaConf.to_container(arguments, resolve=False).items() if key[0] != "_"}
    with torch.device("meta"):
        model = GPT(**(arguments | {"seq_len": 16}))
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name]


def test_counts_are_those_of_the_paper():
    models = OmegaConf.load(FIXTURES / "paper_targets.yaml").models
    assert {name: model.parameters for name, model in models.items()} == PAPER


@pytest.mark.parametrize(("changes", "std"), [({}, 0.02), ({"init_std": 0.07}, 0.07)], ids=["the paper's", "given"])
def test_initialisation(changes, std):
    model = small(dim=256, layers=8, vocab_size=2000, **changes)
    block = model.blocks[3]
    for weight, expected in (
        (model.embedding.weight, std),
        (block.attention.qkv.weight, std),
        (block.mlp.gate_up.weight, std),
        (block.attention.out.weight, std / 4),
        (block.mlp.out.weight, std / 4),
    ):
        assert weight.std().item() == pytest.approx(expected, rel=0.02)
    assert all((p == 1).all() for p in model.parameters() if p.ndim == 1)


def test_loss_at_initialisation_is_that_of_guessing():
    model = small()
    ids = torch.randint(0, 97, (4, 33))
    assert model(ids[:, :-1], ids[:, 1:]).item() / (4 * 32) == pytest.approx(math.log(97), rel=0.05)


def test_hidden_size():
    assert [compute_mlp_hidden(d) for d in (512, 768, 1280, 1792, 2560)] == [1536, 2048, 3584, 4864, 6912]


@pytest.mark.parametrize(
    "changes, part",
    [(dict(heads=5), "model.heads=5"), (dict(dim=20, heads=4), "even size"), (dict(layers=0), "model.layers=0")],
)
def test_impossible_sizes(changes, part):
    with pytest.raises(ValueError, match=part):
        small(**changes)
