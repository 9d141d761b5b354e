"""Trajectories of independent implementations (golden/README.md)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from muown_train.optim import Muon, Muown

FOLDER = Path(__file__).parent / "golden"
CASES = json.loads((FOLDER / "muown_muon.json").read_text())


@pytest.fixture(scope="module")
def tensors():
    return load_file(FOLDER / "muown_muon.safetensors")


def make(case, w0):
    parameter = torch.nn.Parameter(w0.clone())
    group = {"params": [parameter]}
    if "split_blocks" in case:
        group["blocks"] = (w0.shape[0] // case["split_blocks"],) * case["split_blocks"]
    shared = {k: case[k] for k in ("momentum", "nesterov", "weight_decay")}
    if case["algorithm"] == "muon":
        return parameter, Muon([group], adjust_lr_fn="match_rms_adamw", ns_dtype="bfloat16", **shared)
    exact = "SVD" in case["orthogonalizer"]
    optimizer = Muown(
        [group],
        betas=case["betas"],
        adam_eps=case["eps"],
        magnitude=case.get("magnitude", "adam"),
        orthogonalizer="svd" if exact else "newton_schulz",
        ns_dtype="bfloat16" if "tolerance" in case else None,
        **shared,
    )
    return parameter, optimizer


def tolerance(case):
    if "tolerance" in case:
        return 0.1
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
            error = (parameter - expected[i]).norm() / (expected[i] - w0).norm()
            assert error < tolerance(case)
    if case.get("magnitudes_crossed_zero"):
        assert (optimizer.state[parameter]["magnitude"] < 0).any()
