"""The orthogonal factor of a matrix: X = U S V^T -> U V^T, exactly or by Newton-Schulz iteration.

Everything here is batched: X is (..., m, n) and each of its matrices is treated on its own.

The quintic iteration and its coefficients are Keller Jordan's (https://kellerjordan.github.io/posts/muon/),
as in torch.optim.Muon: singular values end between about 0.7 and 1.2 rather than at 1. Unlike
torch.optim.Muon, which always iterates in bfloat16, the dtype is an argument: by default bfloat16 where the
device multiplies matrices in it natively.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

NS_COEFFICIENTS = (3.4445, -4.775, 2.0315)  # chosen for the steepest slope at zero; source above
NS_EPS = 1e-7
NS_STEPS = 5

GRAM_ASPECT = 2.0  # of the sides, from which on iterating on the Gram matrix is faster; equal at 1.5
RESTART = 3  # steps on one Gram matrix

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a floating-point dtype, given as one or by name ("float32", "torch.float32").

    Raises:
        ValueError: for anything but bfloat16, float16, float32 and float64.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"the dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    return name


@functools.cache
def has_fast_bfloat16(device: torch.device | str) -> bool:
    """Whether this device multiplies bfloat16 matrices natively, so that they are faster than float32 ones.

    On a GPU: emulation does not count. On a CPU: AMX, or AVX-512 bfloat16 instructions without AVX-512 float16.
    (Processors with the latter leave bfloat16 to AMX, which a virtual machine may hide: the other instructions run at
    half of float32's rate there, 83 against 160 GFLOP/s on a core of an Emerald Rapids Xeon.) Other devices: False.
    """
    device = torch.device(device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and _cpu_has_fast_bfloat16()


def _cpu_has_fast_bfloat16() -> bool:
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        found = capabilities()
        return bool(found.get("amx_bf16") or (found.get("avx512_bf16") and not found.get("avx512_fp16")))
    # Older torch has only private probes, of which any may be missing.
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        probe = getattr(torch.cpu, name, None)
        if probe is not None and probe():
            return True
    return False


def default_dtype(device: torch.device | str, dtype: torch.dtype) -> torch.dtype:
    """The dtype to iterate in: float64 for float64 matrices, else bfloat16 where it is fast, else float32."""
    if dtype == torch.float64:
        return dtype
    return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32


def newton_schulz(
    X: Tensor | Sequence[Tensor],
    steps: int = NS_STEPS,
    coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
    eps: float = NS_EPS,
    dtype: torch.dtype | str | None = None,
) -> Tensor:
    """Approximate U V^T by `steps` of Y <- a Y + (b Y Y^T + c (Y Y^T)^2) Y, started at Y = X / ||X||_F.

    Args:
        X: (..., m, n), any floating dtype, or k of (m, n) to be stacked. Not modified.
        steps: iterations.
        coefficients: (a, b, c) of the quintic.
        eps: the least norm that X is divided by; zeros stay zeros.
        dtype: to iterate in, or its name; None for `default_dtype`.

    Returns:
        (..., m, n) or (k, m, n), in X's dtype.
    """
    return compose(X, [coefficients] * steps, eps, dtype)


def compose(
    X: Tensor | Sequence[Tensor],
    quintics: Sequence[tuple[float, float, float]],
    eps: float = NS_EPS,
    dtype: torch.dtype | str | None = None,
    on_gram: bool = True,
) -> Tensor:
    """Apply odd quintics a x + b x^3 + c x^5, one after the other, to the singular values of X / ||X||_F.

    Arguments and result as of `newton_schulz`. Extra memory: two copies of X in `dtype` and, with s the shorter side,
    up to four (k, s, s).

    Args:
        on_gram: whether several steps may be taken on one Gram matrix, which steep quintics do not allow.
    """
    shape, matrices = (X.shape, X.reshape(-1, *X.shape[-2:])) if isinstance(X, Tensor) else ((len(X), *X[0].shape), X)
    first = matrices[0]
    used = default_dtype(first.device, first.dtype) if dtype is None else _DTYPES[dtype_name(dtype)]
    Y = _normalized(matrices, eps, used)
    aspect = max(Y.shape[1:]) / min(Y.shape[1:])
    Y = _on_gram(Y, quintics) if on_gram and aspect >= GRAM_ASPECT else _on_matrix(Y, quintics)
    return Y.reshape(shape).to(first.dtype)


def _normalized(X: Tensor | Sequence[Tensor], eps: float, dtype: torch.dtype) -> Tensor:
    """X / ||X||_F of k matrices (m, n), stacked into (k, m, n) of another dtype in one pass after that of the norm."""
    Y = torch.empty((len(X), *X[0].shape), dtype=dtype, device=X[0].device)
    for y, x in zip(Y, X, strict=True):
        # the norm in float32 at least: the squares of float16 overflow
        norm = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).clamp(min=eps)
        y.copy_(x).mul_(norm.reciprocal())
    return Y


def _on_matrix(Y: Tensor, quintics: Sequence[tuple[float, float, float]]) -> Tensor:
    """The iteration as it is written: per step 4 s^2 l + 2 s^3 flops, s and l the sides; overwrites Y (k, m, n)."""
    spare, A = torch.empty_like(Y), None
    for abc in quintics:
        A = _gram(Y, A)
        Y, spare = _times(_polynomial(A, *abc), Y, spare), Y
    return Y


def _on_gram(Y: Tensor, quintics: Sequence[tuple[float, float, float]]) -> Tensor:
    """The same on the small Gram matrix A, since p(A) Y has the Gram matrix p(A) A p(A): long sides enter twice only.

    Rounding of A is amplified with every step, so that A is computed afresh after every third: with this restart
    bfloat16 is as accurate as the plain iteration, without it it diverges. Overwrites Y (k, m, n).
    """
    spare, A = torch.empty_like(Y), None
    for start in range(0, len(quintics), RESTART):
        steps = quintics[start : start + RESTART]
        A = _gram(Y, A)
        Q = P = _polynomial(A, *steps[0])  # the product of the polynomials
        for abc in steps[1:]:
            torch.bmm(P, A @ P, out=A)
            P = _polynomial(A, *abc)
            Q = P @ Q
        Y, spare = _times(Q, Y, spare), Y
    return Y


def _gram(Y: Tensor, out: Tensor | None) -> Tensor:
    """The smaller of Y Y^T and Y^T Y, (k, s, s); without a transposed copy."""
    if out is None:
        out = Y.new_empty(Y.shape[0], min(Y.shape[1:]), min(Y.shape[1:]))
    return torch.bmm(Y.mT, Y, out=out) if Y.shape[1] > Y.shape[2] else torch.bmm(Y, Y.mT, out=out)


def _times(P: Tensor, Y: Tensor, out: Tensor) -> Tensor:
    """P Y, or Y P where P (k, s, s) is on the side of the columns."""
    return torch.bmm(Y, P, out=out) if Y.shape[1] > Y.shape[2] else torch.bmm(P, Y, out=out)


def _polynomial(A: Tensor, a: float, b: float, c: float) -> Tensor:
    """a I + b A + c A^2, (k, s, s)."""
    P = torch.baddbmm(A, A, A, beta=b, alpha=c)
    P.diagonal(dim1=-2, dim2=-1).add_(a)  # cheaper than beta=a in the product with Y, which would copy Y first
    return P


def svd(X: Tensor) -> Tensor:
    """The exact factor U V^T of X = U S V^T, over the singular values that are not zero to rounding.

    Where X lacks rank the factor is the partial isometry: null directions map to 0, and zeros give zeros.

    Args:
        X: (..., m, n), any floating dtype; bfloat16 and float16 are decomposed in float32.

    Returns:
        (..., m, n) in X's dtype.
    """
    Y = X if X.dtype in (torch.float32, torch.float64) else X.float()
    U, S, Vh = torch.linalg.svd(Y, full_matrices=False)  # (k, m, p), (k, p), (k, p, n)
    rounding = torch.finfo(Y.dtype).eps * max(Y.shape[-2:])
    O: Tensor = (U * (rounding * S.amax(-1, keepdim=True) < S).unsqueeze(-2)) @ Vh  # noqa: E741
    return O.to(X.dtype)
