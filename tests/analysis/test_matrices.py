import torch
from torch import nn

from muown_train.analysis.matrices import find_matrices
from muown_train.optim import Muown, param_groups


class Experts(nn.Module):
    layout, transposed = "experts", True

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 6))
        self.row_blocks = {"up": (4, 2)}


def test_matrices_are_those_of_the_optimizer_whatever_the_layout():
    model = Experts()
    found = list(find_matrices(model))
    assert [matrix.name for matrix in found] == [f"up:{i}" for i in range(6)]
    assert torch.equal(found[3].take_rows(model.up), model.up[1, :, 4:].mT)
    optimizer = Muown(param_groups(model)[0])
    model.up.grad = torch.randn_like(model.up)
    optimizer.step()
    for matrix in found:
        norms = matrix.take_rows(model.up.detach()).norm(dim=1)
        torch.testing.assert_close(matrix.take_rows(optimizer.state[model.up]["magnitude"]).abs(), norms)


def test_a_parameter_of_one_matrix_keeps_its_name():
    model = nn.Conv1d(2, 4, 3)
    model.layout = "conv"
    (matrix,) = find_matrices(model)
    assert matrix.name == matrix.parameter_name == "weight"
    assert torch.equal(matrix.take_rows(model.weight), model.weight.flatten(1))
