"""MuownSign against the algorithm of the paper's convergence section, gradients by automatic differentiation."""

from itertools import pairwise

import pytest
import torch

from muown_train.optim import MuownSign


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compose(g, R):
    return (g / R.norm(dim=1))[:, None] * R


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6), (1, 6)])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_the_papers_algorithm(shape, beta):
    p, grads = torch.nn.Parameter(randn(*shape)), randn(8, *shape, seed=1)
    optimizer = MuownSign([p], lr=0.1, magnitude_lr=0.03, momentum=beta)
    R, g = p.detach().clone(), p.detach().norm(dim=1)
    M = m = None
    for G in grads:
        R, g = R.requires_grad_(), g.requires_grad_()
        grad_R, grad_g = torch.autograd.grad((G * compose(g, R)).sum(), (R, g))
        if M is None:
            M, m = grad_R, grad_g  # M_0, m_0
        M, m = beta * M + grad_R, beta * m + grad_g
        U, _, Vh = torch.linalg.svd(M, full_matrices=False)
        R, g = R.detach() - 0.1 * U @ Vh, g.detach() - 0.03 * m.sign()
        p.grad = G.clone()
        optimizer.step()
    torch.testing.assert_close(p.detach(), compose(g, R), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(optimizer.state[p]["magnitude"], g)
    torch.testing.assert_close(optimizer.state[p]["row_norm"], R.norm(dim=1))


def test_gradients_vanish_at_the_rate_of_the_theorem():
    # For L(W) = 1/2 ||W - target||^2 the mean of the dual norm of the gradients must fall as 1 / sqrt(T).
    target = randn(4, 6, seed=3)
    means = []
    for T in (16, 64, 256, 1024):
        p = torch.nn.Parameter(randn(4, 6))
        optimizer = MuownSign([p], lr=2 / T**0.5, magnitude_lr=2 / T**0.5, momentum=0.0)
        norms = []
        for _ in range(T):
            p.grad = (p - target).detach()
            g, D = p.detach().norm(dim=1), p.detach() / p.detach().norm(dim=1, keepdim=True)
            grad_g = (p.grad * D).sum(1)
            r = optimizer.state[p].get("row_norm", g)  # the first step creates the state
            grad_R = (g / r)[:, None] * (p.grad - grad_g[:, None] * D)
            norms.append(grad_g.abs().sum() + torch.linalg.svdvals(grad_R).sum())
            optimizer.step()
        means.append(float(torch.stack(norms).mean()))
    for slow, fast in pairwise(means):
        assert fast < 0.7 * slow  # four times the steps: half, and a constant


def test_unsupported_options_are_errors():
    with pytest.raises(ValueError, match=r"'w'.*1 of 3 rows are zero"):
        MuownSign([("w", torch.nn.Parameter(torch.eye(3, 4) * torch.tensor([[1.0], [0.0], [1.0]])))])
    for key, value in (("magnitude_lr", -1.0), ("weight_decay", 0.1), ("nesterov", True)):
        with pytest.raises(ValueError, match=key):
            MuownSign([{"params": [torch.nn.Parameter(randn(2, 3))], key: value}])
