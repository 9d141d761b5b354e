"""`muown-train plan` as a user meets it, the estimate of time behind it, and the table of GPUs."""

import re
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from muown_train.analysis.cost.step_time import LINK, MFU, OPTIMIZER_MFU, estimate_step_time
from muown_train.cli.commands.plan import main
from muown_train.models.gpt import GPT
from muown_train.models.language_model import LanguageModel
from muown_train.models.parallel import BUCKET_MB
from muown_train.models.speedrun import Speedrun
from muown_train.models.track3 import Track3
from muown_train.optim import Combined, Muon, Muown, param_groups
from muown_train.runtime import hardware
from muown_train.training.plan import describe_time, make_plan


@pytest.fixture
def run(capsys):
    def call(*words: str) -> str:
        main(words)
        return capsys.readouterr().out

    return call


def test_a_model_of_the_paper(run):
    said = run("model=500m", "optim=muon", "--device", "GH200-96GB", "--ranks", "4")
    assert "511,371,520 parameters: embedding 64,358,400, vector 57,600, matrix 446,955,520" in said
    assert "19,073 steps of 524,288, on each of 4 GPUs 8 micro-batches of 8 x 2048 tokens" in said
    numbers = {name: float(value) for name, value in re.findall(r"^  (\S.+?)  +([\d.]+)  ", said, re.MULTILINE)}
    assert numbers["weights"] == numbers["gradients"] == pytest.approx(4 * 511_371_520 / 2**30, abs=0.01)
    lasting = sum(numbers[name] for name in ("weights", "gradients", "optimizer state"))
    peak = float(re.search(r"fits: ([\d.]+) at most", said)[1])
    assert peak == pytest.approx(lasting + numbers["activations"] + numbers["head, loss, backward"], abs=0.05)


@pytest.mark.slow
def test_seven_billion_parameters_fit_on_80_gb_where_ranks_hold_rows(run):
    words = ("model=7b", "--device", "H100-80GB", "--ranks", "16")
    replicated = run(*words, "parallel=ddp")
    assert "does not fit" in replicated and "not even micro_batch=1 fits" in replicated
    assert "copies" not in replicated and "rows 0" not in replicated
    sharded = run(*words)
    assert "parallel=fsdp: 1 copy, each on 16 GPUs" in sharded and "\nfits: " in sharded
    assert "parallel=hsdp: 2 copies, each on 8 GPUs" in run(*words, "parallel=hsdp")


def make_plans(*words, ranks=16, device="GH200-96GB"):
    return (make_plan([*words, f"parallel={kind}"], device, ranks) for kind in ("ddp", "fsdp", "hsdp"))


def test_memory_of_rows():
    ddp, fsdp, hsdp = (plan.memory for plan in make_plans("model=124m", "optim=muown"))
    assert (ddp.weights // 16, ddp.weights // 4) == (fsdp.weights, hsdp.weights)
    assert (fsdp.gradients, hsdp.gradients) == (fsdp.weights, hsdp.weights)
    assert fsdp.state == pytest.approx(hsdp.state / 4, rel=1e-6)
    # a copy of the blocks' weights in bfloat16 is not kept, while the embedding and two blocks are gathered
    model = make_plan(["model=124m"], "GH200-96GB", 1).model
    block = sum(p.numel() for p in model.blocks[0].parameters())
    outside = sum(p.numel() for p in model.parameters()) - 12 * block
    assert fsdp.activations - ddp.activations == 4 * outside + 2 * 2 * block - 2 * 12 * block
    several = make_plan(["model=124m", "parallel=fsdp", "micro_batch=8"], "GH200-96GB", 16)
    assert several.accumulation > 1 and several.memory.gradients == ddp.gradients  # whole until the last one


def test_bytes_of_rows():
    words = ["model=500m", "optim=muown"]
    _, fsdp, hsdp = (plan.step_time for plan in make_plans(*words))
    matrices, link = 446_955_520, LINK * 4 * 25e9
    assert fsdp.rows == pytest.approx(2 * 2 * matrices / 16 * 15 / 16 / link)  # X and O, in bfloat16
    assert hsdp.rows == pytest.approx(2 * 2 * matrices / 4 * 3 / 4 / (LINK * 450e9))
    # the embedding is gathered before each of two forward passes, and its gradients are averaged after the last one
    embedding = 4 * 64_358_400 * 15 / 16 / link
    assert embedding < fsdp.gradients < 1.1 * embedding
    assert 2 * embedding < fsdp.weights < 2.1 * embedding
    slow = make_plan([*words, "parallel=fsdp"], "GH200-96GB", 16, network=0.5).step_time
    assert slow.weights > 4 * fsdp.weights * 50 / 10  # passes no longer hide the blocks
    single = make_plan([*words, "parallel=fsdp"], "GH200-96GB", 1).step_time
    assert (single.gradients, single.weights, single.rows) == (0, 0, 0)


def test_the_papers_step_times():
    words = ["model=500m", "optim=muon"]
    step, replicated = (
        make_plan([*words, f"shard_optimizer={scope}"], "GH200-96GB", 4).step_time.total for scope in ("node", "none")
    )
    assert (step, replicated) == pytest.approx((1.27, 1.34), rel=0.1)
    assert replicated - step == pytest.approx(0.07, rel=0.25)


def test_a_measured_step():
    assert make_plan(["model=124m"], "H200", 1).step_time.total == pytest.approx(
        1.0765, rel=0.02
    )  # docs/performance.md


def test_the_network_between_nodes():
    def describe(*words):
        plan = make_plan(["model=124m", "shard_optimizer=all"], "GH200-96GB", 8, *words)
        return plan.step_time.weights, "\n".join(describe_time(plan, None))

    (usual, text), (given, same), (slow, other) = describe(), describe(25), describe(2.5)
    assert slow == pytest.approx(10 * usual) and given == usual > 0 and text == same
    assert make_plan(["model=124m", "shard_optimizer=node"], "GH200-96GB", 8).step_time.weights < usual / 4
    assert "and 25 to other nodes (network=)" in text and "and 2.5 to other nodes (network=)" in other


@pytest.mark.slow
def test_a_known_mfu(run):
    said = run("model=124m", "--mfu", "0.4", "--ranks", "8")
    flops = 6 * (123_568_896 - 25 * 768) + 12 * 12 * 768 * 1024
    tokens = 0.4 * 8 * 989e12 / flops
    assert float(re.search(r"([\d,]+) tokens/s", said)[1].replace(",", "")) == pytest.approx(tokens, rel=1e-3)


def test_what_does_not_fit(run):
    small = ("--device", "RTX-4090", "model.layers=12", "micro_batch=4")
    said = run("model=2_7b", "optim=soap", "precision=float32", *small)
    assert "does not fit" in said and "not even micro_batch=1 fits" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "H1000"], "there is no device H1000 (did you mean "),
        (["--ranks", "0"], "--ranks 0 must be 1 or more"),
        (["--ranks", "two"], "argument --ranks: invalid int value: 'two'; see --help"),
        (["network=fast"], "network=fast must be a positive number of GB/s"),
        (["network=0"], "network=0.0 must be a positive number of GB/s"),
        (["network=50,25"], "network=50,25 must be a positive number of GB/s"),
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


def test_the_parts_of_a_step():
    with torch.device("meta"):
        model, checkpointed = (GPT(50280, 12, 768, 12, 1024, activation_checkpointing=n) for n in (0, 12))
    matrices, rest = param_groups(model)
    optimizer = Combined(Muown(matrices), torch.optim.AdamW(rest, fused=True))

    def estimate(model=model, gpu="H100-80GB", compiled=True, autocast=True, **ranks):
        return estimate_step_time(model, optimizer, hardware.find_gpu(gpu), 524288, autocast, compiled, **ranks)

    one, peak = estimate(), hardware.find_gpu("H100-80GB").flops
    assert one.model == pytest.approx(model.flops_per_token() * 524288 / (MFU[True] * peak))
    assert one.gradients == one.weights == 0 and one.total == one.model + one.optimizer
    assert one.optimizer < one.model / 40
    assert estimate(compiled=False).model == pytest.approx(one.model * MFU[True] / MFU[False])
    assert estimate(autocast=False).model == pytest.approx(one.model * 989 / 67)
    assert estimate(checkpointed).model == pytest.approx(one.model * 4 / 3)
    spread = estimate(ranks=8, owners=8)
    assert spread.optimizer < one.optimizer / 2 and spread.model == pytest.approx(one.model / 8)
    assert spread.weights == pytest.approx(4 * 123_568_896 / (LINK * 450e9)) and estimate(ranks=8).weights == 0
    # four GPUs are in a node of GH200; the network reaches other nodes
    near, far = (estimate(gpu="GH200-96GB", ranks=ranks, owners=ranks).weights for ranks in (4, 8))
    assert far == pytest.approx(near * 450 / (4 * 25))
    # an optimizer that is spread within nodes sends nothing to others
    assert estimate(gpu="GH200-96GB", ranks=8, owners=4).weights == near


def test_gradients_travel_during_the_last_backward_pass():
    with torch.device("meta"):
        model = GPT(50280, 12, 768, 12, 1024)
    matrices, rest = param_groups(model)
    optimizer, parameters, embedding = Combined(Muown(matrices), torch.optim.AdamW(rest)), 123_568_896, 50280 * 768

    def estimate(link: float, accumulation: int = 1, gradient_bytes: int = 4, ranks: int = 8):
        gpu = replace(hardware.find_gpu("H100-80GB"), link_bandwidth=link)
        return estimate_step_time(model, optimizer, gpu, 524288, True, True, ranks, 1, gradient_bytes, accumulation)

    ring = 2 * 7 / 8 / LINK  # seconds of a byte, times the link's rate
    fast = estimate(450e9)
    assert fast.gradients == pytest.approx(ring * 4 * embedding / 450e9)  # all the others are hidden
    assert 4 * embedding > BUCKET_MB * 2**20
    assert estimate(450e9, gradient_bytes=2).gradients == fast.gradients / 2
    slow, late = estimate(1e9), estimate(1e9, accumulation=4)
    assert slow.gradients == pytest.approx(ring * 4 * parameters / 1e9 - slow.model * 2 / 3)
    assert late.gradients == pytest.approx(ring * 4 * parameters / 1e9 - late.model * 2 / 3 / 4)


def test_the_optimizer_takes_what_its_products_take():
    p = torch.nn.Parameter(torch.empty(1280, 3584, device="meta"))
    gpu = hardware.find_gpu("H100-80GB")
    model = GPT(97, 1, 32, 2, 32)
    one, two = (
        estimate_step_time(model, Combined(Muon([p], ns_steps=steps)), gpu, 1, True, True).optimizer for steps in (1, 2)
    )
    assert two - one == pytest.approx(8 * 1280**3 / (OPTIMIZER_MFU * gpu.flops))  # four products of Gram matrices


def tiny(name: str) -> LanguageModel:
    """A model of each architecture, whose sizes differ from one another."""
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
def test_flops_per_token_is_what_torch_counts(name):
    model, rows, T = tiny(name), 2, 32
    ids = torch.randint(97, (rows, T))
    # plain attention: torch counts its products, 2 forward and 4 backward, over all pairs
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, ids).backward()
    # some versions of transformers compute angles of positions by a tiny product
    assert counter.get_total_flops() == pytest.approx(model.flops_per_token() * rows * T, rel=2e-5)


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        (["model=speedrun", "experiment=speedrun_muown"], 59_831_040),
        (["experiment=track3_muown"], 98_577_792),
        (["model=qwen2_0_5b"], 180_872_704),
    ],
    ids=["speedrun", "track3", "qwen2"],
)
@pytest.mark.slow
def test_other_architectures(run, words, parameters):
    if "qwen2" in words[0]:
        pytest.importorskip("transformers")
    said = run(*words, *(["data.path=x"] if "experiment" in words[-1] else []), "model.layers=3", "--ranks", "8")
    assert f"{parameters:,} parameters: " in said and "counted as if not compiled: it may be less" in said
    mfu, seconds = (
        float(re.search(r"^MFU ([\d.]+)%:", said, re.M)[1]),
        float(re.search(r"([\d.]+) s a step", said)[1]),
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
