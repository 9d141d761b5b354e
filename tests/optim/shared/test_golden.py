"""Trajectories of independent implementations (golden/README.md)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from muown_train.optim import SOAP, Lion, Muon, Muown, NorMuon
from tests.helpers.paths import FIXTURES

FOLDER = FIXTURES / "golden"
FILES = ("muown_muon", "normuon_lion_soap")
CASES = {name: case for file in FILES for name, case in json.loads((FOLDER / f"{file}.json").read_text()).items()}


@pytest.fixture(scope="module")
def tensors():
    return {key: tensor for file in FILES for key, tensor in load_file(FOLDER / f"{file}.safetensors").items()}


def make(case, w0):
    parameter = torch.nn.Parameter(w0.clone())
    group = {"params": [parameter]}
    if "split_blocks" in case:
        group["blocks"] = (w0.shape[0] // case["split_blocks"],) * case["split_blocks"]
    return parameter, OPTIMIZERS[case["algorithm"]]([group], case)


def options(case, *names):
    return {name: case[name] for name in names}


def muon(groups, case):
    shared = options(case, "momentum", "nesterov", "weight_decay")
    return Muon(groups, adjust_lr_fn="match_rms_adamw", ns_dtype="bfloat16", **shared)


def muown(groups, case):
    return Muown(
        groups,
        **options(case, "momentum", "nesterov", "weight_decay", "betas"),
        adam_eps=case["eps"],
        magnitude=case.get("magnitude", "adam"),
        orthogonalizer="svd" if "SVD" in case["orthogonalizer"] else "newton_schulz",
        ns_dtype="bfloat16" if "tolerance" in case else None,
    )


def normuon(groups, case):
    shared = options(case, "momentum", "nesterov", "weight_decay", "beta2")
    return NorMuon(groups, adjust_lr_fn="original", ns_dtype="bfloat16", **shared)


def lion(groups, case):
    return Lion(groups, **options(case, "betas", "weight_decay"))


def soap(groups, case):
    shared = options(case, "betas", "eps", "weight_decay", "precondition_frequency", "max_precondition_dim")
    return SOAP(groups, correct_bias=case["correct_bias"], **shared)


OPTIMIZERS = {"muon": muon, "muown": muown, "normuon": normuon, "lion": lion, "soap": soap}


def tolerance(case):
    if "tolerance" in case:
        return 0.1
    if case["algorithm"] in ("lion", "soap"):
        return {"lion": 0.0, "soap": 1e-3}[case["algorithm"]]
    return 1e-7 if "SVD" in case["orthogonalizer"] else 1e-6


@pytest.mark.parametrize("name", CASES)
def test_trajectory(name, tensors):
    case = CASES[name]
    w0, grads, lrs, weights = (tensors[f"{name}/{k}"] for k in ("w0", "grads", "lr", "weights"))
    parameter, optimizer = make(case, w0)
    expected = dict(zip(case["weights_after"], weights, strict=True))
    for i, (G, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        optimizer.param_groups[0]["lr"] = float(lr)
        parameter.grad = G.clone()
        optimizer.step()
        if i in expected:
            error, change = (parameter - expected[i]).norm(), (expected[i] - w0).norm()
            assert error <= tolerance(case) * change  # of SOAP's first step, too, which does not move
    if case.get("magnitudes_crossed_zero"):
        assert (optimizer.state[parameter]["magnitude"] < 0).any()
