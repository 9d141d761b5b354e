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


class BasicBlock(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))


class ResNet18(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.layers = nn.ModuleList(
            nn.Sequential(BasicBlock(inner, outer, stride), BasicBlock(outer, outer, 1))
            for inner, outer, stride in widths
        )
        self.fc = nn.Linear(512, classes)
        self.fc.role = "head"


def test_a_resnet_goes_to_the_matrix_optimizer():
    with torch.device("meta"):
        model = ResNet18()
    matrix, rest = param_groups(model, conv="matrix")
    assert [{**group, "params": len(group["params"])} for group in matrix] == [
        {"params": 20, "role": "matrix", "blocks": None, "layout": "conv"}
    ]
    assert [group["role"] for group in rest] == ["vector", "head"]
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert sum(p.numel() for _, p in matrix[0]["params"]) > 0.95 * weights
    with pytest.raises(ValueError, match="20 parameters of the model") as error:
        param_groups(model)
    assert all(name in str(error.value) for name, p in model.named_parameters() if p.ndim == 4)
    assert str(error.value).count('conv="matrix"') == 1


def test_convolutions():
    model = nn.ModuleDict(
        {
            "one_channel": nn.Conv1d(1, 4, 3),
            "grouped": nn.Conv2d(6, 4, 3, groups=2),
            "depthwise": nn.Conv3d(4, 8, 3, groups=4),
            "up": nn.ConvTranspose2d(4, 6, 3),
            "up_declared": nn.ConvTranspose2d(4, 6, 3, groups=2),
            "vector": nn.Conv1d(2, 4, 3),
        }
    )
    model["vector"].role = "vector"
    model["up_declared"].layout = "conv"
    roles = parameter_roles(model, conv="matrix")
    assert {name.split(".")[0]: role for name, role in roles.items() if name.endswith("weight")} == {
        "one_channel": ParamRole("matrix", None, "conv"),
        "grouped": ParamRole("matrix", (2, 2), "conv"),
        "depthwise": VECTOR,
        "up": VECTOR,
        "up_declared": ParamRole("matrix", (2, 2), "conv"),
        "vector": VECTOR,
    }
    with pytest.raises(ValueError, match=r"conv must be one of None, 'matrix', got 'matrices'"):
        param_groups(model, conv="matrices")
    for key in ("one_channel", "grouped", "depthwise", "up"):
        model[key].role = "matrix"
    assert {role.layout for name, role in parameter_roles(model).items() if role.role == "matrix"} == {"conv"}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(3, 4, 6)), nn.Parameter(torch.ones(3, 6, 2))
        self.up_bias, self.token = nn.Parameter(torch.ones(3, 6)), nn.Parameter(torch.ones(1, 1, 6))


def test_a_module_declares_how_its_parameters_are_stored():
    model = Experts()
    model.role, model.layout, model.transposed = {"token": "vector"}, "experts", True
    model.row_blocks = {"up": (3, 3)}
    assert parameter_roles(model) == {
        "up": ParamRole("matrix", (3, 3), "experts", True),
        "down": ParamRole("matrix", None, "experts", True),
        "up_bias": VECTOR,
        "token": VECTOR,
    }
    linear = nn.Linear(4, 6)
    linear.transposed, linear.row_blocks = True, (2, 2)
    assert parameter_roles(linear)["weight"] == ParamRole("matrix", (2, 2), None, True)
    matrix, _ = param_groups(linear, blocks=False)
    assert [list(group) for group in matrix] == [["params", "role", "blocks", "transposed"]]
    assert matrix[0]["blocks"] is None


@pytest.mark.parametrize("attribute, value", [("role", "vector"), ("row_blocks", (2, 2)), ("layout", "conv")])
def test_a_declaration_names_parameters_that_the_module_holds(attribute, value):
    model = nn.Sequential(nn.MultiheadAttention(4, 1))
    setattr(model[0], attribute, {"in_proj": value})
    setattr(model, attribute, {"a name for a purpose of its own": value})  # it holds no parameters
    with pytest.raises(ValueError, match=f"0 declares {attribute} of 'in_proj', .* are in_proj_weight, in_proj_bias"):
        param_groups(model)


def test_a_dictionary_declares_parameters_of_one_module():
    attention = nn.MultiheadAttention(4, 1)
    attention.row_blocks = {"in_proj_weight": (4, 4, 4)}
    attention.positions = nn.Parameter(torch.randn(3, 4))
    attention.role = {"positions": "vector"}
    matrix, rest = param_groups(attention)
    assert [group.get("blocks") for group in matrix] == [(4, 4, 4), None]
    assert "positions" in [name for group in rest for name, _ in group["params"]]


def test_a_bag_of_embeddings_is_an_embedding():
    assert parameter_roles(nn.EmbeddingBag(5, 3))["weight"].role == "embedding"


def test_errors_of_declarations_come_together():
    model = Experts()
    model.layout, model.transposed = {"up": "expert", "down": "experts", "up_bias": "experts"}, {"down": "yes"}
    with pytest.raises(ValueError) as error:
        parameter_roles(nn.ModuleList([model]))
    assert str(error.value).splitlines() == [
        "3 parameters of the model cannot be given to an optimizer:",
        "  0.up: its module declares layout 'expert', not one of conv, experts",
        "  0.down: its module declares transposed 'yes', not True or False",
        "  0.token has 3 dimensions, shape (1, 1, 6), and its module gives it no role",
        '  -> set role = "vector" on the module, for an optimizer that can take it, or layout = "experts" if it is a '
        "batch of matrices (experts, out, in), with transposed = True if they are stored (experts, in, out)",
    ]
    model.layout, model.transposed, model.row_blocks = {"token": "experts"}, None, {"up": (3, 3)}
    model.up.requires_grad_(False)
    model.down.requires_grad_(False)
    assert [group["layout"] for group in param_groups(model)[0] if "layout" in group] == ["experts"]
    with pytest.raises(ValueError, match="2 parameters"):
        param_groups(model, frozen=True)
    model.layout = "experts"
    with pytest.raises(ValueError, match=r"up: row_blocks must be .* 4 rows, got \(3, 3\)"):
        param_groups(model, frozen=True)


def test_frozen_parameters_are_taken_on_request():
    model = Model(tied=False)
    matrix, rest = param_groups(model)
    model.requires_grad_(False)
    assert names(param_groups(model)[0]) == names(param_groups(model)[1]) == [[]]
    everything = param_groups(model, frozen=True)
    assert (names(everything[0]), names(everything[1])) == (names(matrix), names(rest))


@pytest.mark.parametrize("model", [nn.LayerNorm(3), nn.Linear(3, 2, bias=False)])
def test_a_model_may_lack_matrices_or_all_others(model):
    matrix, rest = param_groups(model)
    combined = Combined(Muown(matrix, lr=0.1), torch.optim.AdamW(rest, lr=0.1))
    together = torch.optim.AdamW(matrix + rest, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(4, 3)).square().sum().backward()
    for optimizer in (combined, together):
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    assert all((p != old).any() for p, old in zip(model.parameters(), before, strict=True))
    assert sum(len(group["params"]) for group in matrix + rest) == len(before)
