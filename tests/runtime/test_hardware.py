"""The device of a process: GPUs that torch does not reach are an error, unless the CPU is asked for."""

from argparse import ArgumentTypeError

import pytest
import torch

from muown_train.config.compose import load_config
from muown_train.runtime.benchmark import parse_device
from muown_train.runtime.distributed import join_world
from muown_train.runtime.hardware import find_device, find_sign_of_gpus

VARIABLES = ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torch_for(monkeypatch):
    """Returns a function that makes torch one that is built for a version of CUDA and sees some GPUs."""

    def make(cuda: str | None, gpus: int = 0) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        empty = torch.empty  # a tensor on a GPU is one on the CPU
        monkeypatch.setattr(torch, "empty", lambda *size, device=None, **options: empty(*size, **options))

    return make


@pytest.fixture
def dev(tmp_path):
    """A folder of devices with a GPU."""
    for name in ("nvidia0", "nvidiactl", "null"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "sign"),
    [
        ({}, "nvidia0"),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_GPUS_ON_NODE": "4"}, None),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, "CUDA_VISIBLE_DEVICES=1,0"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5fb8"}, "CUDA_VISIBLE_DEVICES=GPU-5fb8"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-5fb8"}, "CUDA_VISIBLE_DEVICES=MIG-5fb8"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "SLURM_GPUS_ON_NODE=4"),
        ({"SLURM_GPUS_ON_NODE": "0"}, "nvidia0"),
    ],
    ids=str,
)
def test_signs_of_gpus(monkeypatch, dev, variables, sign):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = find_sign_of_gpus(dev)
    assert found == (str(dev / "nvidia0") if sign == "nvidia0" else sign)


def test_no_sign_of_gpus(monkeypatch, dev):
    assert find_sign_of_gpus(dev / "empty") is None
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as in a job of SLURM without GPUs
    assert find_sign_of_gpus(dev) is None


def test_torch_without_cuda_where_there_are_gpus(torch_for, dev):
    torch_for(None)
    with pytest.raises(
        ValueError, match=r"built without CUDA: `pip install .*whl/cu128` .* --device cpu does"
    ) as error:
        find_device(None, folder=dev)
    assert str(error.value).startswith(f"GPUs are there or asked for ({dev}/nvidia0), but torch {torch.__version__}")
    assert find_device("cpu", folder=dev) == find_device("auto", folder=dev / "none") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"^device=cuda cannot be used: torch \S+ is built without CUDA: `pip install"):
        find_device("cuda", "device=", folder=dev / "none")


def test_torch_that_reaches_no_gpu_is_a_failure_of_the_machine(torch_for, monkeypatch, dev):
    def refuse():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore.")

    torch_for("12.8")
    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(
        ConnectionError, match=r"built for CUDA 12.8, reaches none \(The NVIDIA .*11040\)\.\): `nvidia-smi"
    ):
        find_device(None, "device=", folder=dev)
    assert find_device("cpu", folder=dev) == find_device(None, folder=dev / "none") == torch.device("cpu")


def test_a_gpu_that_torch_reaches(torch_for, dev):
    torch_for("12.8", gpus=4)
    assert [find_device(name, folder=dev) for name in (None, "auto", "cuda")] == [torch.device("cuda:0")] * 3
    assert find_device("auto", local_rank=3, folder=dev) == torch.device("cuda:3")
    assert find_device("cuda:2", local_rank=3, folder=dev) == torch.device("cuda:2")
    assert find_device("cpu", local_rank=3, folder=dev) == torch.device("cpu")
    with pytest.raises(ValueError, match="LOCAL_RANK=4 has no GPU: this machine shows 4, so start at most 4 ranks"):
        find_device("auto", local_rank=4, folder=dev)


@pytest.mark.parametrize(
    ("visible", "torchrun", "works"), [("0", False, True), ("3", False, True), ("3", True, False), (None, False, False)]
)
def test_a_task_of_slurm_that_sees_one_gpu(torch_for, monkeypatch, visible, torchrun, works):
    torch_for("12.8", gpus=1)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    if works:
        assert find_device("auto", local_rank=2) == torch.device("cuda:0")
    else:
        with pytest.raises(ValueError, match="LOCAL_RANK=2 has no GPU"):
            find_device("auto", local_rank=2)


def test_a_world_has_the_device_that_is_asked_for(torch_for, monkeypatch):
    torch_for(None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with join_world(device_name="cpu") as world:
        assert world.device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES=0.* and device=cpu does without GPUs"), join_world():
        pass


def test_device_is_a_setting_that_defines_no_run():
    auto, cpu = load_config([]), load_config(["device=cpu"])
    assert (auto.device, cpu.device, auto.name) == ("auto", "cpu", cpu.name)
    with pytest.raises(ValueError, match="device='cuda:1' must be auto, cpu or cuda"):
        load_config(["device=cuda:1"])


def test_devices_of_benchmarks(torch_for, monkeypatch):
    torch_for("12.8", gpus=2)
    assert [parse_device(word) for word in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda", "cuda", "cuda:1", "cpu"]
    torch_for(None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ArgumentTypeError, match="built without CUDA"):
        parse_device("auto")
    with pytest.raises(ArgumentTypeError, match="device gpu cannot be used"):
        parse_device("gpu")
