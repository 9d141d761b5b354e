"""action=archive: what is kept of a run, that it is found again as the same run, and what is refused.

The archives of the repository are read too: every run that was archived before code moved still counts.
"""

import functools
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hydra.utils import get_method

from muown_train.cli.commands import reproduce as command
from muown_train.config.compose import flatten
from muown_train.experiments.archive import (
    archive_experiment,
    collect_run,
    cut_absolute_paths,
    remove_places_from_config,
    remove_places_from_manifest,
)
from muown_train.experiments.grid import load_grid
from muown_train.experiments.progress import read_progress
from muown_train.runs import archive_files
from muown_train.runs.archive_files import RunArchive, list_archives
from muown_train.runs.record import group_runs, read_archived_runs, read_run
from tests.helpers.experiments import fill
from tests.helpers.folders import line, write
from tests.helpers.paths import ROOT
from tests.helpers.runs import slow_but, trained

KEPT = ROOT / "docs" / "results" / "runs"
WORDS = ("experiment=500m_magnitude", "scale=tiny", "points=1")
DONE = {
    "corpus_copying": 26,
    "corpus_effective_rank": 3,
    "corpus_fused_qkv": 12,
    "corpus_gradient_noise": 3,
    "corpus_init_std": 16,
    "corpus_learning_rate": 47,
    "corpus_magnitude": 16,
    "corpus_seeds": 21,
    "corpus_spectral": 5,
    "corpus_weight_decay": 18,
    "corpus_width": 22,
    "corpus_width_seeds": 6,
}
FURTHER = ["data=files", "data.train=texts/*.txt", "cache=/home/me/cache"]


@pytest.fixture
def archive(monkeypatch, tmp_path):
    """The folder of archives of the command, empty at first."""
    monkeypatch.setattr(command, "ARCHIVE", tmp_path / "archive")
    return tmp_path / "archive"


@pytest.fixture
def reproduce(capsys, archive):
    def call(*words) -> str:
        assert command.main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return call


@functools.cache
def small():
    """A grid of three runs, and its points."""
    grid = load_grid("500m_magnitude", "tiny").select(1)
    return grid, grid.expand(FURTHER)


def runs(out: Path, *ends) -> list[Path]:
    """The folders of three runs, which end at these perplexities."""
    grid, points = small()
    by_name = dict(zip((point.name for point in points), ends, strict=True))
    fill(out / grid.folder, points, lambda point: by_name[point.name])
    return [out / grid.folder / point.name for point in points]


def archive_runs(out: Path, archive: Path) -> list[str]:
    """Archive runs that `runs` wrote, as the command does; returns what has been done with each."""
    grid, points = small()
    return [outcome for _, outcome in archive_experiment(grid, read_progress(grid, points, str(out)), archive)]


def archived(archive: Path) -> dict[str, list[str]]:
    """The names of the runs in each archive of a folder."""
    return {each.path.name: list(each.entries) for each in list_archives(archive)}


def store(archive: Path, folder: Path) -> None:
    """Put a run's folder into an archive."""
    RunArchive(archive).write({folder.name: collect_run(folder, folder.name)})


def modification_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_runs_that_ended_are_archived_once_and_found_without_their_folders(reproduce, archive, tmp_path):
    done, diverged, missing = runs(tmp_path / "out", 14.0, "diverged", None)
    (done / "checkpoints").mkdir()
    words = (*WORDS, *FURTHER, f"out={tmp_path}/out")
    said = reproduce(*words, "action=archive")
    assert said.count("  archived\n") == 2 and said.startswith("3 runs: 1 done, 1 diverged, 1 missing\n")
    files = {"500m_magnitude-tiny.json", "500m_magnitude-tiny.tar.xz"}
    assert {path.name for path in archive.iterdir()} == files  # and nothing hidden
    kept = RunArchive(archive / "500m_magnitude-tiny")
    assert sorted(kept.entries) == sorted((done.name, diverged.name))
    assert kept.get(done.name).files == {"metrics.jsonl": (done / "metrics.jsonl").read_bytes()}
    assert kept.get(done.name).status == json.loads((done / "status.json").read_text())
    written = modification_times(archive)
    assert reproduce(*words, "action=archive").count("  there already\n") == 2
    assert written == modification_times(archive)
    listed = reproduce(*WORDS, *FURTHER[:2], f"out={tmp_path}/nothing")
    assert listed.endswith("3 runs: 1 done, 1 diverged, 1 missing\n") and "loss 2.6391" in listed
    assert f"2 of them are kept in {archive}\n" in listed
    assert not missing.exists()


def test_a_real_run_loses_its_places_and_no_setting(corpus, tmp_path):
    run = trained(corpus, tmp_path / "out", "tracking=none").folder
    manifest = json.loads((run / "manifest.json").read_text())
    command = [f"data.train={tmp_path}/*.txt", f"out={tmp_path}", "cache=/c", "++name='run'", "tracking.mode=offline"]
    manifest |= {"command": [*command, "optim.lr=0.01"], "origin": f"{tmp_path}/other/checkpoints/step-1"}
    (run / "manifest.json").write_text(json.dumps(manifest))
    RunArchive(tmp_path / "kept").write({"named": collect_run(run, "named")})
    before, after = read_run(run), read_run(tmp_path / "kept" / "named")
    assert len(group_runs([before, after])) == 1 and before.seed == after.seed
    assert (after.config["out"], after.config["cache"], after.config["name"]) == ("runs", None, "named")
    assert after.manifest["command"] == ["data.train=*.txt", "optim.lr=0.01"]
    assert after.manifest["origin"] == "step-1" and after.manifest["groups"] == before.manifest["groups"]
    assert str(tmp_path) not in json.dumps(after.manifest)
    assert before.read_lines("metrics.jsonl") == after.read_lines("metrics.jsonl")
    assert before.columns.keys() == after.columns.keys()


def test_settings_that_define_a_run_stay_and_are_named(reproduce, archive, tmp_path):
    grid, _ = small()
    points = grid.expand(["data=files", f"data.train={tmp_path}/*.txt"])
    fill(tmp_path / "out" / grid.folder, points, lambda point: 14.0)
    words = (*WORDS, "data=files", f"data.train={tmp_path}/*.txt", f"out={tmp_path}/out")
    said = reproduce(*words, "action=archive")
    assert said.count(f"note: data.train={tmp_path}/*.txt is archived with its place on this machine") == 1
    assert reproduce(*words[:-1], f"out={tmp_path}/nothing").endswith("3 runs: 3 done\n")


def test_analysis_that_comes_later_is_added(archive, tmp_path):
    done, *_ = runs(tmp_path / "out", 14.0, None, None)
    assert archive_runs(tmp_path / "out", archive) == ["archived"]
    (done / "analysis").mkdir()
    (done / "analysis" / "spectral.jsonl").write_text('{"step": 2}\n')
    (done / "analysis" / "state.safetensors").write_text("large")
    assert archive_runs(tmp_path / "out", archive) == ["brought up to date: analysis/spectral.jsonl"]
    (done / "analysis" / "spectral.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert archive_runs(tmp_path / "out", archive) == ["brought up to date: analysis/spectral.jsonl"]
    assert archive_runs(tmp_path / "out", archive) == ["there already"]
    kept = RunArchive(archive / "500m_magnitude-tiny").get(done.name).files
    assert kept.keys() == {"metrics.jsonl", "analysis/spectral.jsonl"}
    assert kept["analysis/spectral.jsonl"] == b'{"step": 1}\n{"step": 2}\n'
    (done / "analysis" / "spectral.jsonl").unlink()
    assert archive_runs(tmp_path / "out", archive) == ["there already"]  # and keeps what it alone has
    assert RunArchive(archive / "500m_magnitude-tiny").get(done.name).files == kept


def test_another_run_of_the_same_settings_is_refused_before_anything_is_written(reproduce, archive, tmp_path, capsys):
    runs(tmp_path / "first", None, None, 14.0)
    archive_runs(tmp_path / "first", archive)
    written = modification_times(archive)
    *_, other = runs(tmp_path / "second", 15.0, 15.0, 15.0)
    with pytest.raises(SystemExit):
        reproduce(*WORDS, *FURTHER, f"out={tmp_path}/second", "action=archive")
    said = capsys.readouterr().err
    kept = archive / "500m_magnitude-tiny"
    assert said.startswith(f"error: {kept / other.name} has other metrics than {other}") and said.count("\n") == 1
    assert f"delete {other.name} from {kept}.json to replace it" in said
    assert written == modification_times(archive)
    index = json.loads(Path(f"{kept}.json").read_text())
    Path(f"{kept}.json").write_text(json.dumps({name: index[name] for name in index if name != other.name}))
    assert archive_runs(tmp_path / "second", archive) == ["archived"] * 3  # as the message says
    assert read_run(kept / other.name).last("valid/perplexity") == 15.0


def test_runs_of_two_experiments_with_one_name(reproduce, archive, tmp_path):
    """124m_learning_rate and 2_7b both have a muown_wd0-lr=0.001-seed=0."""
    for name in ("2_7b", "124m_learning_rate", "2_7b"):
        grid = load_grid(name).select(seeds=1, series=["muown_wd0"])
        if not (tmp_path / name).exists():
            fill(tmp_path / name, [point for point in grid.expand() if point.lr == 1e-3], lambda point: 14.0)
        words = (f"experiment={name}", "seeds=1", "series=muown_wd0")
        said = reproduce(*words, f"out={tmp_path}", "action=archive")
        assert "1 done" in reproduce(*words, f"out={tmp_path}/nothing")
    assert "there already" in said
    name = "muown_wd0-lr=0.001-seed=0"
    assert archived(archive) == {"124m_learning_rate": [name], "2_7b": [name]}


def test_runs_that_settings_cannot_tell_apart_are_found_again(reproduce, archive, tmp_path):
    grid = load_grid("500m_step_time")
    fill(tmp_path / "out" / grid.folder, grid.expand(), lambda point: 14.0)
    reproduce("experiment=500m_step_time", f"out={tmp_path}/out", "action=archive")
    statuses = read_progress(grid, grid.expand(), str(tmp_path / "nothing"), archive)
    assert [each.state for each in statuses] == ["done"] * 4 and len({each.folder for each in statuses}) == 4


def test_a_kill_leaves_no_half_of_a_run(archive, tmp_path, monkeypatch):
    runs(tmp_path / "out", 14.0, 14.0, None)

    def write_or_die(path, content):
        if path.suffix == ".json":
            raise KeyboardInterrupt
        path.write_bytes(content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(archive_files, "write_atomic", write_or_die)
        archive_runs(tmp_path / "out", archive)
    assert [path.name for path in archive.iterdir()] == ["500m_magnitude-tiny.tar.xz"]
    assert not read_archived_runs(archive)
    assert archive_runs(tmp_path / "out", archive) == ["archived"] * 2
    assert len(read_archived_runs(archive)) == 2


def test_two_commands_do_not_archive_at_once(archive, tmp_path):
    filelock = pytest.importorskip("filelock")
    runs(tmp_path / "out", 14.0, None, None)
    archive.mkdir()
    with filelock.FileLock(archive / ".lock"), pytest.raises(ValueError, match="another process archives runs to"):
        archive_runs(tmp_path / "out", archive)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("data.train=/home/me/texts/*.txt", "data.train=*.txt"),
        ("data.train=['/a b/c.txt', /d/e.txt]", "data.train=['c.txt', e.txt]"),
        ("/home/me/runs/one/", "one"),
        ("+x={a: 1}", "+x={a: 1}"),
        ("../shared/corpus/*.parquet", "../shared/corpus/*.parquet"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("tokens/s", "tokens/s"),
    ],
)
def test_absolute_paths(text, plain):
    assert cut_absolute_paths({"a": [text]}) == {"a": [plain]}


def test_keys_that_a_record_lacks_are_not_added():
    assert remove_places_from_config({"name": "a", "seed": 1}, "b") == {"name": "b", "seed": 1}
    assert remove_places_from_config(yaml.safe_load("tracking: {entity: me}\ntrust: [/x/y]"), "b") == {
        "tracking": None,
        "trust": ["y"],
    }
    assert remove_places_from_manifest({"ranks": 1}) == {"ranks": 1, "command": []}


def test_a_run_that_measures_itself_is_kept_beside_one_that_does_not(reproduce, archive, tmp_path):
    """Their settings are the same, their metrics are not; a number tells them apart where their names are equal too."""
    grid = load_grid("spectral_500m").select(series=["muown_wd0"])
    (point,) = grid.expand()
    fill(tmp_path / "out" / grid.folder, [point], lambda point: 14.0)
    plain = dict(point.config) | {"probes": None, "keep_every": 1000}
    folder = write(tmp_path / "plain" / point.name, [line(0, valid=9.0), line(2, 3.0, valid=3.0)], plain, steps=2)
    store(archive / grid.folder, folder)
    words = ("experiment=spectral_500m", "series=muown_wd0", f"out={tmp_path}/out", "action=archive")
    assert "  archived\n" in reproduce(*words) and "  there already\n" in reproduce(*words)
    assert archived(archive) == {grid.folder: [point.name, f"{point.name}-2"]}
    assert read_run(archive / grid.folder / f"{point.name}-2").last("valid/perplexity") == 14.0


def test_a_run_that_measures_itself_is_no_copy_where_nobody_asks(reproduce, archive, tmp_path):
    """An experiment that asks for no probes may find a run with some: it is kept where it is, or beside a plain one."""
    grid = load_grid("corpus_spectral").select(points=1, series=["fixed"])
    (point,) = grid.expand()
    fill(tmp_path / "out" / grid.folder, [point], lambda point: 14.0)
    words = (f"out={tmp_path}/out", "action=archive", "series=fixed")
    reproduce("experiment=corpus_spectral", *words)
    said = reproduce("experiment=corpus_magnitude", *words)
    assert "1 done" in said and "  there already\n" in said and archived(archive) == {grid.folder: [point.name]}
    plain = dict(point.config) | {"probes": None}
    folder = write(tmp_path / "plain" / point.name, [line(0, valid=9.0), line(2, 3.0, valid=3.0)], plain, steps=2)
    store(archive / "corpus_learning_rate", folder)
    assert "  there already\n" in reproduce("experiment=corpus_magnitude", *words)


@pytest.mark.slow
def test_every_run_of_the_repository_can_be_read():
    """Its archives are small, no file is that of a single run, and stored names of classes and functions still work."""
    files = list(KEPT.iterdir())
    assert len(files) == 20 and sum(path.stat().st_size for path in files) < 10e6
    kept = read_archived_runs(KEPT)
    assert len(kept) == 142 and {run.state for run in kept} == {"finished"}
    for run in kept:
        assert len(run.series("train/loss")[0]) == run.step and run.last("valid/loss") is not None
    targets = {value for run in kept for key, value in flatten(run.config) if key.endswith("_target_")}
    assert "muown_train.training.schedule.wsd" in targets and all(callable(get_method(target)) for target in targets)


@pytest.mark.parametrize(
    ("name", "count"), slow_but([("corpus_width", DONE["corpus_width"])], DONE.items(), several=True)
)
def test_the_experiments_count_the_runs_of_the_repository(name, count, tmp_path):
    """Each counts as many runs as before these were archived in this form and modules moved; several share runs."""
    grid = load_grid(name)
    statuses = read_progress(grid, grid.expand(), str(tmp_path), KEPT)
    counted = Counter(each.state for each in statuses)
    assert counted.pop("missing", 0) == (26 if name == "corpus_copying" else 0) and counted == {"done": count}


def test_of_two_archived_runs_with_the_same_settings_the_first_counts(reproduce, archive, tmp_path):
    """A report stays as it is when another experiment trains a run once more."""
    grid, points = small()
    for name, perplexity, ended in (("a-later", 13.0, 200.0), ("b-earlier", 14.0, 100.0)):
        (folder, *_) = runs(tmp_path / name, perplexity, None, None)
        status = json.loads((folder / "status.json").read_text()) | {"time": ended}
        (folder / "status.json").write_text(json.dumps(status))
        store(archive / name, folder)
    (first, *_) = read_progress(grid, points, str(tmp_path / "none"), archive)
    assert first.run.folder == archive / "b-earlier" / points[0].name
