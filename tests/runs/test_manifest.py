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


def test_what_is_drawn_from_each_source_of_a_mix_is_said(tmp_path, capsys):
    settings = {"steps": 40, "batch_tokens": 128, "autocast": False}
    sources = {"code": {"tokens": 500}, "prose": {"tokens": 10_000}, "web": {}}  # nobody knows the tokens of a stream
    data = {"sources": sources, "drawn_tokens": {"code": 1536, "prose": 1024, "web": 2560}}
    manifest.show(HEAD | {"settings": settings, "data": data}, tmp_path)
    lines = ["  code: 1,536 tokens of 500, 3.1 epochs", "  prose: 1,024 tokens of 10,000", "  web: 2,560 tokens"]
    assert capsys.readouterr().out.splitlines()[-3:] == lines


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
