"""scripts/plan.py as a user meets it, the roofline behind it, and the table of GPUs."""

import re
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from muown_train.analysis.cost.memory import Pass, sizes_of
from muown_train.analysis.cost.roofline import FRACTIONS, update_time
from muown_train.models.gpt import GPT
from muown_train.models.language_model import LanguageModel
from muown_train.models.speedrun import Speedrun
from muown_train.models.track3 import Track3
from muown_train.optim import Combined, Muon, Muown, param_groups
from muown_train.runtime import hardware
from tests.helpers.paths import ROOT

SCRIPTS = ROOT / "scripts"


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["plan.py", *words])
        monkeypatch.syspath_prepend(str(SCRIPTS))
        import plan

        plan.main()
        return capsys.readouterr().out

    return call


def test_a_model_of_the_paper(run):
    said = run("model=500m", "optim=muon", "--device", "GH200-96GB", "--ranks", "4")
    assert "511,371,520 parameters: embedding 64,358,400, vector 57,600, matrix 446,955,520" in said
    assert "19,073 updates of 524,288, on each of 4 GPUs 8 micro-batches of 8 x 2048 tokens" in said
    numbers = {name: float(value) for name, value in re.findall(r"^  (\S.+?)  +([\d.]+)  ", said, re.MULTILINE)}
    assert numbers["weights"] == numbers["gradients"] == pytest.approx(4 * 511_371_520 / 2**30, abs=0.01)
    lasting = sum(numbers[name] for name in ("weights", "gradients", "optimizer state"))
    peak = float(re.search(r"fits: ([\d.]+) at most", said)[1])
    assert peak == pytest.approx(lasting + numbers["activations"] + numbers["head, loss, backward"], abs=0.05)
    update = float(re.search(r"([\d.]+) s an update", said)[1])
    assert update == pytest.approx(1.27, rel=0.25)  # what the paper reports on these GPUs


def test_a_known_mfu(run):
    said = run("model=124m", "--mfu", "0.4", "--ranks", "8")
    flops = 6 * (123_568_896 - 25 * 768) + 12 * 12 * 768 * 1024
    tokens = 0.4 * 8 * 989e12 / flops
    assert float(re.search(r"([\d,]+) tokens/s", said)[1].replace(",", "")) == pytest.approx(tokens, rel=1e-3)


def test_what_does_not_fit(run):
    said = run("model=2_7b", "optim=soap", "micro_batch=256", "precision=float32")
    assert "does not fit" in said and "not even micro_batch=1 fits" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "H1000"], "there is no device H1000 (did you mean "),
        (["--ranks", "0"], "--ranks 0 must be 1 or more"),
        (["--ranks", "two"], "argument --ranks: invalid int value: 'two'; see --help"),
        (["--mfu", "40"], "--mfu 40 must be above 0 and at most 1; see --help"),
        (["--divice=H200"], "unrecognized arguments: --divice=H200; see --help"),
        (["model=501m"], "there is no model=501m (did you mean 500m?)"),
        (["model=500m", "--ranks", "3"], "batch_tokens=524288 cannot be made of micro_batch=8 rows"),
        (["model.dim=130"], "model.dim=130 does not split into model.heads=4 heads of even size"),
        (["model.seq_len=5"], "model.seq_len=5 is shorter than seq_len=256"),
        (["optim.lr=-1"], "lr must be a finite number >= 0, got -1"),
        (["schedule.warmup=7"], "warmup"),
        (["precision=fp8"], "precision='fp8' must be auto, bfloat16 or float32"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence(run, capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        run(*words)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and said.startswith("error: ") and said.count("\n") == 1


def test_the_roofline():
    how = Pass(32, 1024, True, compiled=True)
    with torch.device("meta"):
        model = GPT(50280, 12, 768, 12, 1024)
    sizes = sizes_of(model, how)
    matrices, rest = param_groups(model)
    optimizer = Combined(Muown(matrices), torch.optim.AdamW(rest, fused=True))
    card = hardware.find_gpu("H100-80GB")
    one = update_time(sizes, how, card, optimizer, 1, 16, 1)
    least = (model.flops_per_token() - 12 * 12 * 768 * 1024) * 524288 / card.flops
    assert one.products == pytest.approx(least / 0.65, rel=1e-3) and one.gradients == 0
    eager = update_time(sizes, replace(how, compiled=False), card, optimizer, 1, 16, 1)
    assert eager.elementwise > 2 * one.elementwise and eager.products == one.products
    spread = update_time(sizes, how, card, optimizer, 8, 2, 8)
    assert spread.optimizer < one.optimizer / 2 and spread.products == pytest.approx(one.products / 8)
    four_in_a_node = hardware.find_gpu("GH200-96GB")
    near, far = (update_time(sizes, how, four_in_a_node, optimizer, ranks, 1, ranks).gradients for ranks in (4, 8))
    assert far > 2 * near > 0  # another node is reached by the network
    again = update_time(replace(sizes, activation_checkpointing=12), how, card, optimizer, 1, 16, 1)
    assert one.products < again.products < one.products * 4 / 3


def tiny(name: str) -> LanguageModel:
    """Of each architecture, with sizes that differ from one another."""
    if name == "GPT":
        return GPT(97, 3, 48, 3, 32)
    if name == "Speedrun":
        return Speedrun(97, 3, 48, 32, head_dim=16)
    if name == "Track3":
        return Track3(97, 3, 48, 3, 32)
    pytest.importorskip("transformers")
    from muown_train.models.qwen2 import Qwen2

    return Qwen2(97, 3, 48, 6, 2, 80, 32)


@pytest.mark.parametrize("name", ["GPT", "Speedrun", "Track3", "Qwen2"])
def test_what_the_roofline_multiplies_is_what_torch_counts(name):
    model, rows, T = tiny(name), 2, 32
    how, ids = Pass(rows, T, True), torch.randint(97, (rows, T))
    sizes = sizes_of(model, how)
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert sizes.hidden == {"GPT": 256, "Speedrun": 192, "Track3": 192, "Qwen2": 80}[name]
    # plain attention: of its products torch counts 2 forward and 4 backward, over all pairs
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, ids).backward()
    counted = {str(operation): flops for operation, flops in counter.get_flop_counts()["Global"].items()}
    pairs = counted.pop("aten.bmm")
    assert pairs + sum(counted.values()) == model.flops_per_token() * rows * T

    matrices, rest = param_groups(model)
    optimizer, card = Combined(Muon(matrices), torch.optim.AdamW(rest)), hardware.find_gpu("H100-80GB")
    update = update_time(sizes, how, card, optimizer, 1, 1, 1)
    assert update.products * card.flops * FRACTIONS["products"] == pytest.approx(sum(counted.values()))
    # of half of the pairs; FlashAttention makes one product once more, 5 backward
    assert update.attention * card.flops * FRACTIONS["attention"] == pytest.approx(pairs / 2 * 7 / 6)


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        (["model=speedrun", "experiment=speedrun_muown"], 123_532_032),
        (["experiment=track3_muown"], 162_354_816),
        (["model=qwen2_0_5b"], 494_032_768),
    ],
    ids=["speedrun", "track3", "qwen2"],
)
def test_other_architectures(run, words, parameters):
    if "qwen2" in words[0]:
        pytest.importorskip("transformers")
    said = run(*words, *(["data.path=x"] if "experiment" in words[-1] else []), "--ranks", "8")
    assert f"{parameters:,} parameters: " in said and "counted as if not compiled: it may be less" in said
    mfu, seconds = (
        float(re.search(r"^MFU ([\d.]+)%:", said, re.M)[1]),
        float(re.search(r"([\d.]+) s an update", said)[1]),
    )
    gigaflops = float(re.search(r"([\d.]+) GFLOP per token", said)[1])
    assert 25 < mfu < 65
    assert seconds == pytest.approx(gigaflops * 1e9 * 524288 / (mfu / 100 * 8 * 989e12), rel=0.01)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_peak_rates_by_the_name_that_torch_gives(name, teraflops):
    with patch.object(hardware, "get_device_name", lambda device: name):
        found = hardware.get_peak_flops(torch.device("cuda"))
    assert found == (teraflops and teraflops * 1e12)
