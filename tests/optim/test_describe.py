import pytest
import torch
from torch import nn

from muown_train.optim import Combined, Muown, describe, param_groups


class Model(nn.Module):
    def __init__(self, depth=12):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8, bias=False)}) for _ in range(depth)
        )
        for block in self.blocks:
            block["qkv"].row_blocks = (8, 8, 8)


def make_optimizer(model, **options):
    matrix, rest = param_groups(model, **options)
    return Combined(Muown(matrix), torch.optim.AdamW(rest))


def test_combined_shows_its_parts():
    assert (
        describe(make_optimizer(Model()))
        == """\
matrix 81.7 % of 3.76k parameters

parameters   share  role       optimizer  stored as
     2,304  61.3 %  matrix     Muown      3 row blocks
       768  20.4 %  matrix     Muown
       400  10.6 %  embedding  AdamW
       288   7.7 %  vector     AdamW

group 0: matrix, Muown, row blocks 3 x 8
  blocks.0..11.qkv.weight  x12  (24, 8)

group 1: matrix, Muown
  blocks.0..11.out.weight  x12  (8, 8)

group 2: embedding, AdamW
  embed.weight  (50, 8)

group 3: vector, AdamW
  blocks.0..11.qkv.bias  x12  (24,)"""
    )


def test_groups_have_the_numbers_of_the_optimizer():
    inner = make_optimizer(Model(1))
    outer = Combined(inner, torch.optim.SGD([("late.weight", nn.Parameter(torch.ones(2)))]))
    late = [("later.weight", nn.Parameter(torch.ones(3, 2)))]
    outer.add_param_group({"params": late, "role": "matrix", "transposed": True})
    lines = [line for line in describe(outer).splitlines() if line.startswith("group ")]
    assert lines == [
        "group 0: matrix, Muown, row blocks 3 x 8",
        "group 1: matrix, Muown",
        "group 2: embedding, AdamW",
        "group 3: vector, AdamW",
        "group 4: SGD",
        "group 5: matrix, Muown, transposed",
    ]


def test_groups_without_an_optimizer():
    matrix, rest = param_groups(Model())
    assert describe((matrix, rest)) == describe(matrix + rest)
    lines = describe(matrix + rest).splitlines()
    assert "parameters   share  role       stored as" in lines and "group 0: matrix, row blocks 3 x 8" in lines


def test_layers_that_are_not_alike_are_told_apart():
    model = Model()
    model.blocks[3]["out"] = nn.Linear(8, 6, bias=False)
    model.blocks[7]["out"].weight.requires_grad_(False)
    lines = describe(param_groups(model, frozen=True)).splitlines()
    assert "  blocks.{0..2,4..6,8..11}.out.weight  x10  (8, 8)" in lines
    assert "  blocks.3.out.weight  (6, 8)" in lines
    assert "  blocks.7.out.weight  (8, 8)  frozen" in lines
    assert any(line.endswith("matrix     frozen") and line.split()[0] == "64" for line in lines)


def test_two_numbers_in_a_name():
    model = nn.ModuleList(nn.ModuleList(nn.Linear(2, 3, bias=False) for _ in range(4)) for _ in range(3))
    assert describe(param_groups(model)).splitlines()[-1] == "  0..2.0..3.weight  x12  (3, 2)"
    del model[2][3]
    assert describe(param_groups(model)).splitlines()[-2:] == [
        "  0..1.0..3.weight  x8  (3, 2)",
        "  2.0..2.weight  x3  (3, 2)",
    ]


def test_any_optimizer_and_unnamed_parameters():
    optimizer = torch.optim.SGD([{"params": [torch.ones(2, 3), torch.ones(2, 3)]}, {"params": torch.ones(4)}], lr=1)
    assert describe(optimizer).splitlines()[0] == "matrix 0.0 % of 16 parameters"
    assert "  unnamed  x2  (2, 3)  frozen" in describe(optimizer).splitlines()
    assert describe([]) == "matrix 0.0 % of 0 parameters\n\nparameters  share  role  stored as"


@pytest.mark.parametrize("length", [1, 90, 200])
def test_no_line_is_longer_than_80_columns(length):
    model = nn.ModuleDict({"x" * length: nn.Linear(2, 60, bias=False)})
    model["x" * length].row_blocks = (1, 2, 3, 4, 5, 6, 7, 8, 24)
    model["experts"] = nn.Module()
    model["experts"].w = nn.Parameter(torch.ones(2, 3, 4))
    model["experts"].layout, model["experts"].transposed, model["experts"].row_blocks = "experts", True, (1, 3)
    text = describe(make_optimizer(model))
    assert max(map(len, text.splitlines())) <= 80
    assert "(60, 2)" in text
    assert "experts, transposed, 2 row blocks" in text and "row blocks 1 + 2 + 3" in text
