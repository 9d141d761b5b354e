"""Time one step of the optimizers side by side: `python scripts/benchmark_optim.py [--size small] [--rounds 21]`.

Every round times one step of every contender on the same gradients, in an order that rotates, so that what disturbs
the machine disturbs all of them. Printed are medians, and medians of each round's ratio to torch.optim.Muon.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from muown_train.optim import Muon, Muown
from muown_train.optim.orthogonalize import has_fast_bfloat16

# rows, columns and row blocks of the matrices of one layer; number of layers
SIZES = {
    "small": ([(768, 256, (256,) * 3), (256, 256, None), (1536, 256, None), (256, 768, None)], 6),
    "124m": ([(2304, 768, (768,) * 3), (768, 768, None), (4096, 768, None), (768, 2048, None)], 12),
}


def matrices(size: str, dtype: torch.dtype, device: str) -> list[dict]:
    """Parameter groups of a model's matrices, with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes, layers = SIZES[size]
    groups = []
    for m, n, blocks in shapes:
        params = []
        for _ in range(layers):
            p = torch.nn.Parameter((torch.randn(m, n, generator=generator) * 0.02).to(device, dtype))
            p.grad = torch.randn(m, n, generator=generator).to(device, dtype)
            params.append(p)
        groups.append({"params": params, "blocks": blocks})
    return groups


def without_blocks(groups: list[dict]) -> list[dict]:
    """The same groups with every fused matrix as one, as torch.optim.Muon takes it."""
    return [{"params": group["params"]} for group in groups]


def one_by_one(X: Tensor) -> Tensor:
    """The textbook iteration on each matrix of a batch alone, in X's dtype: the loop that others are compared with."""
    return torch.stack([_textbook(x) for x in X]) if X.ndim == 3 else _textbook(X)


def _textbook(x: Tensor) -> Tensor:
    y = x.T if x.shape[0] > x.shape[1] else x
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.775 * gram + 2.0315 * gram @ gram) @ y
    return y.T if x.shape[0] > x.shape[1] else y


def contenders(size: str, device: str) -> dict[str, torch.optim.Optimizer]:
    """What is compared, each with parameters of its own."""

    def own() -> list[dict]:
        return matrices(size, torch.float32, device)

    return {
        "torch.optim.Muon": torch.optim.Muon(without_blocks(own()), adjust_lr_fn="match_rms_adamw"),
        "Muon": Muon(own(), adjust_lr_fn="match_rms_adamw"),
        "Muon, fused as one": Muon(without_blocks(own()), adjust_lr_fn="match_rms_adamw"),
        "Muown": Muown(own()),
        "Muown, magnitude fixed": Muown(own(), magnitude="fixed"),
        "Muown, float32": Muown(own(), ns_dtype="float32"),
        "Muown, float32, loop": Muown(own(), orthogonalizer=one_by_one),
    }


def timed(step: Callable[[], object], device: str) -> float:
    """Seconds of one call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(optimizers: dict[str, torch.optim.Optimizer], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each round's step."""
    names = list(optimizers)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for optimizer in optimizers.values():
        optimizer.step()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(timed(optimizers[name].step, device))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native = "" if has_fast_bfloat16(arguments.device) else "no "
    print(f"{arguments.device}, {arguments.threads} threads, {native}native bfloat16, torch {torch.__version__}")
    for size in arguments.size:
        seconds = measure(contenders(size, arguments.device), arguments.rounds, arguments.device)
        base = seconds["torch.optim.Muon"]
        print(f"\n| {size} | step, ms | of torch.optim.Muon |\n|---|---:|---:|")
        for name, times in seconds.items():
            ratio = statistics.median(t / b for t, b in zip(times, base, strict=True))
            print(f"| {name} | {statistics.median(times) * 1e3:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
