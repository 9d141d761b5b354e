"""The device of a process, and properties of devices: rates of GPUs, for MFU and for estimates, and what `auto` is."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from muown_train.optim.core.orthogonalize import has_fast_bfloat16
from muown_train.runtime.suggest import suggest_nearest


@dataclass(frozen=True)
class Gpu:
    """A GPU according to its maker's data sheet; rates are per second.

    The memory is the total that nvidia-smi reports, of which the driver and CUDA take their part.
    """

    name_part: str  # a part of the name that torch gives it
    flops: float  # operations of dense bfloat16 products
    float32_flops: float  # without tensor cores, since torch multiplies float32 in full precision by default
    memory: int  # bytes
    link_bandwidth: float  # bytes each way to the other GPUs of its node
    gpus_per_node: int  # the usual number of GPUs that are linked like this
    network_bandwidth: float = 50e9  # bytes each way from a GPU to other nodes; 400 Gbit/s (InfiniBand NDR) is usual


# Data sheets print the rates of tensor cores with sparsity first; these are halved here. Names are compared in this
# order, so a variant stands before a GPU whose name is a part of its own.
GPUS = {
    # NVIDIA GH200 Grace Hopper Superchip data sheet, with 96 GB of HBM3; four are linked in a node of Alps, each with
    # 200 Gbit/s (Slingshot 11)
    "GH200-96GB": Gpu("GH200", 989e12, 67e12, 97871 * 2**20, 450e9, 4, 25e9),
    # NVIDIA H200 data sheet: NVL (1671 TFLOPS sparse), SXM (1979)
    "H200-NVL": Gpu("H200 NVL", 835e12, 60e12, 143771 * 2**20, 450e9, 4),
    "H200": Gpu("H200", 989e12, 67e12, 143771 * 2**20, 450e9, 8),
    # NVIDIA H100 data sheet: PCIe (1513 TFLOPS sparse), NVL (1671), SXM (1979)
    "H100-PCIe": Gpu("H100 PCIe", 756e12, 51e12, 81559 * 2**20, 64e9, 8),
    "H100-NVL": Gpu("H100 NVL", 835e12, 60e12, 95830 * 2**20, 300e9, 2),
    "H100-80GB": Gpu("H100", 989e12, 67e12, 81559 * 2**20, 450e9, 8),
    # NVIDIA A100 80GB data sheet, SXM; DGX A100 has 200 Gbit/s for each GPU
    "A100-80GB": Gpu("A100", 312e12, 19.5e12, 81920 * 2**20, 300e9, 8, 25e9),
    # NVIDIA L40S data sheet; NVIDIA Ada GPU architecture whitepaper, with float32 accumulation
    "L40S": Gpu("L40S", 362e12, 91.6e12, 46068 * 2**20, 32e9, 8),
    "RTX-4090": Gpu("RTX 4090", 165e12, 82.6e12, 24564 * 2**20, 32e9, 8),
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name in GPUS; the case of letters does not matter.

    Raises:
        ValueError: there is none; the message suggests the nearest name.
    """
    for known_name, gpu in GPUS.items():
        if known_name.lower() == name.lower():
            return gpu
    raise ValueError(f"there is no device {name}{suggest_nearest(name, GPUS)}; there are {', '.join(GPUS)}")


def find_device(
    name: str | None = None, option: str = "--device ", local_rank: int = 0, folder: Path = Path("/dev")
) -> torch.device:
    """Return the device of that name, such as cpu or cuda:1; by default a GPU if there is one, and else the CPU.

    A machine with NVIDIA GPUs that torch does not reach is an error, unless the CPU is asked for: a run that trains on
    the CPU would look like one that is merely slow.

    Args:
        name: None or "auto" for the default; "cuda" is the GPU of `local_rank`.
        option: what comes before the name where the user gives it, for messages.
        local_rank: the number of this process on its machine.
        folder: where the system has its devices.

    Raises:
        ValueError: the machine has no such device, or torch cannot use it.
        ConnectionError: torch is built for GPUs, but reaches none of those that the machine has.
    """
    reached = torch.cuda.is_available()
    if name in (None, "auto"):
        sign = None if reached else find_sign_of_gpus(folder)
        if sign and not (torch.version.cuda or torch.version.hip):
            raise ValueError(f"GPUs are there or asked for ({sign}), but {_explain_build(option)}")
        if sign:
            raise ConnectionError(f"GPUs are there or asked for ({sign}), but {_explain_driver(option)}")
        name = "cuda" if reached else "cpu"
    elif name == "cuda" and not (torch.version.cuda or torch.version.hip):
        raise ValueError(f"{option}cuda cannot be used: {_explain_build(option)}")
    if name == "cuda" and reached:
        name = f"cuda:{_choose_gpu(local_rank)}"
    try:
        device = torch.device(str(name))
        if not torch.amp.is_autocast_available(device.type):
            raise RuntimeError("give cpu or cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises AssertionError
        raise ValueError(f"device {str(name)[:40]} cannot be used: {str(error).splitlines()[0][:200]}") from error
    return device


def find_sign_of_gpus(folder: Path = Path("/dev")) -> str | None:
    """Return what says that this process may use NVIDIA GPUs, such as /dev/nvidia0; None if nothing does.

    CUDA_VISIBLE_DEVICES that names no device hides those that there are.

    Args:
        folder: where the system has its devices.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = re.match(r"\s*(\d|GPU-|MIG-)", visible)  # not -1, nor SLURM's NoDevFiles
        return f"CUDA_VISIBLE_DEVICES={visible}" if named else None
    count = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if count.isdigit() and int(count):
        return f"SLURM_GPUS_ON_NODE={count}"
    # a job of SLURM sees the files of GPUs that it did not ask for, but cannot open them
    files = sorted(folder.glob("nvidia[0-9]*"))
    return next((str(file) for file in files if os.access(file, os.R_OK | os.W_OK)), None)


def _explain_build(option: str) -> str:
    return (
        f"torch {torch.__version__} is built without CUDA: `pip install --force-reinstall torch --index-url "
        "https://download.pytorch.org/whl/cu128` installs one that is built for CUDA 12.8, and "
        f"{option}cpu does without GPUs"
    )


def _explain_driver(option: str) -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it counts none"
    except (RuntimeError, AssertionError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return (
        f"torch {torch.__version__}, built for {built}, reaches none ({reason}): `nvidia-smi` shows whether the driver "
        f"works and is new enough, and {option}cpu does without GPUs"
    )


def _choose_gpu(local_rank: int) -> int:
    """Return the number of this rank's GPU among those that the process sees.

    Raises:
        ValueError: there is none for this rank.
    """
    count = torch.cuda.device_count()
    if local_rank < count:
        return local_rank
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # srun --gpus-per-task=1 shows each task its own GPU, while torchrun's ranks all see the same
    if count == 1 and visible and "," not in visible and "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0
    raise ValueError(f"LOCAL_RANK={local_rank} has no GPU: this machine shows {count}, so start at most {count} ranks")


def get_device_name(device: torch.device) -> str:
    """Return the name of the GPU or of the processor for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def get_peak_flops(device: torch.device) -> float | None:
    """Return the FLOP/s of a GPU for dense bfloat16 products; None if the device is not in GPUS."""
    if device.type != "cuda":
        return None
    name = get_device_name(device)
    return next((gpu.flops for gpu in GPUS.values() if gpu.name_part in name), None)


def wants_autocast(precision: str, device: torch.device) -> bool:
    """Return whether forward passes run in bfloat16.

    Args:
        precision: bfloat16, float32, or auto for bfloat16 where the device multiplies matrices faster in it.
    """
    return precision == "bfloat16" or (precision == "auto" and has_fast_bfloat16(device))
