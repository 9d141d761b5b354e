"""Models on a GPU: losses and gradients equal those of the CPU, compiled and in bfloat16 they are near."""

import pytest
import torch

from muown_train.models.attention import causal_attention
from muown_train.models.generate import Sampling, stream_tokens
from muown_train.models.gpt import GPT
from muown_train.models.language_model import LanguageModel
from muown_train.models.speedrun import Speedrun
from muown_train.models.track3 import Track3

pytestmark = pytest.mark.gpu


def make_qwen2() -> LanguageModel:
    pytest.importorskip("transformers")
    from muown_train.models.qwen2 import Qwen2

    return Qwen2(512, 2, 64, 4, 2, 96, 128)


MODELS = {
    "GPT": lambda: GPT(512, 2, 64, 2, 128),
    "GPT, checkpointed": lambda: GPT(512, 2, 64, 2, 128, activation_checkpointing=2),
    "Qwen2": make_qwen2,
    "Speedrun": lambda: Speedrun(512, 2, 64, 128, head_dim=32),
    "Track3": lambda: Track3(512, 2, 64, 2, 128),
}


def make_model(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for p in model.parameters():  # some models start with matrices of zeros
            p.add_(0.02 * torch.randn_like(p))
    return model


def make_batch(device):
    tokens = torch.randint(512, (4, 129), generator=torch.Generator().manual_seed(1)).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def compute_gradients(model, called, device, autocast=False):
    """Return the loss per token and one vector of all gradients, on the CPU."""
    inputs, targets = make_batch(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        loss = called(inputs, targets) / targets.numel()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_the_cpu(name, device):
    reference, model = make_model(name), make_model(name).to(device)
    loss, gradient = compute_gradients(reference, reference, torch.device("cpu"))
    for autocast, allowed in ((False, 1e-3), (True, 0.03)):
        model.zero_grad()
        own_loss, own = compute_gradients(model, model, device, autocast)
        assert own_loss == pytest.approx(loss, rel=allowed / 5)
        assert (own - gradient).norm() <= allowed * gradient.norm()


def test_a_compiled_model_equals_the_model(device):
    torch._dynamo.reset()
    model = make_model("GPT").to(device)
    eager_loss, eager = compute_gradients(model, model, device, autocast=True)
    model.zero_grad()
    loss, gradient = compute_gradients(model, torch.compile(model), device, autocast=True)
    assert loss == pytest.approx(eager_loss, rel=0.003)
    assert (gradient - eager).norm() <= 0.03 * eager.norm()


@pytest.mark.parametrize("length", [64, 1024])
def test_attention_in_bfloat16(length, device):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 64, generator=generator).to(torch.bfloat16) for _ in range(3))
    scores = (q.double() @ k.double().mT / 8).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ v.double()
    given = causal_attention(q.to(device), k.to(device), v.to(device)).cpu().double()
    assert (given - expected).norm() <= 0.01 * expected.norm()


def test_generated_tokens_are_those_of_the_cpu(device):
    reference, model = make_model("GPT").eval(), make_model("GPT").eval().to(device)
    ours, theirs = (list(stream_tokens(each, [1, 2, 3], 12, 128, Sampling(0.0))) for each in (model, reference))
    assert ours == theirs
