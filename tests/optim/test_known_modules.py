"""Roles and layouts of models of transformers and PEFT, made from configurations: nothing is downloaded."""

import pytest
import torch
from torch import nn

from muown_train.optim import Combined, Muown, param_groups, parameter_roles
from muown_train.optim.param_groups import ParamRole
from tests.helpers.runs import slow_but

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MATRIX, HEAD = ParamRole("matrix"), ParamRole("head")
EMBEDDING, VECTOR = ParamRole("embedding"), ParamRole("vector")


def make(kind, config, **options):
    return getattr(transformers, kind)(getattr(transformers, config)(**SMALL | options))


def make_gpt2(kind="GPT2LMHeadModel"):
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=61, bos_token_id=0, eos_token_id=0)
    return getattr(transformers, kind)(config)


def make_llama(kind="LlamaForCausalLM", **options):
    return make(kind, "LlamaConfig", **options)


def make_lora(model, **options):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **options))


class Wrapper(nn.Module):  # as DistributedDataParallel
    def __init__(self, module):
        super().__init__()
        self.module = module


def list_names(model, role, **options):
    return [name for name, own in parameter_roles(model, **options).items() if own.role == role]


def list_groups(model, **options):
    """Return for each group its options, and the names in it."""
    matrix, rest = param_groups(model, **options)
    return [
        ({key: value for key, value in group.items() if key != "params"}, [name for name, _ in group["params"]])
        for group in matrix + rest
        if group["params"]
    ]


@pytest.mark.parametrize(
    ("kind", "config", "heads"),
    [
        ("BertForSequenceClassification", "BertConfig", ["classifier.weight"]),
        ("BertForQuestionAnswering", "BertConfig", ["qa_outputs.weight"]),
        ("LlamaForSequenceClassification", "LlamaConfig", ["score.weight"]),
        ("LlamaForTokenClassification", "LlamaConfig", ["score.weight"]),
        (
            "RobertaForSequenceClassification",
            "RobertaConfig",
            ["classifier.dense.weight", "classifier.out_proj.weight"],
        ),
        ("LlamaForCausalLM", "LlamaConfig", ["lm_head.weight"]),
        ("LlamaModel", "LlamaConfig", []),
        ("BertModel", "BertConfig", []),
    ],
)
def test_heads_of_transformers(kind, config, heads):
    model = make(kind, config)
    assert list_names(model, "head") == heads
    for wrapped in (Wrapper(model), torch.compile(model), Wrapper(torch.compile(model))):
        assert parameter_roles(wrapped) == parameter_roles(model)


def test_a_model_beside_others_keeps_its_head():
    both = nn.ModuleDict({"first": make_llama(), "second": make("BertForSequenceClassification", "BertConfig")})
    assert list_names(both, "head") == ["first.lm_head.weight", "second.classifier.weight"]


def test_tied_embeddings_stay_embeddings():
    model = make_llama(tie_word_embeddings=True)
    assert list_names(model, "head") == [] and list_names(model, "embedding") == ["model.embed_tokens.weight"]


def test_a_declared_role_of_what_lies_outside_the_base_model_is_taken():
    model = make("RobertaForSequenceClassification", "RobertaConfig")
    assert list_names(model, "head") == ["classifier.dense.weight", "classifier.out_proj.weight"]
    model.classifier.dense.role = "matrix"
    assert list_names(model, "head") == ["classifier.out_proj.weight"]


def test_peft_wraps_the_output_layer():
    model = make_lora(make_llama(), target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    path = "base_model.model.lm_head"
    assert list_names(model, "head") == [f"{path}.original_module.weight", f"{path}.modules_to_save.default.weight"]
    _, rest = param_groups(model)
    names = {group["role"]: [name for name, _ in group["params"]] for group in rest}
    assert names["head"] == [f"{path}.modules_to_save.default.weight"]
    assert names["embedding"] == ["base_model.model.model.embed_tokens.modules_to_save.default.weight"]


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper, torch.compile])
def test_peft_wraps_a_classification_head(wrap):
    model = make_llama("LlamaForSequenceClassification")
    model = make_lora(model, target_modules=["q_proj"], task_type="SEQ_CLS")
    names = list_names(wrap(model), "head")
    assert [name.split("score.")[1] for name in names] == ["original_module.weight", "modules_to_save.default.weight"]


def test_lora_is_made_of_matrices_even_on_a_head():
    model = make_lora(make_llama(), target_modules=["q_proj", "lm_head"])
    ((options, names),) = list_groups(model)
    assert options == {"role": "matrix", "blocks": None}
    assert sum("q_proj.lora_" in name for name in names) == 4 and sum("lm_head.lora_" in name for name in names) == 2
    assert list_names(model, "head") == ["base_model.model.lm_head.base_layer.weight"]


def test_lora_of_an_embedding_is_a_table_and_a_matrix():
    roles = parameter_roles(make_lora(make_llama(), target_modules=["embed_tokens"]))
    path = "base_model.model.model.embed_tokens"
    assert roles[f"{path}.lora_embedding_A.default"] == EMBEDDING
    assert roles[f"{path}.lora_embedding_B.default"] == MATRIX


def test_single_trained_tokens_are_an_embedding():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_llama(), peft.TrainableTokensConfig(token_indices=[3, 4]))
    assert [options for options, _ in list_groups(model)] == [{"role": "embedding"}]


def test_conv1d_is_stored_transposed():
    model = make_gpt2()
    for block in model.transformer.h:
        block.attn.c_attn.row_blocks = (16, 16, 16)  # rows of (out, in), where (16, 48) is stored
    matrices, rest = param_groups(model)
    names = [f"transformer.h.{i}.{key}.weight" for i in range(2) for key in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    options = {"role": "matrix", "transposed": True}
    assert list_groups(model)[: len(matrices)] == [
        (options | {"blocks": (16, 16, 16)}, [f"transformer.h.{i}.attn.c_attn.weight" for i in range(2)]),
        (options | {"blocks": None}, names),
    ]
    assert [group["role"] for group in rest] == ["embedding", "vector"]
    model.transformer.h[1].attn.c_attn.row_blocks = (8, 8)
    with pytest.raises(ValueError, match=r"h.1.attn.c_attn.weight: row_blocks .* 48 rows, got \(8, 8\)"):
        param_groups(model)


def test_conv1d_of_a_base_model_that_is_trained_later():
    model = make_lora(make_gpt2("GPT2ForSequenceClassification"), target_modules=["c_attn"], fan_in_fan_out=True)
    roles = parameter_roles(model)
    path = "base_model.model.transformer.h.0.attn.c_attn"
    assert roles[f"{path}.base_layer.weight"] == ParamRole("matrix", transposed=True)
    assert roles[f"{path}.lora_A.default.weight"] == roles[f"{path}.lora_B.default.weight"] == MATRIX
    assert roles["base_model.model.score.weight"] == HEAD
    names = [name for _, group in list_groups(model, frozen=True) for name in group]
    assert sorted(names) == sorted(roles)
    assert all("lora_" in name for _, group in list_groups(model) for name in group)


@pytest.mark.parametrize(
    ("kind", "config", "transposed", "options"),
    [
        ("MixtralForCausalLM", "MixtralConfig", False, {"num_local_experts": 4}),
        ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", False, {"num_experts": 4, "moe_intermediate_size": 12}),
        ("GptOssForCausalLM", "GptOssConfig", True, {"num_local_experts": 4}),
    ],
)
def test_experts_of_transformers(kind, config, transposed, options):
    pytest.importorskip("transformers", minversion="5")
    model = make(kind, config, **options)
    groups = list_groups(model)
    experts = [(own, names) for own, names in groups if "layout" in own]
    own = {"role": "matrix", "blocks": None, "layout": "experts"} | ({"transposed": True} if transposed else {})
    names = [f"model.layers.{i}.mlp.experts.{key}" for i in range(2) for key in ("gate_up_proj", "down_proj")]
    assert experts == [(own, names)]
    roles = parameter_roles(model)
    biases = [name for name in roles if name.endswith("proj_bias")]
    assert len(biases) == (4 if transposed else 0) and {roles[name] for name in biases} <= {VECTOR}
    routers = [name for name in roles if "mlp.gate.weight" in name or "router.weight" in name]
    assert len(routers) == 2 and {roles[name] for name in routers} == {MATRIX}
    parameters = [p for name, p in model.named_parameters() if p.ndim > 1 and roles[name] not in (EMBEDDING, HEAD)]
    weights = sum(p.numel() for p in parameters)
    assert sum(p.numel() for group in param_groups(model)[0] for _, p in group["params"]) > 0.95 * weights


def test_experts_that_do_not_say_how_they_are_stored_must_be_declared():
    transformers = pytest.importorskip("transformers", minversion="5")
    experts = pytest.importorskip("transformers.models.llama4.modeling_llama4").Llama4TextExperts
    module = experts(transformers.Llama4TextConfig(hidden_size=8, intermediate_size=12, num_local_experts=4))
    with pytest.raises(ValueError, match=r"(?s)gate_up_proj has 3 .*down_proj has 3 .*layout = \"experts\""):
        param_groups(module)
    module.layout, module.transposed = "experts", True
    assert list_groups(module) == [
        ({"role": "matrix", "blocks": None, "layout": "experts", "transposed": True}, ["gate_up_proj", "down_proj"])
    ]


def test_all_problems_of_a_vision_transformer_are_told_at_once():
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    model = transformers.ViTForImageClassification(config)
    with pytest.raises(ValueError) as error:
        param_groups(model)
    for name in ("cls_token", "position_embeddings", "patch_embeddings.projection.weight"):
        assert f"vit.embeddings.{name} has " in str(error.value)
    assert 'conv="matrix"' in str(error.value) and 'role = "vector"' in str(error.value)
    model.vit.embeddings.role = "vector"
    matrix, _ = param_groups(model, conv="matrix")
    assert [group.get("layout") for group in matrix] == ["conv", None]
    assert list_names(model, "head", conv="matrix") == ["classifier.weight"]


@pytest.mark.parametrize("name", slow_but(["gpt2", "lora"], ["gpt2", "mixtral", "gpt_oss", "lora"]))
def test_the_optimizers_take_the_groups(name):
    torch.manual_seed(0)
    if name in ("mixtral", "gpt_oss"):
        pytest.importorskip("transformers", minversion="5")
    model = {
        "gpt2": make_gpt2,
        "mixtral": lambda: make("MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
        "gpt_oss": lambda: make("GptOssForCausalLM", "GptOssConfig", num_local_experts=4),
        "lora": lambda: make_lora(make_llama(initializer_range=0.5), target_modules="all-linear"),
    }[name]()
    matrix, rest = param_groups(model)
    # LoRA starts with B = 0, whose rows have no direction yet
    optimizer = Combined(Muown(matrix, lr=0.02, zero_rows=0.02), torch.optim.AdamW(rest, lr=0.02))
    tokens = torch.randint(61, (4, 9))
    losses = []
    for _ in range(30):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    outputs = {
        "gpt2": ("attn.c_attn.weight", 48),
        "mixtral": ("gate_up_proj", 4 * 48),
        "gpt_oss": ("down_proj", 4 * 16),
    }
    suffix, rows = outputs.get(name, ("q_proj.lora_B.default.weight", 16))
    parameters = [p for own, p in model.named_parameters() if own.endswith(suffix)]
    assert [len(optimizer.state[p]["magnitude"]) for p in parameters] == [rows] * 2
