"""The orthogonal factor of a matrix: X = U S V^T -> U V^T, exactly or by Newton-Schulz iteration.

Everything here is batched: X is (..., m, n) and each of its matrices is treated on its own.

The quintic iteration and its coefficients are Keller Jordan's (https://kellerjordan.github.io/posts/muon/),
as in torch.optim.Muon: singular values end between about 0.7 and 1.2 rather than at 1. Unlike
torch.optim.Muon, which always iterates in bfloat16, the dtype is an argument: by default bfloat16 where the
device multiplies matrices in it natively.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

NS_COEFFICIENTS = (3.4445, -4.775, 2.0315)  # chosen for the steepest slope at zero; source above
NS_EPS = 1e-7
NS_STEPS = 5

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

    On a GPU: emulation does not count. On a CPU: AMX or AVX-512 bfloat16 instructions. Other devices: False.
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
        return bool(found.get("amx_bf16") or found.get("avx512_bf16"))
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
    X: Tensor,
    steps: int = NS_STEPS,
    coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
    eps: float = NS_EPS,
    dtype: torch.dtype | str | None = None,
) -> Tensor:
    """Approximate U V^T by `steps` of Y <- a Y + (b Y Y^T + c (Y Y^T)^2) Y, started at Y = X / ||X||_F.

    Args:
        X: (..., m, n), any floating dtype. Not modified.
        steps: iterations.
        coefficients: (a, b, c) of the quintic.
        eps: the least norm that X is divided by; zeros stay zeros.
        dtype: to iterate in, or its name; None for `default_dtype`.

    Returns:
        (..., m, n) in X's dtype.
    """
    a, b, c = coefficients
    used = default_dtype(X.device, X.dtype) if dtype is None else _DTYPES[dtype_name(dtype)]
    tall = X.shape[-2] > X.shape[-1]
    Y = X.to(used)
    Y = Y.mT if tall else Y  # Y Y^T is then the smaller of the two Gram matrices
    Y = Y / torch.linalg.vector_norm(Y, dim=(-2, -1), keepdim=True).clamp(min=eps)
    shape = Y.shape
    if Y.ndim > 3:
        Y = Y.reshape(-1, *shape[-2:])
    multiply_add = torch.addmm if Y.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = Y @ Y.mT  # (k, m, m), m <= n
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        Y = multiply_add(Y, polynomial, Y, beta=a)
    Y = Y.reshape(shape)
    return (Y.mT if tall else Y).to(X.dtype)


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
