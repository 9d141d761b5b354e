"""What machines can do: rates of GPUs, for MFU and for estimates, and the precision that `auto` stands for."""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from muown_train.optim.core.orthogonalize import has_fast_bfloat16
from muown_train.runtime.suggest import suggest_nearest


@dataclass(frozen=True)
class Gpu:
    """A GPU by its maker's data sheet, rates per second.

    Memory is what nvidia-smi reports as the total, of which the driver and CUDA take their part.
    """

    part: str  # of the name that torch gives it
    flops: float  # dense products in bfloat16
    float32: float  # outside of tensor cores, since torch multiplies float32 in full unless told otherwise
    bandwidth: float  # bytes of its memory
    memory: int  # bytes
    link: float  # bytes each way to the other GPUs of its node
    node: int  # GPUs that are commonly linked so


# Rates with sparsity, which data sheets print first for tensor cores, are halved. A name is looked for in this order,
# so that a variant comes before what its name contains.
GPUS = {
    # NVIDIA GH200 Grace Hopper Superchip data sheet, with 96 GB of HBM3; four are linked in a node of Alps
    "GH200-96GB": Gpu("GH200", 989e12, 67e12, 4.0e12, 97871 * 2**20, 450e9, 4),
    # NVIDIA H200 data sheet: NVL (1671 TFLOPS sparse), SXM (1979)
    "H200-NVL": Gpu("H200 NVL", 835e12, 60e12, 4.8e12, 143771 * 2**20, 450e9, 4),
    "H200": Gpu("H200", 989e12, 67e12, 4.8e12, 143771 * 2**20, 450e9, 8),
    # NVIDIA H100 data sheet: PCIe (1513 TFLOPS sparse), NVL (1671), SXM (1979)
    "H100-PCIe": Gpu("H100 PCIe", 756e12, 51e12, 2.0e12, 81559 * 2**20, 64e9, 8),
    "H100-NVL": Gpu("H100 NVL", 835e12, 60e12, 3.9e12, 95830 * 2**20, 300e9, 2),
    "H100-80GB": Gpu("H100", 989e12, 67e12, 3.35e12, 81559 * 2**20, 450e9, 8),
    # NVIDIA A100 80GB data sheet, SXM
    "A100-80GB": Gpu("A100", 312e12, 19.5e12, 2.039e12, 81920 * 2**20, 300e9, 8),
    # NVIDIA L40S data sheet; NVIDIA Ada GPU architecture whitepaper, with float32 accumulation
    "L40S": Gpu("L40S", 362e12, 91.6e12, 0.864e12, 46068 * 2**20, 32e9, 8),
    "RTX-4090": Gpu("RTX 4090", 165e12, 82.6e12, 1.008e12, 24564 * 2**20, 32e9, 8),
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name in GPUS, whatever the case of its letters.

    Raises:
        ValueError: there is none, with the nearest that there is.
    """
    for known, found in GPUS.items():
        if known.lower() == name.lower():
            return found
    raise ValueError(f"there is no device {name}{suggest_nearest(name, GPUS)}; there are {', '.join(GPUS)}")


def find_device(name: str | None) -> torch.device:
    """The device of that name, such as cpu or cuda:1; by default a GPU if there is one, and else the CPU.

    Raises:
        ValueError: there is no such device.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if not torch.amp.is_autocast_available(device.type):
            raise RuntimeError("give cpu or cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ValueError(f"device {name} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def get_device_name(device: torch.device) -> str:
    """A name for people: of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def get_peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU; None where the device is not in the table."""
    if device.type != "cuda":
        return None
    name = get_device_name(device)
    return next((known.flops for known in GPUS.values() if known.part in name), None)


def wants_autocast(precision: str, device: torch.device) -> bool:
    """Whether forward passes run in bfloat16.

    Args:
        precision: auto (bfloat16 where the device multiplies matrices in it faster), bfloat16 or float32.
    """
    return precision == "bfloat16" or (precision == "auto" and has_fast_bfloat16(device))
