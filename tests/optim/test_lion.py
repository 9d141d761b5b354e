"""Lion against its paper's Algorithm 2, element by element."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.optim import Lion


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 4), max_size=3), st.integers(0, 99), st.floats(0, 0.99), st.floats(0, 0.99),
    st.sampled_from([0.0, 0.5]),
)  # fmt: skip
def test_elementwise(shape, seed, beta1, beta2, weight_decay):
    generator = torch.Generator().manual_seed(seed)
    p = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))
    values, momenta = p.detach().flatten().tolist(), [0.0] * p.numel()
    optimizer = Lion([p], lr=0.1, betas=(beta1, beta2), weight_decay=weight_decay)
    for _ in range(4):
        p.grad = torch.randn(shape, dtype=torch.float64, generator=generator)
        for i, g in enumerate(p.grad.flatten().tolist()):
            c = beta1 * momenta[i] + (1 - beta1) * g
            values[i] -= 0.1 * ((c > 0) - (c < 0) + weight_decay * values[i])
            momenta[i] = beta2 * momenta[i] + (1 - beta2) * g
        optimizer.step()
    torch.testing.assert_close(p.detach().flatten(), torch.tensor(values, dtype=torch.float64))


def test_mixed_dtypes_and_no_gradients():
    shapes = [((3,), torch.float32), ((2, 3), torch.bfloat16), ((), torch.float64), ((4,), torch.float32)]
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in shapes]
    for p in parameters[:-1]:
        p.grad = torch.full_like(p, -2.0)
    Lion(parameters, lr=0.25).step()
    for p in parameters[:-1]:
        assert (p == 1.25).all()
    assert (parameters[-1] == 1).all()


@pytest.mark.parametrize("key, value", [("betas", (0.9, 1.0)), ("betas", 0.9), ("lr", -1.0), ("weight_decay", None)])
def test_invalid_options(key, value):
    with pytest.raises(ValueError, match=key):
        Lion([{"params": [torch.nn.Parameter(torch.ones(2))], key: value}])
