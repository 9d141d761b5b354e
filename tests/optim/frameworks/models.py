"""A small model, its optimizer and its data, as the tests of frameworks use them."""

import torch
from torch import nn

from muown_train.optim import Combined, Muown, param_groups


class Net(nn.Module):
    """A backbone, which tests freeze, and a head: 8 numbers in, 4 classes out."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 4)

    def forward(self, inputs, labels=None):
        logits = self.head(self.backbone(inputs))
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def build_model(seed=0):
    torch.manual_seed(seed)
    return Net()


def build_optimizer(model):
    matrix, rest = param_groups(model)
    return Combined(Muown(matrix, lr=0.02, weight_decay=0.01), torch.optim.AdamW(rest, lr=0.01))


def build_data(rows=32):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 8, generator=generator)
    return inputs, inputs[:, :4].argmax(1)


def check_equal_models(one, two):
    for (name, p), (other, q) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert name == other and torch.equal(p, q), name
