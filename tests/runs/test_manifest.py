"""The head of a run's output."""

import pytest

from muown_train.runs import manifest


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(800, "  6.4 epochs: there are 800 tokens to train on"), (5000, None), (4900, None), (None, None)],
)
def test_passing_the_data_several_times_is_said(tmp_path, capsys, tokens, expected):
    settings = {"steps": 40, "batch_tokens": 128, "autocast": False}
    described = {"settings": settings, "parameters": 10, "ranks": 1, "device": "cpu", "init_from": None, "groups": []}
    manifest.show(described | {"data": {"tokens": tokens} if tokens else {}}, tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if "epochs" in line]
    assert lines == [] if expected is None else lines[0].startswith(expected)
