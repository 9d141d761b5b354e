"""accelerate: `prepare`, `save_state` and `load_state` give back the whole state, onto a fresh optimizer too."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from .models import build_data, build_model, build_optimizer, check_equal_models

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

accelerate = pytest.importorskip("accelerate")


def prepare(seed=0):
    model = build_model(seed)
    optimizer = build_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(TensorDataset(*build_data()), batch_size=8)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


def train(accelerator, model, optimizer, scheduler, loader):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs, labels)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def test_save_and_load(tmp_path):
    one = prepare()
    train(*one)
    one[0].save_state(tmp_path)
    two = prepare(seed=1)
    two[0].load_state(tmp_path)
    check_equal_models(one[1], two[1])
    train(*one)
    train(*two)
    check_equal_models(one[1], two[1])
    assert [group["lr"] for group in one[2].param_groups] == [group["lr"] for group in two[2].param_groups]


def test_changes_through_the_wrapper():
    optimizer = prepare()[2]
    optimizer.state.clear()
    optimizer.state = {}
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups = groups
    assert optimizer.optimizer.param_groups is groups
    p = torch.nn.Parameter(torch.randn(3, 3))
    optimizer.add_param_group({"params": [p], "role": "matrix"})
    assert len(optimizer.optimizer.optimizers[0].param_groups) == 2
