"""What the parts `optimizers` and `attention` of check_gpu.py measure; benchmark_optim.py has the optimizers."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import benchmark_optim
import torch
import torch.nn.functional as F
from gpu_limits import TINY, Limits, Model, Row
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from muown_train.models.gpt import compute_mlp_hidden
from muown_train.optim import SOAP, Muon, Muown, NorMuon
from muown_train.optim.core.orthogonalize import NS_STEPS, count_flops, newton_schulz
from muown_train.optim.core.skip_step import step_or_skip
from muown_train.runtime.benchmark import measure_peak_memory, time_call


class FlaggedStep:
    """An optimizer whose step obeys a flag on the device, as in the trainer."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer, self.flag = optimizer, torch.zeros((), device=device)

    def step(self) -> None:
        step_or_skip(self.optimizer, self.flag)


def list_shapes(model: Model) -> list[tuple[int, int, tuple[int, ...] | None]]:
    """Return rows, columns and row blocks of the matrices of a layer."""
    dim, hidden = model.dim, 2 * model.dim if model is TINY else compute_mlp_hidden(model.dim)
    return [(3 * dim, dim, (dim,) * 3), (dim, dim, None), (2 * hidden, dim, None), (dim, hidden, None)]


def measure_optimizers(limits: Limits) -> Iterator[Row]:
    """Measure whole steps, the kernels that they launch, and steps of the matrices of one shape."""
    device = str(limits.device)
    for name, model in limits.models.items():
        benchmark_optim.SIZES[name] = (list_shapes(model), model.layers)
        yield from time_steps(name, device, limits)
        yield time_soap(name, model, device)
    for name, model in limits.models.items():
        if limits.left > 20 or limits.dry_run:
            yield from time_shapes(name, model, limits)


def make_steps(groups: Callable[[], list[dict]], device: torch.device, compiled: bool) -> dict[str, Any]:
    """Return the matrix optimizers of the package as the trainer steps them, each with parameters of its own."""
    made: dict[str, torch.optim.Optimizer] = {
        "Muon": Muon(groups(), adjust_lr_fn="match_rms_adamw"),
        "Muown": Muown(groups()),
        "NorMuon": NorMuon(groups()),
    }
    if compiled:
        for optimizer in made.values():
            optimizer.step()  # the first step has no flag, and would be compiled on its own
            optimizer.compile()  # type: ignore[attr-defined]
    return {f"{name}{', compiled' * compiled}": FlaggedStep(each, device) for name, each in made.items()}


def time_steps(name: str, device: str, limits: Limits) -> Iterator[Row]:
    """Yield the time and the kernels of a step of each optimizer with all matrices of a model."""
    own = partial(benchmark_optim.make_own, name, device)
    plain = benchmark_optim.remove_blocks
    contenders: dict[str, Any] = {
        "torch.optim.Muon": torch.optim.Muon(plain(own()), adjust_lr_fn="match_rms_adamw"),
        "AdamW, fused": torch.optim.AdamW(plain(own()), fused=True),
        "Muon, fused as one": FlaggedStep(Muon(plain(own()), adjust_lr_fn="match_rms_adamw"), limits.device),
        "Muown, no flag": Muown(own()),
        **make_steps(own, limits.device, False),
    }
    if limits.left > 30 or limits.dry_run:  # compiling takes most of it
        contenders |= make_steps(own, limits.device, True)
    for contender in contenders.values():
        contender.step()  # the first step of an optimizer waits for its flag
    seconds = benchmark_optim.measure(contenders, 2 if limits.dry_run else 15, device)
    base = seconds["torch.optim.Muon"]
    for contender_name, times in seconds.items():
        yield {
            "table": f"optimizer step with the matrices of {name}",
            "": contender_name,
            "ms": statistics.median(times) * 1e3,
            "of torch.optim.Muon": statistics.median(t / b for t, b in zip(times, base, strict=True)),
            "kernels": count_kernels(contenders[contender_name].step, limits.device),
            "extra memory, MiB": measure_peak_memory(contenders[contender_name].step, device) / 2**20,
        }


def count_kernels(step: Callable[[], object], device: torch.device) -> int | None:
    """Return how many kernels a step launches; None on a CPU."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    launches = [event.name for event in profiler.events() if event.name.startswith(("cudaLaunchK", "cuLaunchK"))]
    return len(launches) if device.type == "cuda" else None


def time_soap(name: str, model: Model, device: str) -> Row:
    """Return the time of ten steps of SOAP, one of which refines its eigenvectors, with the matrices of a layer."""
    benchmark_optim.SIZES["one layer"] = (list_shapes(model), 1)
    optimizer = SOAP(benchmark_optim.make_own("one layer", device))
    first = benchmark_optim.time_step(optimizer.step, device)
    seconds = [benchmark_optim.time_step(optimizer.step, device) for _ in range(10)]
    mean, median = statistics.mean(seconds) * 1e3, statistics.median(seconds) * 1e3
    row = {"table": "SOAP, one layer", "": name, "first step, ms": first * 1e3, "median, ms": median, "mean, ms": mean}
    return {**row, "all layers, ms": mean * model.layers}


def time_shapes(name: str, model: Model, limits: Limits) -> Iterator[Row]:
    """Yield the time of Newton-Schulz, and of steps of Muon and Muown, with all matrices of each shape of a model."""
    numbers: Counter[tuple[int, int]] = Counter()
    for m, n, blocks in list_shapes(model):
        for rows in blocks or (m,):
            numbers[rows, n] += model.layers
    rounds, device = 2 if limits.dry_run else 11, limits.device
    for (m, n), k in numbers.items():
        X = torch.randn(k, m, n, device=device)
        benchmark_optim.SIZES["shape"] = ([(m, n, None)], k)
        own = partial(benchmark_optim.make_own, "shape", str(device))
        steps = {"Newton-Schulz": partial(newton_schulz, X)}
        for compiled in (False, True):
            steps |= {key: each.step for key, each in make_steps(own, device, compiled).items() if "Nor" not in key}
        row = {"table": f"matrices of {name} by shape, ms", "shape": f"{k} of {m} x {n}"}
        for key, step in steps.items():
            for _ in range(3):
                step()
            row[key] = statistics.median(time_call(step, device) for _ in range(rounds)) * 1e3
        row["Muown's extra, compiled"] = row["Muown, compiled"] - row["Muon, compiled"]
        row["Newton-Schulz, TFLOP/s"] = k * count_flops(m, n, NS_STEPS) / row["Newton-Schulz"] / 1e9
        yield row


def measure_attention(limits: Limits) -> Iterator[Row]:
    """Yield the time of a forward and backward pass of each implementation of attention, for the models' shapes."""
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    for name, model in limits.models.items():
        shape = (model.micro_batch, model.seq_len, 3, model.heads, model.dim // model.heads)
        qkv = torch.randn(shape, device=limits.device, dtype=torch.bfloat16)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # v is strided as in the model; rotation leaves q and k contiguous
        q, k, v = (x.requires_grad_() for x in (q.contiguous(), k.contiguous(), v.detach()))
        taken = SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, True)).name.removesuffix("_ATTENTION").lower()
        row: Row = {"table": "attention, forward and backward, ms", "": name, "shape": str(tuple(q.shape))}
        row["taken"] = taken
        row["by itself"] = time_attention(q, k, v, limits)
        for backend in backends:
            try:
                with sdpa_kernel(backend):
                    milliseconds = time_attention(q, k, v, limits)
            except RuntimeError:  # torch says so where an implementation does not exist for a device or a shape
                milliseconds = None
            row[backend.name.removesuffix("_ATTENTION").lower()] = milliseconds
        yield row


def time_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, limits: Limits) -> float:
    """Return the median milliseconds of a forward and backward pass."""
    gradient = torch.randn_like(q)

    def go() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

    for _ in range(2):
        go()
    return statistics.median(time_call(go, limits.device) for _ in range(2 if limits.dry_run else 15)) * 1e3
