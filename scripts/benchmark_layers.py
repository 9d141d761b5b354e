"""Time attention and the head with its loss, each written in several ways: `python scripts/benchmark_layers.py`.

Each way makes forward and backward passes of 4096 tokens, in turns with the others; median milliseconds are printed as
Markdown. `LONGEST` and `BLOCK` of muown_train/models/attention.py and `CHUNK_LOGITS` of loss.py were chosen by this
script.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from muown_train.cli.errors import CommandParser, parse_count
from muown_train.cli.process import run_script
from muown_train.models import attention, loss
from muown_train.runtime.hardware import get_device_name

TOKENS = 4096
LENGTHS = (128, 256, 512, 1024, 2048)
HEADS = ((4096, 256), (50280, 768))  # vocabulary, width
DTYPES = (torch.bfloat16, torch.float32)

Ways = dict[str, Callable[[], Tensor]]  # implementations by name


def time_in_turns(ways: Ways, rounds: int) -> list[str]:
    """Return the median milliseconds of each way's forward and backward pass, as text."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way().sum().backward()
            if i:
                seconds[name].append(time.perf_counter() - started)
    return [f"{statistics.median(times) * 1e3:.1f}" for times in seconds.values()]


def make_attention_ways(length: int, dtype: torch.dtype, heads: int = 4, size: int = 64) -> Ways:
    """Return ways to compute attention of 4 heads of 64 over rows of this length."""
    q, k, v = (torch.randn(TOKENS // length, heads, length, size).to(dtype).requires_grad_() for _ in range(3))

    def attend_in_blocks(least: int) -> Tensor:
        with patch.object(attention, "BLOCK", least):
            return attention.blockwise_attention(q, k, v)

    return {
        "scaled_dot_product_attention": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True),
        "whole": partial(attend_in_blocks, length),
        **{f"blocks of {least} or T/4": partial(attend_in_blocks, least) for least in (64, 128, 256)},
    }


def make_head_ways(vocab_size: int, dim: int, dtype: torch.dtype) -> Ways:
    """Return ways to compute the head and its loss: all at once, and chunk by chunk."""
    x = torch.randn(TOKENS, dim).to(dtype).requires_grad_()
    weight = (torch.randn(vocab_size, dim) * 0.02).requires_grad_()
    targets = torch.randint(vocab_size, (TOKENS,))

    def compute_whole() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")

    def compute_in_chunks(rows: int) -> Tensor:
        enabled = dtype == torch.bfloat16
        with patch.object(loss, "choose_chunk_rows", lambda *_: rows), torch.autocast("cpu", enabled=enabled):
            return loss.linear_cross_entropy(x, weight, targets)

    chunked = {f"{rows} rows": partial(compute_in_chunks, rows) for rows in (256, 512, 768, 1024, 2048)}
    return {"all logits": compute_whole, **chunked}


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--rounds", type=parse_count(), default=7, help="passes of each way (default 7)")
    parser.add_argument("--threads", type=parse_count(most=1024), help="number of threads (default all cores)")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(f"{get_device_name(torch.device('cpu'))}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    cases = {f"attention, T={n}, {str(d)[6:]}": partial(make_attention_ways, n, d) for d in DTYPES for n in LENGTHS}
    cases |= {f"head, V={v}, D={n}, {str(d)[6:]}": partial(make_head_ways, v, n, d) for v, n in HEADS for d in DTYPES}
    header: list[str] = []
    for name, case in cases.items():
        ways = case()
        if list(ways) != header:
            header = list(ways)
            print("\n| | " + " | ".join(header) + " |\n|---|" + "---:|" * len(header))
        print(f"| {name} | " + " | ".join(time_in_turns(ways, arguments.rounds)) + " |", flush=True)


if __name__ == "__main__":
    run_script(main)
