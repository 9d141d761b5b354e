"""Time one step of the optimizers side by side: `python scripts/benchmark_optim.py [--size small] [--rounds 21]`.

Every round times one step of every contender on the same gradients, in an order that rotates, so that what disturbs
the machine disturbs all of them. The table has medians, medians of each round's ratio to the first contender, and the
most memory that a step takes besides parameters, gradients and state. `--compile` adds compiled contenders, `--ranks 2`
compares sharded with replicated optimizers over gloo (over NCCL where each rank has a GPU).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from muown_train.cli.errors import CommandParser, parse_count
from muown_train.cli.process import run_script
from muown_train.optim import Muon, Muown, shard
from muown_train.optim.core.orthogonalize import has_fast_bfloat16
from muown_train.runtime.benchmark import measure_peak_memory, parse_device

# size -> rows, columns and row blocks of the matrices of one layer, and the number of layers
SIZES = {
    "small": ([(768, 256, (256,) * 3), (256, 256, None), (1536, 256, None), (256, 768, None)], 6),
    "124m": ([(2304, 768, (768,) * 3), (768, 768, None), (4096, 768, None), (768, 2048, None)], 12),
}


def make_matrices(size: str, dtype: torch.dtype, device: str) -> list[dict]:
    """Return parameter groups of a model's matrices, with gradients."""
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


def remove_blocks(groups: list[dict]) -> list[dict]:
    """Return the groups with every fused matrix as one, as torch.optim.Muon takes it."""
    return [{"params": group["params"]} for group in groups]


def orthogonalize_one_by_one(X: Tensor) -> Tensor:
    """Iterate as in a textbook, in X's dtype, on each matrix of a batch alone; others are compared with this loop."""
    return torch.stack([iterate_textbook(x) for x in X]) if X.ndim == 3 else iterate_textbook(X)


def iterate_textbook(x: Tensor) -> Tensor:
    y = x.T if x.shape[0] > x.shape[1] else x
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.775 * gram + 2.0315 * gram @ gram) @ y
    return y.T if x.shape[0] > x.shape[1] else y


def make_own(size: str, device: str) -> list[dict]:
    """Return parameters for one contender alone."""
    return make_matrices(size, torch.float32, device)


def make_contenders(size: str, device: str, compiled: bool) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that are compared, each with parameters of its own."""
    optimizers = {
        "torch.optim.Muon": torch.optim.Muon(remove_blocks(make_own(size, device)), adjust_lr_fn="match_rms_adamw"),
        "Muon": Muon(make_own(size, device), adjust_lr_fn="match_rms_adamw"),
        "Muon, fused as one": Muon(remove_blocks(make_own(size, device)), adjust_lr_fn="match_rms_adamw"),
        "Muown": Muown(make_own(size, device)),
        "Muown, fused as one": Muown(remove_blocks(make_own(size, device))),
        "Muown, magnitude fixed": Muown(make_own(size, device), magnitude="fixed"),
        "Muown, float32": Muown(make_own(size, device), ns_dtype="float32"),
        "Muown, float32, loop": Muown(make_own(size, device), orthogonalizer=orthogonalize_one_by_one),
    }
    if compiled:
        optimizers["Muon, compiled"] = Muon(make_own(size, device), adjust_lr_fn="match_rms_adamw")
        optimizers["Muown, compiled"] = Muown(make_own(size, device))
        for name in ("Muon, compiled", "Muown, compiled"):
            optimizers[name].compile()
    return optimizers


def make_replicated_and_sharded(size: str, device: str) -> dict[str, torch.optim.Optimizer]:
    """Return Muown with all work on every rank, and spread over the ranks."""
    return {"replicated": Muown(make_own(size, device)), "sharded": shard(Muown(make_own(size, device)))}


def time_step(step: Callable[[], object], device: str) -> float:
    """Return the seconds of one call, including the device's work and that of all ranks."""

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def measure(optimizers: dict[str, torch.optim.Optimizer], rounds: int, device: str) -> dict[str, list[float]]:
    """Return the seconds of each contender's step, round by round."""
    names = list(optimizers)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for optimizer in optimizers.values():
        optimizer.step()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(time_step(optimizers[name].step, device))
    return seconds


def make_table(title: str, optimizers: dict[str, torch.optim.Optimizer], rounds: int, device: str) -> str:
    """Measure the optimizers and return the table as Markdown."""
    seconds = measure(optimizers, rounds, device)
    first, base = next(iter(seconds.items()))
    rows = [f"\n| {title} | step, ms | of {first} | extra memory, MiB |", "|---|---:|---:|---:|"]
    for name, times in seconds.items():
        ratio = statistics.median(t / b for t, b in zip(times, base, strict=True))
        memory = measure_peak_memory(optimizers[name].step, device) / 2**20
        rows.append(f"| {name} | {statistics.median(times) * 1e3:.1f} | {ratio:.2f} | {memory:.1f} |")
    return "\n".join(rows)


def run_rank(rank: int, arguments: argparse.Namespace, store: str) -> None:
    """Measure sharded and replicated optimizers on one rank of `--ranks`; rank 0 prints the table."""
    device, backend = ("cuda", "nccl") if arguments.device == "cuda" else ("cpu", "gloo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(arguments.threads)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    for size in arguments.size:
        title = f"{size}, {arguments.ranks} ranks"
        text = make_table(title, make_replicated_and_sharded(size, device), arguments.rounds, device)
        if rank == 0:
            print(text, flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--size", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=parse_count(), default=15, help="steps of each contender (default 15)")
    parser.add_argument(
        "--threads",
        type=parse_count(most=1024),
        help="threads of a process (default all cores; with --ranks its share)",
    )
    parser.add_argument("--device", type=parse_device, default="auto", help="cpu or cuda")
    parser.add_argument("--compile", action="store_true", help="add compiled optimizers")
    parser.add_argument(
        "--ranks", type=parse_count(most=1024), default=1, help="compare replicated with sharded over so many processes"
    )
    arguments = parser.parse_args()
    if arguments.compile and arguments.ranks > 1:
        parser.error("--compile and --ranks are two comparisons: one at a time")
    arguments.threads = arguments.threads or max(1, torch.get_num_threads() // arguments.ranks)
    torch.set_num_threads(arguments.threads)
    native = "" if has_fast_bfloat16(arguments.device) else "no "
    print(f"{arguments.device}, {arguments.threads} threads, {native}native bfloat16, torch {torch.__version__}")
    if arguments.ranks > 1:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run_rank, (arguments, f"{folder}/store"), nprocs=arguments.ranks)
        return
    for size in arguments.size:
        optimizers = make_contenders(size, arguments.device, arguments.compile)
        print(make_table(size, optimizers, arguments.rounds, arguments.device), flush=True)


if __name__ == "__main__":
    run_script(main)
