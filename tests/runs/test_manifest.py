"""The head of a run's output."""

import pytest

from muown_train.runs import manifest

HEAD = {"parameters": 10, "ranks": 16, "device": "NVIDIA H100", "device_type": "cuda", "init_from": None, "groups": []}
HEAD |= {"attention": "cuDNN", "parallel": {"kind": "ddp"}, "network": {"name": "IB", "nodes": 2}}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(800, "  6.4 epochs: there are 800 tokens to train on"), (5000, None), (4900, None), (None, None)],
)
def test_passing_the_data_several_times_is_said(tmp_path, capsys, tokens, expected):
    settings = {"steps": 40, "batch_tokens": 128, "autocast": False}
    manifest.show(HEAD | {"settings": settings, "data": {"tokens": tokens} if tokens else {}}, tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if "epochs" in line]
    assert lines == [] if expected is None else lines[0].startswith(expected)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "  device cuda, attention by cuDNN, NCCL over IB"),
        ({"device_type": "cpu", "attention": None, "network": None}, "  device cpu"),
        (
            {"network": {"name": "Socket", "nodes": 2}},
            "  device cuda, attention by cuDNN, NCCL over Socket (TCP) between 2 nodes, which is slow: see NCCL_NET in "
            "slurm/train.sbatch",
        ),
        ({"network": {"name": "Socket", "nodes": 1}}, "  device cuda, attention by cuDNN, NCCL over Socket"),
    ],
)
def test_the_device_and_what_it_computes_with(tmp_path, capsys, changed, line):
    settings = {"steps": 40, "batch_tokens": 128, "autocast": False}
    manifest.show(HEAD | {"settings": settings, "data": {}} | changed, tmp_path)
    assert capsys.readouterr().out.splitlines()[2] == line
