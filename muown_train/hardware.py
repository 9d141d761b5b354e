"""What the machine can do: peak rates for MFU, and the precision that `auto` stands for."""

import platform
from pathlib import Path

import torch

from muown_train.optim.orthogonalize import has_fast_bfloat16

# dense bfloat16 FLOP/s of one device, from the makers' data sheets; matched against the device's name in this order
PEAK_FLOPS = {
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def device_name(device: torch.device) -> str:
    """A name for people: of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU; None where the device is not in the table."""
    if device.type != "cuda":
        return None
    name = device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def wants_autocast(precision: str, device: torch.device) -> bool:
    """Whether forward passes run in bfloat16.

    Args:
        precision: auto (bfloat16 where the device multiplies matrices in it faster), bfloat16 or float32.

    Raises:
        ValueError: another word.
    """
    if precision not in ("auto", "bfloat16", "float32"):
        raise ValueError(f"precision={precision!r} must be auto, bfloat16 or float32")
    return precision == "bfloat16" or (precision == "auto" and has_fast_bfloat16(device))
