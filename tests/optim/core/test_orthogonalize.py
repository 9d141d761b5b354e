import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.optim.core import orthogonalize
from muown_train.optim.core.orthogonalize import choose_dtype, get_dtype_name, has_fast_bfloat16, newton_schulz, svd

SHAPES = [(12, 20), (20, 12), (16, 16), (1, 9), (9, 1), (1, 1)]


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def polynomial_of_singular_values(X, steps, coefficients):
    """Apply Newton-Schulz to the singular values alone, which is what the iteration amounts to."""
    a, b, c = coefficients
    U, S, Vh = torch.linalg.svd(X, full_matrices=False)
    s = S / S.norm()
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return U @ torch.diag(s) @ Vh


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_maps_the_singular_values(shape):
    X = randn(*shape)
    expected = polynomial_of_singular_values(X, 5, (3.4445, -4.775, 2.0315))
    torch.testing.assert_close(newton_schulz(X), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_in_bfloat16_is_torchs(shape):
    X = randn(*shape, dtype=torch.float32)
    moved = torch.nn.Parameter(torch.zeros(shape))
    moved.grad = X.clone()
    torch.optim.Muon([moved], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    expected = -moved.detach() / max(1, shape[0] / shape[1]) ** 0.5
    torch.testing.assert_close(newton_schulz(X, dtype="bfloat16"), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize("shape", [(8, 16), (8, 64), (50, 20)])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7])
def test_iterating_on_the_gram_matrix_is_the_plain_iteration(shape, steps):
    X = randn(2, *shape)
    expected = torch.stack([polynomial_of_singular_values(x, steps, (3.4445, -4.775, 2.0315)) for x in X])
    torch.testing.assert_close(newton_schulz(X, steps), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("decay", [0.0, 2.0, 4.0])
def test_in_bfloat16_it_is_as_accurate_as_the_plain_iteration(decay):
    X = randn(64, 256) * torch.logspace(0, -decay, 256, dtype=torch.float64)
    exact = newton_schulz(X)
    plain = X.bfloat16() / X.norm().bfloat16()
    for _ in range(5):
        gram = plain @ plain.mT
        plain = torch.addmm(plain, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), plain, beta=3.4445)
    error = (newton_schulz(X, dtype="bfloat16") - exact).norm()
    assert error < 1.5 * (plain.double() - exact).norm() + 0.02 * exact.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_svd_is_the_polar_factor(shape):
    X = randn(*shape)
    O = svd(X)  # noqa: E741
    identity = O @ O.mT if shape[0] <= shape[1] else O.mT @ O
    torch.testing.assert_close(identity, torch.eye(min(shape), dtype=X.dtype))
    product = O.mT @ X  # symmetric and positive semi-definite, which makes O the polar factor
    torch.testing.assert_close(product, product.mT)
    assert torch.linalg.eigvalsh(product).min() > -1e-9


@pytest.mark.parametrize("function", [newton_schulz, svd])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_batches_dtypes_and_zeros(function, dtype):
    X = randn(2, 3, 5, 7).to(dtype)
    X[1, 1] = 0
    before = X.clone()
    O = function(X)  # noqa: E741
    assert O.shape == X.shape and O.dtype == dtype
    assert torch.equal(X, before)
    assert torch.equal(O[1, 1], torch.zeros(5, 7, dtype=dtype))
    atol = 1e-12 if dtype == torch.float64 else 0.05
    torch.testing.assert_close(O[0, 2], function(X[0, 2]), rtol=0, atol=atol)


def test_svd_of_rank_one_is_the_partial_isometry():
    u, v = randn(6), randn(4, seed=1)
    expected = torch.outer(u / u.norm(), v / v.norm())
    torch.testing.assert_close(svd(torch.outer(u, v)), expected)


@settings(max_examples=25)
@given(st.integers(1, 8), st.integers(1, 8), st.floats(1e-3, 1e6), st.integers(0, 99))
def test_scale_of_the_input_does_not_matter(m, n, scale, seed):
    X = randn(m, n, seed=seed)
    torch.testing.assert_close(newton_schulz(X * scale), newton_schulz(X), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(newton_schulz(X.mT), newton_schulz(X).mT)


def test_choose_dtype(monkeypatch):
    assert choose_dtype("cpu", torch.float64) == torch.float64
    for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(orthogonalize, "has_fast_bfloat16", lambda device, fast=fast: fast)
        assert choose_dtype("cpu", torch.float32) == expected


@pytest.mark.parametrize(
    "found, fast",
    [
        ({"amx_bf16": True, "avx512_bf16": True, "avx512_fp16": True}, True),
        ({"avx512_bf16": True}, True),
        ({"avx512_bf16": True, "avx512_fp16": True, "amx_bf16": False}, False),
        ({"avx512_f": True}, False),
    ],
)
def test_fast_bfloat16_follows_the_cpu(monkeypatch, found, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert has_fast_bfloat16.__wrapped__("cpu") is fast


def test_fast_bfloat16_without_any_probe(monkeypatch):
    for name in ("get_capabilities", "_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert has_fast_bfloat16.__wrapped__("cpu") is False
    assert has_fast_bfloat16("meta") is False


def test_dtype_names():
    for dtype in (torch.bfloat16, "bfloat16", "torch.bfloat16"):
        assert get_dtype_name(dtype) == "bfloat16"
    with pytest.raises(ValueError, match="float8"):
        get_dtype_name("float8")
    with pytest.raises(ValueError, match="int32"):
        get_dtype_name(torch.int32)
