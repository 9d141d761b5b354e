"""What DeepSpeed does with an optimizer, without DeepSpeed: it swaps parameters for flat ones and steps by group."""

import pytest
import torch

from muown_train.optim import Combined, Lion, Muown

from .models import build_data, build_model


class FlatGroups:
    """The use that DeepSpeed's ZeRO stages 1 and 2 make of an optimizer, on one process."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.members = [list(group["params"]) for group in optimizer.param_groups]
        for group, members in zip(optimizer.param_groups, self.members, strict=True):
            group["params"] = [torch.cat([p.detach().flatten() for p in members]).requires_grad_()]

    def step(self):
        groups = self.optimizer.param_groups
        for group, members in zip(list(groups), self.members, strict=True):
            (flat,) = group["params"]
            flat.grad = torch.cat([p.grad.flatten() for p in members])
            self.optimizer.param_groups = [group]
            self.optimizer.step()
            self.optimizer.param_groups = groups
            flat.grad = None
            pieces = flat.detach().split([p.numel() for p in members])
            for p, piece in zip(members, pieces, strict=True):
                p.data.copy_(piece.view_as(p))

    def save(self):
        return [dict(self.optimizer.state[group["params"][0]]) for group in self.optimizer.param_groups]

    def load(self, saved):
        self.optimizer.state.clear()
        for group, state in zip(self.optimizer.param_groups, saved, strict=True):
            self.optimizer.state[group["params"][0]] = {key: value.clone() for key, value in state.items()}


def build(seed=0):
    model = build_model(seed)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return model, Combined(Lion(matrices, lr=0.001), torch.optim.AdamW(vectors, lr=0.01))


def train(model, optimizer, steps):
    inputs, labels = build_data()
    for _ in range(steps):
        model.zero_grad()
        model(inputs, labels)["loss"].backward()
        optimizer.step()


def test_elementwise_parts_step_flat_parameters():
    (model, optimizer), (other, plain) = build(), build()
    flat = FlatGroups(optimizer)
    train(model, flat, 3)
    train(other, plain, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)

    resumed, optimizer = build(seed=1)
    resumed.load_state_dict(model.state_dict())
    again = FlatGroups(optimizer)
    again.load(flat.save())
    train(model, flat, 2)
    train(resumed, again, 2)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_matrices_as_a_flat_parameter_are_refused():
    model = build_model()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    flat = FlatGroups(Combined(Muown(matrices), torch.optim.AdamW(vectors)))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="2-D parameters"):
        train(model, flat, 1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
