"""The runs that a configuration may go on with."""

from pathlib import Path

import pytest

from muown_train.config.resume_check import check_same_run

GPT = {"_target_": "muown_train.models.gpt.GPT", "vocab_size": 97, "layers": 2, "dim": 32, "heads": 2, "seq_len": 16}


def check(old, new) -> None:
    check_same_run(Path("run"), {"config": {"model": GPT | old, "seed": 0}}, {"model": GPT | new, "seed": 0})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"init_std": 0.02}),
        ({"init_std": 0.02}, {}),
        ({}, {"mlp_hidden": None}),
        ({"activation_checkpointing": 1}, {}),
        ({"checkpointed": 1}, {"activation_checkpointing": 2}),
    ],
    ids=str,
)
def test_settings_of_another_version_are_those_that_it_had(old, new):
    check(old, new)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({}, {"init_std": 0.07}, "model.init_std=0.02, this one has model.init_std=0.07"),
        ({"init_std": 0.07}, {}, "model.init_std=0.07, this one has model.init_std=0.02"),
        ({"dim": 64}, {}, "model.dim=64, this one has model.dim=32"),
        ({"left": 1}, {}, "model.left=1, this one has model.left=None"),
        (
            {"_target_": "muown_train.models.qwen2.Qwen2", "mlp_hidden": 80},
            {},
            "model._target_=muown_train.models.qwen2.Qwen2, this one",
        ),
    ],
)
def test_other_settings_are_refused(old, new, message):
    with pytest.raises(ValueError, match=rf"^run holds a run with {message}"):
        check(old, new)
