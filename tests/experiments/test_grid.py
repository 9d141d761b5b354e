"""Experiments of the paper: every file, its runs and their settings, how they stand."""

import dataclasses
import fcntl
import re
import subprocess
import sys

import pytest
import torch
import yaml

from muown_train.config.compose import compose_config
from muown_train.config.overrides import check_overrides
from muown_train.config.schema import parse_config
from muown_train.experiments import grid as grid_module
from muown_train.experiments.archive import collect_run
from muown_train.experiments.cost import estimate_gpu_hours, make_plans
from muown_train.experiments.grid import list_grids, load_grid, pick_evenly
from muown_train.experiments.progress import read_progress, same_settings, summarize
from muown_train.experiments.report.tables import escape_latex
from muown_train.experiments.scale import SCALES
from muown_train.models.language_model import build_model
from muown_train.runs.archive_files import RunArchive
from muown_train.runs.record import get_defining_settings
from muown_train.runtime.formatting import format_lr
from muown_train.training.optimizers import build_optimizer
from muown_train.training.schedule import build_schedule
from tests.helpers.experiments import fill, targets
from tests.helpers.runs import slow_but

RUNS = {  # by hand, from the paper's grids, with a fair series for each of Muon's
    "124m_learning_rate": 2 * 2 * (4 * 8 + 5),
    "124m_weight_decay": 5 * 5 * 3,
    "width": 3 * 12 * 3,
    "500m_multiseed": 3 * 6 * 3,
    "1b": 4 * 6,
    "2_7b": 3 * 5,
    "qwen2_0_5b": 5 * 3,
    "500m_magnitude": 3 * 3,
    "normuon_124m": 11 * 3,
    "spectral_500m": 6,
    "effective_rank_124m": 3,
    "gradient_noise_124m": 3,
    "500m_step_time": 4,
    "speedrun_width": 8 * 3 * 2,
}
OURS = {  # runs, and how many of them the experiment shares with that of learning rates, whatever their seed
    "corpus_learning_rate": (3 * 8 + 6 + 7 + 2 * 5, 3 * 8 + 6 + 7 + 2 * 5),
    "corpus_weight_decay": (2 * 3 * 3, 3 * 3),
    "corpus_width": (4 * 3 + 2 * 5, 2 * 5),
    "corpus_magnitude": (4 + 2 * 3 + 6, 4),
    "corpus_init_std": (2 * 2 * 4, 2 * 4),
    "corpus_fused_qkv": (4 * 3, 2 * 3),
    "corpus_seeds": (7 * 3, 7 * 3),
    "corpus_width_seeds": (2 * 3, 0),
    "corpus_spectral": (5, 4),
    "corpus_effective_rank": (3, 3),
    "corpus_gradient_noise": (3, 3),
    "corpus_copying": (2 * 3 * 6 + 2 * 5 + 2 * 3, 2 * 3 * 6),
    "corpus_width_128": (4 * 5, 0),
    "corpus_width_128_seeds": (4 * 2 * 4, 0),
    "corpus_budgets": (2 * 4 * 2, 0),
    "corpus_budgets_seeds": (2 * 4 * 3, 0),
    "corpus_width_256": (4 * 3 * 2, 0),
}
OF_RANKS = ("replicated", "distributed")
UPDATES = {"67m": 2542, "124m": 4730, "308m": 11444}


def numbers(values):
    """The paper's cells by learning rate, as an experiment has them."""
    return [tuple(value) if isinstance(value, list) else value for value in values]


def test_every_experiment_is_there():
    assert set(list_grids()) == set(RUNS) | set(OURS)


@pytest.fixture(scope="module")
def rates():
    """The settings of all runs of the experiment with learning rates."""
    return [get_defining_settings(point.config) for point in load_grid("corpus_learning_rate").expand()]


@pytest.mark.parametrize("name", slow_but(["corpus_width"], OURS))
def test_runs_of_our_own_are_for_a_cpu_and_shared(name, rates):
    grid = load_grid(name)
    points = grid.expand()
    ours = [get_defining_settings(point.config) for point in points]
    shared = [settings for settings in ours if any(same_settings(one, settings) for one in rates)]
    assert grid.gpus is None and (len(points), len(shared)) == OURS[name]


@pytest.mark.parametrize(  # whose settings are of all kinds
    "name",
    slow_but(["corpus_width"], ["corpus_width", "corpus_width_seeds", "corpus_learning_rate", "corpus_spectral"]),
)
def test_runs_of_our_own_are_other_runs_in_small_too(name, tmp_path):
    """Without data of their own, which need not be there, and each of them another one."""
    grid = load_grid(name, "tiny")
    points = grid.expand()
    assert len(read_progress(grid, points, str(tmp_path))) == OURS[name][0]
    stdlib = compose_config(["data=stdlib"]).data
    for point in {point.curve.key: point for point in points}.values():
        check_overrides(point.overrides)  # or no command could train it
        assert point.config["data"] == compose_config([*point.overrides]).data == stdlib


def test_cells_that_are_one_run(tmp_path):
    grid = load_grid("corpus_magnitude").select(points=1, series=["adam"])
    (point,) = grid.expand()
    with pytest.raises(ValueError, match=f"{point.name} and other are the same run"):
        read_progress(grid, [point, dataclasses.replace(point, name="other")], str(tmp_path))


QUICK = [
    *(("500m_multiseed", scale) for scale in (None, "tiny", "small")),
    *(("qwen2_0_5b", scale) for scale in (None, "tiny")),
    ("width", None),
    ("speedrun_width", "tiny"),
]
EVERY = [(name, scale) for name in RUNS for scale in (None, *SCALES)]


@pytest.mark.parametrize("of", slow_but(QUICK, EVERY), ids=str)
def test_every_run_can_be_built(of):
    name, scale = of
    grid = load_grid(name, scale)
    points = grid.expand()
    assert len(points) == RUNS[name] and len({point.name for point in points}) == RUNS[name]
    assert (
        len({str(get_defining_settings(point.config)) + str(point.seed) for point in points}) == RUNS[name] or grid.same
    )
    seen = set()
    for point in points:
        config = parse_config(point.config, point.name)
        assert (
            point.config["optim"]["lr"] == point.config["optim"]["rest"]["lr"] == point.lr and config.seed == point.seed
        )
        if point.curve.key in seen:
            continue
        seen.add(point.curve.key)
        with torch.device("meta"):
            model = build_model(config.model, config.seq_len)
        build_optimizer(config.optim, model)
        steps, _ = build_schedule(config, sum(p.numel() for p in model.parameters()))
        assert steps > 10 and config.batch_tokens % (config.seq_len * config.micro_batch) == 0
        assert config.batch_tokens == (SCALES[scale].batch_tokens if scale else 524_288)


@pytest.mark.slow
def test_settings_of_runs_that_the_paper_states():
    width = {point.curve.key: point for point in load_grid("width").expand()}
    for series, point in width.items():
        assert (
            point.config["tokens"] / 524_288 == UPDATES[series.rpartition("_")[2]] and point.config["seq_len"] == 2048
        )
    decay = {point.curve.key: point.config["optim"] for point in load_grid("124m_learning_rate").expand()}
    assert {key: optim["weight_decay"] for key, optim in decay.items()} == {
        **dict.fromkeys(("muown_wd0", "muon_wd0", "muon_split_wd0", "soap_wd0", "lion_wd0"), 0),
        "muown_wd0.01": 0.01,
        "muon_wd0.1": 0.1,
        "muon_split_wd0.1": 0.1,
        "soap_wd1e-4": 1e-4,
        "lion_wd0.5": 0.5,
    }
    assert {config["rest"].get("weight_decay", 0) for config in decay.values()} == {0}
    grid = load_grid("gradient_noise_124m")
    noise = grid.expand()
    assert grid.measure == ("gradient_noise --steps 1900,3800,5700,7600,9538",)
    assert load_grid("gradient_noise_124m", "tiny").measure == ("gradient_noise --all",)
    assert {(point.config["tokens"] / 524_288, point.config["keep_every"]) for point in noise} == {(9538, 1900)}
    rates = {"muon_wd0.1": 4e-3, "muon_split_wd0.1": 4e-3, "muown_wd0": 6e-3}
    assert {point.curve.key: point.lr for point in noise} == rates
    qwen2 = load_grid("qwen2_0_5b").expand()[0].config
    assert (qwen2["tokens"] / 524_288, qwen2["model"]["rope_base"]) == (18119, 10_000)
    assert qwen2["data"]["name"] == "sample-10BT"
    speedrun = {point.curve.key: point.config["optim"].get("direction_scale") for point in load_grid(
        "speedrun_width").expand()}  # fmt: skip
    assert speedrun["muon_768"] == 0.1 and speedrun["muown_768"] == 0.2


def test_grids_and_numbers_are_the_papers():
    paper = targets()
    for name, table in paper["tables"].items():
        if name == "500m_step_time_seconds":
            stated = {f"{key}_{how}": {2e-3: value} for how in OF_RANKS for key, value in table[how].items()}
            assert load_grid("500m_step_time").paper == stated
            continue
        grid = load_grid(name)
        rates = table.pop("lr")
        stated = [series for series in grid.curves if "_split" not in series.key]
        assert list(table) == [series.key for series in stated]
        for series in stated:
            assert list(series.lr) == rates
            assert [grid.paper[series.key][lr] for lr in rates] == numbers(table[series.key])
    figures = paper["figures"]
    rates = {series.key: list(series.lr) for series in load_grid("124m_learning_rate").curves}
    for series, values in rates.items():
        expected = figures["124m_learning_rate"]["lion_lr" if series.startswith("lion") else "lr"]
        assert values == expected
    decay = load_grid("124m_weight_decay")
    assert list(decay.values) == figures["124m_weight_decay"]["weight_decay"]
    assert {series.lr for series in decay.curves} == {tuple(figures["124m_weight_decay"]["lr"])}
    for name, powers in (("width", "width"), ("speedrun_width", "speedrun_width")):
        grid = tuple(2.0**power for power in figures[powers]["lr_log2"])
        assert {series.lr for series in load_grid(name).curves} == {grid}
    normuon, of_figure = load_grid("normuon_124m").curves[0].lr, figures["normuon_124m"]
    assert [normuon[0], normuon[-1]] == of_figure["lr_range"] and len(normuon) == of_figure["points"]


@pytest.mark.parametrize("name", slow_but(["2_7b", "qwen2_0_5b"], RUNS))
def test_the_expected_gpu_hours(name):
    grid = load_grid(name)
    plans = make_plans(grid.expand(), grid.gpus.device, grid.gpus.ranks).values()
    hours = sum(estimate_gpu_hours(plan, None) * len(points) for plan, points in plans)
    assert grid.gpu_hours == pytest.approx(hours, rel=0.1)


def test_runs_are_found_by_their_settings(multiseed, tmp_path):
    grid, points = multiseed

    def states():
        return [status.state for status in read_progress(grid, points, str(tmp_path / "runs"), tmp_path / "kept")]

    assert set(states()) == {"missing"}
    first, second, third = points[:3]
    fill(tmp_path / "runs", [first], lambda point: 14.0)  # beside the experiments
    fill(tmp_path / "moved", [second], lambda point: "diverged")
    record = collect_run(tmp_path / "moved" / second.name, second.name)
    RunArchive(tmp_path / "kept" / "500m_magnitude").write({second.name: record})  # the archive of another experiment
    older = tmp_path / "runs" / "another" / "name"
    fill(older.parent, [third], lambda point: 14.0)
    (older.parent / third.name).rename(older)
    config = yaml.safe_load((older / "config.yaml").read_text())
    del config["optim"]["magnitude_lr_scale"], config["model"]["init_std"]  # settings that there were not then
    (older / "config.yaml").write_text(yaml.safe_dump(config | {"name": "x", "cache": "y", "time_limit": 5}))
    assert states() == ["done", "diverged", "done"] + ["missing"] * (len(points) - 3)
    found = read_progress(grid, points, str(tmp_path / "runs"), tmp_path / "kept")
    assert summarize(found) == f"{len(points)} runs: 2 done, 1 diverged, {len(points) - 3} missing"
    assert str(older) in found[2].format_line(40)
    other = grid.expand(["model.init_std=0.03"])[:3]
    assert read_progress(grid, other, str(tmp_path / "runs"))[2].state == "missing"
    (tmp_path / "runs" / grid.folder).mkdir()
    (tmp_path / "runs" / grid.folder / other[2].name).symlink_to(older)
    with pytest.raises(ValueError, match=r"holds a run with model.init_std=0.02, the experiment has 0.03"):
        read_progress(grid, other, str(tmp_path / "runs"))
    (tmp_path / "runs" / grid.folder / other[2].name).unlink()
    del config["diverged_from"]  # one that all runs have
    (older / "config.yaml").write_text(yaml.safe_dump(config))
    assert states()[2] == "missing"
    config["diverged_from"] = third.config["diverged_from"]
    (older / "config.yaml").write_text(yaml.safe_dump(config | {"seq_len": 1024}))
    assert states()[2] == "missing"


def test_a_run_with_other_settings_in_the_place_of_one(multiseed, tmp_path):
    grid, points = multiseed
    fill(tmp_path / grid.folder, points[:1], lambda point: 14.0)
    file = tmp_path / grid.folder / points[0].name / "config.yaml"
    file.write_text(file.read_text().replace("grad_clip: 1.0", "grad_clip: 0.5"))
    with pytest.raises(ValueError, match=r"seed=0 holds a run with grad_clip=0.5, the experiment has 1.0: give"):
        read_progress(grid, points, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("500m_step_time", {"shard_optimizer": "node"}),
        ("500m_step_time", {"probes": {"spectral": {}}}),
        ("spectral_500m", {"probe_every": 50}),
        ("spectral_500m", {"probes": None}),
        ("gradient_noise_124m", {"keep_every": None}),
    ],
)
def test_runs_that_do_not_measure_what_is_asked_for_do_not_count(name, change, tmp_path):
    """What a run measures, and keeps for measurements, and how it is sharded, is no setting that defines it."""
    grid = load_grid(name)
    points = grid.expand()[:2]
    fill(tmp_path / "elsewhere", points, lambda point: 14.0)
    file = tmp_path / "elsewhere" / points[1].name / "config.yaml"
    file.write_text(yaml.safe_dump(dict(points[1].config) | change))
    assert [each.state for each in read_progress(grid, points, str(tmp_path))] == ["done", "missing"]
    (tmp_path / "elsewhere").rename(tmp_path / grid.folder)
    with pytest.raises(ValueError, match=rf"seed=0 holds a run with {next(iter(change))}=.*, the experiment has"):
        read_progress(grid, points, str(tmp_path))


def test_whether_a_run_is_in_training(multiseed, tmp_path):
    grid, points = multiseed
    fill(tmp_path / grid.folder, points[:1], lambda point: 14.0)
    folder = tmp_path / grid.folder / points[0].name
    status = folder / "status.json"
    for state, expected in (("running", "cut off"), ("stopped", "stopped"), ("failed", "failed"), ("?", "cut off")):
        status.write_text(f'{{"state": "{state}", "step": 1, "steps": 2}}')
        found = read_progress(grid, points[:1], str(tmp_path))[0]
        assert found.state == expected and found.needs_training
    status.write_text('{"state": "running"}')
    unborn = tmp_path / grid.folder / points[1].name
    unborn.mkdir()
    for lock in (folder / ".lock", unborn / ".lock"):
        lock.touch()
    with (folder / ".lock").open("w") as one, (unborn / ".lock").open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)
        assert [status.state for status in read_progress(grid, points[:2], str(tmp_path))] == ["running"] * 2
    assert [status.state for status in read_progress(grid, points[:2], str(tmp_path))] == ["cut off", "missing"]


def test_experiments_share_runs():
    adam = load_grid("500m_magnitude").select(series=["adam"]).expand()
    others = load_grid("500m_multiseed").select(series=["muown_wd0"], seeds=1).expand()
    assert len(adam) == len(others) == 3
    for one, other in zip(adam, others, strict=True):
        assert same_settings(get_defining_settings(one.config), get_defining_settings(other.config))


def test_parts_of_a_grid():
    assert pick_evenly([1, 2, 3, 4, 5, 6, 7, 8], 3) == (1, 5, 8) and pick_evenly([1, 2, 3], 1) == (2,)
    assert pick_evenly([1, 2, 3], 9) == pick_evenly([1, 2, 3], 3) == (1, 2, 3) and pick_evenly([1, 2, 3], 2) == (1, 3)
    part = load_grid("124m_learning_rate").select(2, 1, ["lion_wd0", "muon_wd0"])
    assert [(series.key, series.lr) for series in part.curves] == [
        ("lion_wd0", (8e-5, 7.5e-4)),
        ("muon_wd0", (2.5e-4, 8e-3)),
    ]
    assert part.seeds == (0,) and part.scale is None


def test_widths_keep_their_ratio_when_they_shrink():
    models = {point.curve.key: point.config["model"] for point in load_grid("width", "tiny").select(1).expand()}
    assert [models[f"muon_{size}"]["dim"] for size in UPDATES] == [32, 48, 80]
    assert [models[f"muon_{size}"]["heads"] for size in UPDATES] == [2, 3, 5]
    qwen2 = load_grid("qwen2_0_5b", "tiny").select(1).expand()[0].config["model"]
    assert (qwen2["heads"], qwen2["kv_heads"], qwen2["dim"]) == (4, 1, 64)
    assert qwen2["mlp_hidden"] / qwen2["dim"] == pytest.approx(4864 / 896, rel=0.02)
    noise = load_grid("gradient_noise_124m", "tiny").expand()[0].config
    assert noise["keep_every"] == noise["save_every"] == 10 and noise["tokens"] == 30 * 1024
    given = load_grid("width", "tiny").select(1, series=["muon_67m"]).expand(["model.dim=64", "data=random"])
    assert given[0].config["model"]["dim"] == 64 and given[0].config["data"]["_target_"].endswith("random_tokens")
    assert "model.dim=64" in given[0].name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_grid("1bb"), "there is no experiment=1bb (did you mean 1b?); there are 124m"),
        (lambda: load_grid("../optim/muon"), "there is no experiment=../optim/muon"),
        (lambda: load_grid("track3_muon"), "experiment=track3_muon is a single run, not a grid"),
        (lambda: load_grid("1b", "tny"), "there is no scale=tny (did you mean tiny?); there are tiny, small"),
        (lambda: load_grid("1b").select(points=0), "points=0 must be a whole number of at least 1"),
        (lambda: load_grid("1b").select(series=["adam"]), "series=adam: 1b has none of that name; there are"),
        (lambda: load_grid("1b").expand(["seed=4"]), "seed=4 cannot be given to all runs: seeds=N takes"),
        (lambda: load_grid("1b").expand(["optim.lr=1"]), "optim.lr=1 cannot be given to all runs: points=N"),
    ],
)  # fmt: skip
def test_what_cannot_be(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("  report: rates", "  raport: rates"), "experiment: there is no raport (did you mean report?)"),
        (("report: rates", "report: graph"), "there is no report=graph"),
        (("report: rates", "report: rates\n  same: probes"), "same='probes' must be a list of texts"),
        (("report: rates", "report: rates\n  measure: [[spectral]]"), "measure=[['spectral']] must be a list of texts"),
        (
            ("report: rates", "report: rates\n  over: {optim.magnitude: [fixed, adam]}"),
            "must be numbers: make a series",
        ),
        (("  seeds: [0]\n", ""), "'seeds' is missing"),
        (("lr: [3e-3", "lr: [-3e-3"), "series.muown_wd0.lr=[-0.003, 0.002, 0.001, 0.0005] must be learning rates"),
        (("[11.90, ", "["), "paper.muown_wd0 has 3 numbers for 4 learning rates"),
        (("adamw_wd0.1: [", "adamw: ["), "there is no paper.adamw (did you mean adamw_wd0.1?)"),
    ],
)
def test_a_file_that_says_what_cannot_be(change, message, tmp_path, monkeypatch):
    text = (grid_module.CONFIG_DIR / "experiment" / "1b.yaml").read_text()
    assert change[0] in text
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "1b.yaml").write_text(text.replace(*change))
    monkeypatch.setattr(grid_module, "CONFIG_DIR", tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_grid("1b")


def test_learning_rates_as_people_write_them():
    assert [format_lr(lr) for lr in (4e-3, 7.5e-4, 2.0**-10, 0.02, 2.5e-4)] == [
        "4e-3",
        "7.5e-4",
        "2^-10",
        "2e-2",
        "2.5e-4",
    ]
    assert escape_latex("7.5e-4") == r"$7.5 \times 10^{-4}$" and escape_latex("2^-10") == "$2^{-10}$"
    assert escape_latex("14.13 ± 0.004 & 50%_—") == r"14.13 $\pm$ 0.004 \& 50\%\_---"


def test_torch_is_not_loaded():
    program = (
        "import sys, muown_train.experiments.report.write, muown_train.experiments.launch as launch;"
        "from muown_train.experiments.grid import load_grid as load;"
        "load('1b').select(1).expand(); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
