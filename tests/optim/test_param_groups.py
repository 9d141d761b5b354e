import pytest
import torch
from torch import nn

from muown_train.optim import Combined, Muown, param_groups, parameter_roles
from muown_train.optim.param_groups import ParamRole, canonical_name


class Model(nn.Module):
    def __init__(self, tied=True, dim=4):
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "out": nn.Linear(dim, dim)}) for _ in "ab"
        )
        for layer in self.layers:
            layer["qkv"].row_blocks = (dim, dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.scale = nn.Parameter(torch.ones(()))
        self.lm_head = nn.Linear(dim, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            q, k, v = layer["qkv"](x).chunk(3, -1)
            x = x + layer["out"](q * k.tanh() * v)
        return self.lm_head(self.scale * self.norm(x))


MATRIX, VECTOR = ParamRole("matrix", None), ParamRole("vector", None)
TIED = {"scale": VECTOR, "embed.weight": ParamRole("embedding", None)}
for i in range(2):
    TIED[f"layers.{i}.qkv.weight"] = ParamRole("matrix", (4, 4, 4))
    TIED[f"layers.{i}.qkv.bias"] = VECTOR
    TIED[f"layers.{i}.out.weight"] = MATRIX
    TIED[f"layers.{i}.out.bias"] = VECTOR
TIED |= {"norm.weight": VECTOR, "norm.bias": VECTOR}


def test_roles():
    assert parameter_roles(Model()) == TIED
    untied = parameter_roles(Model(tied=False))
    assert untied == TIED | {"lm_head.weight": ParamRole("head", None)}
    assert list(untied) == [name for name, _ in Model(tied=False).named_parameters()]


def test_wrappers_do_not_change_names():
    class Wrapper(nn.Module):  # as DistributedDataParallel
        def __init__(self, module):
            super().__init__()
            self.module = module

    wrapped = Wrapper(torch.compile(Model(tied=False)))
    assert any("module._orig_mod." in name for name, _ in wrapped.named_parameters())
    assert parameter_roles(wrapped) == parameter_roles(Model(tied=False))
    assert canonical_name("module._orig_mod.encoder.module.weight") == "encoder.module.weight"


def test_a_module_declares_its_role():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Conv1d(3, 5, 2))
    model[1].role = "head"
    model[2].role = "vector"
    roles = parameter_roles(model)
    assert roles["0.weight"].role == "matrix"
    assert roles["1.weight"].role == "head" and roles["1.bias"].role == "vector"
    assert roles["2.weight"].role == "vector"


def test_head_found_first_is_still_an_embedding_when_tied():
    model = nn.Module()
    model.head, model.embed = nn.Linear(4, 11, bias=False), nn.Embedding(11, 4)
    model.head.role = "head"
    model.embed.weight = model.head.weight
    assert parameter_roles(model) == {"head.weight": ParamRole("embedding", None)}


def test_errors_name_the_parameter():
    with pytest.raises(ValueError, match=r"0.weight has 4 dimensions, shape \(2, 1, 3, 3\)"):
        parameter_roles(nn.Sequential(nn.Conv2d(1, 2, 3)))
    model = nn.Sequential(nn.Linear(4, 6))
    model[0].role = "heads"
    with pytest.raises(ValueError, match=r"0.weight: its module declares role 'heads'"):
        parameter_roles(model)
    model[0].role = "matrix"
    for blocks in ((3, 4), (6, 0), 6, (3.0, 3.0)):
        model[0].row_blocks = blocks
        with pytest.raises(ValueError, match=r"0.weight: row_blocks .* 6 rows"):
            parameter_roles(model)
    other = nn.Linear(4, 6)
    model[0].row_blocks, other.row_blocks = (3, 3), (2, 4)
    other.weight = model[0].weight
    with pytest.raises(ValueError, match=r"0.weight is shared by modules that declare different row_blocks"):
        parameter_roles(nn.Sequential(model[0], other))


def names(groups):
    return [[name for name, _ in group["params"]] for group in groups]


def test_groups():
    model = Model(tied=False)
    model.layers[1]["out"].weight.requires_grad_(False)
    matrix, rest = param_groups(model)
    assert [group["blocks"] for group in matrix] == [(4, 4, 4), None]
    assert names(matrix) == [["layers.0.qkv.weight", "layers.1.qkv.weight"], ["layers.0.out.weight"]]
    assert [group["role"] for group in rest] == ["vector", "embedding", "head"]
    claimed = [p for group in matrix + rest for _, p in group["params"]]
    assert len(claimed) == len(set(claimed))
    assert set(claimed) == {p for p in model.parameters() if p.requires_grad}
    fused, _ = param_groups(model, blocks=False)
    assert [group["blocks"] for group in fused] == [None]
    assert names(fused) == [["layers.0.qkv.weight", "layers.0.out.weight", "layers.1.qkv.weight"]]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_torchs_optimizers_take_the_groups(kind):
    matrix, rest = param_groups(Model())
    optimizer = kind(matrix + rest, lr=1e-3)
    assert [group["role"] for group in optimizer.param_groups] == ["matrix", "matrix", "vector", "embedding"]


def test_training_a_model_lowers_its_loss():
    torch.manual_seed(0)
    model = Model()
    matrix, rest = param_groups(model)
    optimizer = Combined(Muown(matrix, lr=0.02), torch.optim.AdamW(rest, lr=0.02))
    tokens = torch.randint(11, (4, 9))
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
