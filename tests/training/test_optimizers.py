"""Settings of single parameters: whom they reach, what is shown of them, and what is wrong said before a run starts."""

import pytest
import torch
from torch import nn

from muown_train.runs.manifest import describe_groups
from muown_train.training.optimizers import build_optimizer, split_param_groups
from tests.helpers.runs import built


def nothing(settings, section):
    pass


def test_groups_are_divided_and_the_later_pattern_wins():
    group = {"params": [("a.x", 1), ("a.y", 2), ("b.y", 3)], "role": "matrix", "lr": 0.5}
    patterns = {"a.*": {"lr": 1.0, "eps": 2.0}, "*.y": {"lr": 3.0}}
    assert split_param_groups([group], patterns, nothing) == [
        {"params": [("a.x", 1)], "role": "matrix", "lr": 1.0, "eps": 2.0, "patterns": {"a.*": patterns["a.*"]}},
        {"params": [("a.y", 2)], "role": "matrix", "lr": 3.0, "eps": 2.0, "patterns": patterns},
        {"params": [("b.y", 3)], "role": "matrix", "lr": 3.0, "patterns": {"*.y": patterns["*.y"]}},
    ]
    assert split_param_groups([group], {}, nothing) == [group]


@pytest.mark.parametrize("optim", ["muown", "muon", "normuon", "adamw", "lion", "soap"])
def test_matrices_and_the_rest_take_them_from_the_command_line(optim, corpus, tmp_path):
    patterns = "{blocks.*.mlp.out.weight:{lr:0.25},norm.weight:{weight_decay:0.125}}"
    run = built(corpus, tmp_path, f"optim={optim}", f"optim.patterns={patterns}")
    run.close()
    of = {name: group for group in run.metadata["groups"] for name in group["parameters"]}
    assert len(of) == len(list(run.model.parameters()))
    for name, group in of.items():
        assert (group["lr"] == 0.25) == name.endswith("mlp.out.weight")
        assert (group["weight_decay"] == 0.125) == (name == "norm.weight")
    assert of["norm.weight"]["patterns"] == {"norm.weight": {"weight_decay": 0.125}}
    assert describe_groups(run.trainer.optimizer) == run.metadata["groups"]


@pytest.mark.parametrize(
    "patterns, message",
    [
        ("{blocks.*.mlp.proj.weight:{lr:1}}", r"optim.patterns.blocks.\*.mlp.proj.weight matches no parameter"),
        (
            "{blocks.*.mlp.out.weight:{momentun:1}}",
            r"out.weight.momentun is no setting of Muown \(did you mean momentum",
        ),
        ("{norm.weight:{momentum:0.5}}", r"optim.patterns.norm.weight.momentum is no setting of AdamW"),
        ("{norm.weight:{lr:high}}", r"optim.patterns.norm.weight.lr='high' must be a number"),
        # values that only the optimizer can judge, our own and torch's; of the first pattern that is wrong
        ("{blocks.*:{lr:-1}}", r"^optim.patterns.blocks.\*.lr must be .* got -1"),
        ("{blocks.*.mlp.out.weight:{betas:[0.9,2]}}", r"^optim.patterns.blocks.\*.mlp.out.weight.betas must be"),
        (
            "{blocks.*.mlp.*:{lr:2},blocks.1.mlp.out.*:{ns_steps:-1}}",
            r"^optim.patterns.blocks.1.mlp.out.\*.ns_steps must be",
        ),
        ("{embedding.*:{lr:-1}}", r"^optim.patterns.embedding.\*.lr: Invalid learning rate: -1"),
        ("{norm.weight:3}", r"optim.patterns.norm.weight=3 must be a mapping"),
        ("3", r"optim.patterns=3 must be a mapping"),
    ],
)
def test_mistakes(patterns, message, corpus, tmp_path):
    with pytest.raises(ValueError, match=message):
        built(corpus, tmp_path / "runs", f"optim.patterns={patterns}")
    assert not (tmp_path / "runs").exists()


def test_a_wrong_value_elsewhere_is_not_laid_to_a_pattern(corpus, tmp_path):
    patterns = "optim.patterns={blocks.*.mlp.*:{momentum:0.5},embedding.*:{lr:1}}"
    with pytest.raises(ValueError, match=r"^optim.lr must be"):
        built(corpus, tmp_path, patterns, "optim.lr=-1", "optim.rest.lr=1")
    with pytest.raises(ValueError, match=r"^optim.rest.embedding.lr: Invalid learning rate: -1"):
        built(corpus, tmp_path, patterns, "optim.rest.embedding.lr=-1")


def test_weights_of_convolutions_and_experts_reach_the_optimizer_of_matrices():
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3), "experts": nn.Module()})
    model["experts"].up = nn.Parameter(torch.randn(2, 6, 4))
    model["conv"].layout, model["experts"].layout, model["experts"].transposed = "conv", "experts", True
    rest = {"_target_": "torch.optim.AdamW", "lr": 0.5}
    optimizer = build_optimizer(
        {"_target_": "muown_train.optim.Muown", "lr": 0.25, "row_blocks": True, "rest": rest}, model
    )
    assert [group.get("layout") for group in optimizer.param_groups] == ["conv", "experts", None]
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25, 0.5]
