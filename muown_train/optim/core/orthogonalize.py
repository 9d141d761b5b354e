"""The orthogonal factor U V^T of a matrix X = U S V^T: exact, by Newton-Schulz iteration, or by Polar Express.

Everything here is batched: X is (..., m, n), and each of its matrices is treated on its own.

Newton-Schulz: the quintic iteration and its coefficients are Keller Jordan's (https://kellerjordan.github.io/posts/muon/),
as in torch.optim.Muon: singular values end between about 0.7 and 1.2 rather than at 1. torch.optim.Muon always iterates
in bfloat16; here the dtype is an argument, by default bfloat16 where the device multiplies matrices in it natively.

Polar Express (Amsel et al. 2025, "The Polar Express: optimal matrix sign methods and their application to the Muon
algorithm", arXiv 2505.16932): every step has a quintic of its own, the best one for the interval in which the step
before has left the singular values. Given singular values in [l, 1], step k maps those in [l_k, u_k] by the odd quintic
p_k with the least max |1 - p_k| on that interval (their Theorem 3.1: doing so step by step is optimal for the
composition); then l_(k+1) = p_k(l_k) and u_(k+1) = 2 - l_(k+1). Unlike Newton-Schulz it converges: every value goes
to 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

Quintic = tuple[float, float, float]  # (a, b, c) of a x + b x^3 + c x^5

NS_COEFFICIENTS: Quintic = (3.4445, -4.775, 2.0315)  # chosen for the steepest slope at zero; source above
NS_EPS = 1e-7
NS_STEPS = 5

# Polar Express: Algorithm 1 of the paper (and the authors' github.com/NoahAmsel/PolarExpress), with l = 1e-3 and the
# cushion of section 3.4 (p_k is optimal on [max(l_k, 0.02407 u_k), u_k] and then centred). Further steps repeat the
# last quintic.
_OPTIMAL_QUINTICS: tuple[Quintic, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
SAFETY = 1.01  # Algorithm 1 divides x by it before each quintic but the last, and once more before the first

GRAM_ASPECT = 2.0  # ratio of the sides from which on iterating on the Gram matrix is faster; equally fast at 1.5
RESTART = 3  # steps on one Gram matrix before it is computed afresh

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def get_dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a floating-point dtype, which is given itself or by name ("float32", "torch.float32").

    Raises:
        ValueError: for anything but bfloat16, float16, float32 and float64.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"the dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    return name


@functools.cache
def has_fast_bfloat16(device: torch.device | str) -> bool:
    """Return whether this device multiplies bfloat16 matrices natively, so that they are faster than float32 ones.

    On a GPU, emulation does not count. On a CPU it takes AMX, or AVX-512 bfloat16 instructions without AVX-512 float16.
    (Processors with the latter leave bfloat16 to AMX, which a virtual machine may hide: the other instructions run at
    half of float32's rate there, 83 against 160 GFLOP/s on a core of an Emerald Rapids Xeon.) For other devices the
    answer is False.
    """
    device = torch.device(device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and _cpu_has_fast_bfloat16()


def _cpu_has_fast_bfloat16() -> bool:
    get_capabilities = getattr(torch.cpu, "get_capabilities", None)
    if get_capabilities is not None:
        flags = get_capabilities()
        return bool(flags.get("amx_bf16") or (flags.get("avx512_bf16") and not flags.get("avx512_fp16")))
    # Older versions of torch have only private probes, and any of them may be missing.
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        probe = getattr(torch.cpu, name, None)
        if probe is not None and probe():
            return True
    return False


# For a user who compiles a whole step: torch.compiler.assume_constant_result sets this, but imports the compiler.
_cpu_has_fast_bfloat16._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choose_dtype(device: torch.device | str, dtype: torch.dtype, given: torch.dtype | str | None = None) -> torch.dtype:
    """Return the dtype to iterate in: float64 for float64 matrices, else bfloat16 where it is fast, else float32.

    Args:
        given: the user's choice, if there is one.
    """
    if given is not None:
        return _DTYPES[get_dtype_name(given)]
    if dtype == torch.float64:
        return dtype
    return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32


def newton_schulz(
    X: Tensor,
    steps: int = NS_STEPS,
    coefficients: Quintic = NS_COEFFICIENTS,
    eps: float = NS_EPS,
    dtype: torch.dtype | str | None = None,
) -> Tensor:
    """Approximate U V^T by `steps` iterations of Y <- a Y + (b Y Y^T + c (Y Y^T)^2) Y, started at Y = X / ||X||_F.

    Args:
        X: (..., m, n), any floating dtype. It is not modified.
        steps: number of iterations.
        coefficients: (a, b, c) of the quintic.
        eps: the least norm that X is divided by; zeros stay zeros.
        dtype: the dtype to iterate in, or its name; None for that of `choose_dtype`.

    Returns:
        (..., m, n), in X's dtype.
    """
    return apply_quintics(X, [coefficients] * steps, eps, dtype)


def polar_express(X: Tensor, steps: int = 8, eps: float = NS_EPS, dtype: torch.dtype | str | None = None) -> Tensor:
    """Approximate U V^T by `steps` steps of Polar Express.

    After 5 steps all singular values of at least 1e-3 of the norm are within 0.2 of 1, after 8 steps within 1e-6 (in
    exact arithmetic).

    Args:
        X: (..., m, n), any floating dtype. It is not modified.
        steps: number of steps; from the eighth on the quintic is (1.875, -1.25, 0.375).
        eps: the least norm that X is divided by; zeros stay zeros.
        dtype: the dtype to iterate in, or its name; None for that of `choose_dtype`.

    Returns:
        (..., m, n), in X's dtype.
    """
    # Three steps on one Gram matrix would amplify its rounding error 8 * 4 * 4 times, beyond the interval that the next
    # quintic is made for: bfloat16 matrices of sides 1:2 or more then became infinite one time in four.
    return apply_quintics(X, list_polar_express_quintics(steps), eps, dtype, on_gram=False)


def list_polar_express_quintics(steps: int) -> list[Quintic]:
    """Return the quintics of the first `steps` steps from values in [0, 1], with room for rounding."""
    safe = [_scale_input(quintic) for quintic in _OPTIMAL_QUINTICS[:-1]] + [_OPTIMAL_QUINTICS[-1]]
    return [_scale_input(safe[0]), *(safe[min(k, len(safe) - 1)] for k in range(1, steps))]


def _scale_input(quintic: Quintic) -> Quintic:
    """Return the quintic p(x / SAFETY)."""
    a, b, c = quintic
    return a / SAFETY, b / SAFETY**3, c / SAFETY**5


def svd(X: Tensor) -> Tensor:
    """Return the exact factor U V^T, over the singular values that are not zero to rounding.

    If X lacks rank, the factor is the partial isometry: null directions map to 0, and zeros give zeros.

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


def apply_quintics(
    X: Tensor,
    quintics: Sequence[Quintic],
    eps: float = NS_EPS,
    dtype: torch.dtype | str | None = None,
    on_gram: bool = True,
    overwrite: bool = False,
) -> Tensor:
    """Apply odd quintics a x + b x^3 + c x^5, one after the other, to the singular values of X / ||X||_F.

    The extra memory is two copies of X in `dtype` and, with s the shorter side, up to four times (k, s, s).

    Args:
        X, eps, dtype: as in `newton_schulz`, and so is the result.
        on_gram: whether several steps may be taken on one Gram matrix, which steep quintics do not allow.
        overwrite: whether X may be overwritten, which saves a copy if it is in `dtype`.
    """
    Y = X.reshape(-1, *X.shape[-2:])
    # norms are computed in float32 at least, since the squares of float16 overflow
    norms = torch.linalg.vector_norm(Y, dim=(1, 2), keepdim=True, dtype=torch.promote_types(X.dtype, torch.float32))
    used = choose_dtype(X.device, X.dtype, dtype)
    Y = Y.to(used, copy=not overwrite).mul_(norms.clamp(min=eps).reciprocal())
    aspect = max(Y.shape[1:]) / min(Y.shape[1:])
    Y = _iterate_on_gram(Y, quintics) if on_gram and aspect >= GRAM_ASPECT else _iterate_on_matrix(Y, quintics)
    return Y.reshape(X.shape).to(X.dtype)


def count_flops(m: int, n: int, steps: int, on_gram: bool = True) -> int:
    """Return the floating-point operations of the products that `apply_quintics` multiplies for one matrix (m, n).

    Args:
        steps: number of quintics.
        on_gram: as in `apply_quintics`; `polar_express` and torch.optim.Muon always iterate on the matrix.
    """
    s, long = sorted((m, n))
    product, small = 2 * s * s * long, 2 * s**3  # of P Y or a Gram matrix, and of two matrices (s, s)
    if not on_gram or long < GRAM_ASPECT * s:
        return steps * (2 * product + small)
    restarts = math.ceil(steps / RESTART)
    # a restart computes A, its first P, and Q Y; each further step multiplies A P, P (A P), A A and P Q
    return restarts * (2 * product + small) + (steps - restarts) * 4 * small


def _iterate_on_matrix(Y: Tensor, quintics: Sequence[Quintic]) -> Tensor:
    """Iterate as the formula is written; overwrites Y (k, m, n)."""
    spare, A = torch.empty_like(Y), None
    for abc in quintics:
        A = _compute_gram(Y, A)
        Y, spare = _multiply_short_side(_evaluate_quadratic(A, *abc), Y, spare), Y
    return Y


def _iterate_on_gram(Y: Tensor, quintics: Sequence[Quintic]) -> Tensor:
    """Iterate on the small Gram matrix A instead, since p(A) Y has the Gram matrix p(A) A p(A); overwrites Y (k, m, n).

    The long side thus enters only twice per restart. Every step amplifies the rounding error of A, which is therefore
    computed afresh after every third step: with this restart bfloat16 is as accurate as the plain iteration, without it
    it diverges.
    """
    spare, A = torch.empty_like(Y), None
    for start in range(0, len(quintics), RESTART):
        steps = quintics[start : start + RESTART]
        A = _compute_gram(Y, A)
        Q = P = _evaluate_quadratic(A, *steps[0])  # Q is the product of the polynomials
        for abc in steps[1:]:
            torch.bmm(P, A @ P, out=A)
            P = _evaluate_quadratic(A, *abc)
            Q = P @ Q
        Y, spare = _multiply_short_side(Q, Y, spare), Y
    return Y


def _compute_gram(Y: Tensor, out: Tensor | None) -> Tensor:
    """Return the smaller of Y Y^T and Y^T Y, (k, s, s), without a transposed copy."""
    if out is None:
        out = Y.new_empty(Y.shape[0], min(Y.shape[1:]), min(Y.shape[1:]))
    return torch.bmm(Y.mT, Y, out=out) if Y.shape[1] > Y.shape[2] else torch.bmm(Y, Y.mT, out=out)


def _multiply_short_side(P: Tensor, Y: Tensor, out: Tensor) -> Tensor:
    """Return P Y, or Y P where the columns are the shorter side that P (k, s, s) belongs to."""
    return torch.bmm(Y, P, out=out) if Y.shape[1] > Y.shape[2] else torch.bmm(P, Y, out=out)


def _evaluate_quadratic(A: Tensor, a: float, b: float, c: float) -> Tensor:
    """Return a I + b A + c A^2, (k, s, s)."""
    P = torch.baddbmm(A, A, A, beta=b, alpha=c)
    P.diagonal(dim1=-2, dim2=-1).add_(a)  # cheaper than beta=a in the product with Y, which would copy Y first
    return P
