"""Qwen2: against transformers' Llama with biases, the published sizes, roles, a cache of ours, no transformers."""

import math
import sys

import pytest
import torch

from muown_train.cli.main import main
from muown_train.config.instantiate import bind_target
from muown_train.models.attention import KeyValueCache
from muown_train.optim import param_groups, parameter_roles
from tests.helpers.runs import configured

transformers = pytest.importorskip("transformers")
from muown_train.models.qwen2 import Qwen2  # noqa: E402


def small(**changes) -> Qwen2:
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, layers=3, dim=48, heads=6, kv_heads=2, mlp_hidden=80, seq_len=32)
    return Qwen2(**(sizes | changes))


def moved(model: Qwen2) -> Qwen2:
    """Change gains and biases, so that they would show a mistake."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model.eval()


def as_llama(model: Qwen2, rope_base: float, norm_eps: float):
    """Llama of the same weights: with biases everywhere in its attention, of which the output's are zero."""
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=norm_eps,
        rope_theta=rope_base,
        rope_parameters={"rope_type": "default", "rope_theta": rope_base},
        attention_bias=True,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    zeros = {f"model.layers.{i}.self_attn.o_proj.bias": torch.zeros(48) for i in range(3)}
    llama.load_state_dict(model.qwen2.state_dict() | zeros)
    return llama


@pytest.mark.parametrize("settings", [dict(rope_base=10_000.0, norm_eps=1e-6), dict(rope_base=500.0, norm_eps=0.1)])
@pytest.mark.parametrize("length", [1, 7, 32])
def test_logits_equal_llamas_with_biases(length, settings):
    model = moved(small(**settings))
    ids = torch.randint(97, (2, length))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), as_llama(model, **settings)(ids).logits, atol=1e-5, rtol=1e-5)


def test_summed_loss_and_its_gradient_are_those_of_transformers():
    model = moved(small())
    ids = torch.randint(97, (2, 9))
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[0, 3:] = -100
    theirs = torch.nn.functional.cross_entropy(
        model.qwen2(inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    expected = torch.autograd.grad(theirs, list(model.parameters()))
    loss = model(inputs, targets)
    torch.testing.assert_close(loss, theirs)
    for found, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("autocast, tolerance", [(False, 1e-5), (True, 0.03)])
@pytest.mark.parametrize("parts", [[1] * 20, [7, 1, 12], [20]])
def test_a_cache_gives_the_logits_of_the_whole(parts, autocast, tolerance):
    model = moved(small())
    ids = torch.randint(97, (2, 20))
    cache = KeyValueCache()
    logits = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for part in ids.split(parts, dim=1):
            logits.append(model(part, cache=cache))
            assert cache.length == sum(x.shape[1] for x in logits)
        torch.testing.assert_close(torch.cat(logits, dim=1), model(ids), rtol=tolerance, atol=tolerance)
    assert sorted(cache.layers) == [0, 1, 2] and cache.layers[2][0].shape == (2, 2, 20, 8)


@pytest.mark.slow
def test_compiled_it_makes_no_mask():
    """A mask would keep it from FlashAttention; transformers' own attention makes one with torch before 2.14."""
    masks = []

    def backend(graph, inputs):
        calls = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        masks.extend(node.kwargs.get("attn_mask") for node in calls)
        return graph.forward

    model = moved(small())
    ids = torch.randint(97, (2, 9))
    compiled = torch.compile(model, backend=backend)(ids, ids)
    torch.testing.assert_close(compiled, model(ids, ids))
    assert masks == [None] * 3


def test_sizes_are_the_published_ones():
    config = configured("model=qwen2_0_5b")
    with torch.device("meta"):
        model = bind_target(dict(config.model), "model")()
    assert sum(p.numel() for p in model.parameters()) == 494_032_768  # huggingface.co/Qwen/Qwen2-0.5B
    assert model.qwen2.config.rope_parameters["rope_theta"] == 10_000 and model.qwen2.config.tie_word_embeddings
    assert round(config.tokens / config.batch_tokens) == 18_119  # tests/fixtures/paper_targets.yaml
    assert (config.data.name, config.data.tokenizer) == ("sample-10BT", "Qwen/Qwen2-0.5B")


def test_roles_queries_keys_and_values_are_matrices_of_their_own_and_biases_vectors():
    model = small()
    roles = parameter_roles(model)
    assert all(role.blocks is None for role in roles.values())
    of_role = {kind: {name for name, role in roles.items() if role.role == kind} for kind in ("matrix", "vector")}
    assert set(roles) - of_role["matrix"] - of_role["vector"] == {"qwen2.model.embed_tokens.weight"}
    assert roles["qwen2.model.embed_tokens.weight"].role == "embedding"
    assert of_role["vector"] == {name for name, p in model.named_parameters() if p.ndim == 1}
    assert sum(name.endswith("bias") for name in of_role["vector"]) == 3 * 3
    (group,) = param_groups(model)[0]
    shapes = [tuple(p.shape) for _, p in group["params"]][:7]
    assert shapes == [(48, 48), (16, 48), (16, 48), (48, 48), (80, 48), (80, 48), (48, 80)]


def test_initialisation():
    model = small(dim=192, mlp_hidden=400, vocab_size=2000, init_std=0.03)
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32
        if p.ndim == 2:
            assert p.std().item() == pytest.approx(0.03, rel=0.03), name
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name


def test_loss_at_initialisation_is_that_of_guessing():
    model = small(vocab_size=151_936, dim=128, heads=2, layers=2)
    ids = torch.randint(151_936, (4, 33))
    assert model(ids[:, :-1], ids[:, 1:]).item() / (4 * 32) == pytest.approx(math.log(151_936), rel=0.05)


def test_flops_are_six_per_weight_that_multiplies_and_those_of_attention():
    per_layer = 2 * 48 * 48 + 2 * 16 * 48 + 3 * 48 * 80
    assert small().flops_per_token() == 6 * (97 * 48 + 3 * per_layer) + 12 * 3 * 48 * 32


@pytest.mark.parametrize(
    "changes, part",
    [
        (dict(heads=5), "model.heads=5 heads of even size"),
        (dict(heads=16), "even size"),
        (dict(kv_heads=4), "model.kv_heads=4 must divide model.heads=6"),
        (dict(kv_heads=0), "model.kv_heads=0 must be"),
        (dict(mlp_hidden=1.5), "model.mlp_hidden=1.5 must be"),
    ],
)
def test_impossible_sizes(changes, part):
    with pytest.raises(ValueError, match=part):
        small(**changes)


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "muown_train.models.qwen2")
    monkeypatch.setattr(sys, "argv", ["muown_train", "model=qwen2_0_5b"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: model._target_=muown_train.models.qwen2.Qwen2 cannot be imported: the library")
    assert said.endswith("[train]'` installs it\n") and said.count("\n") == 1
