"""action=archive: what is kept of a run, that it is found again as the same run, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from muown_train.experiments.archive import archive_run, plain_config, plain_manifest, without_places
from muown_train.experiments.grid import load_experiment
from muown_train.experiments.progress import progress
from muown_train.runs.record import grouped, read_run
from muown_train.runtime import atomic_files as files
from tests.helpers.experiments import fill
from tests.helpers.folders import line, write
from tests.helpers.paths import ROOT
from tests.helpers.runs import trained

SCRIPTS = ROOT / "scripts"
WORDS = ("experiment=500m_magnitude", "scale=tiny", "points=1")
FURTHER = ["data=files", "data.train=texts/*.txt", "cache=/home/me/cache"]


@pytest.fixture
def archive(monkeypatch, tmp_path):
    """Of reproduce.py, an empty folder."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import reproduce

    monkeypatch.setattr(reproduce, "ARCHIVE", tmp_path / "archive")
    return tmp_path / "archive"


@pytest.fixture
def reproduce(monkeypatch, capsys, archive):
    def call(*words) -> str:
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *map(str, words)])
        import reproduce

        assert reproduce.main() == 0
        return capsys.readouterr().out

    return call


def small(scale: str | None = "tiny", name: str = "500m_magnitude"):
    """An experiment of three runs, and them."""
    experiment = load_experiment(name, scale).part(1)
    return experiment, experiment.cells(FURTHER)


def runs(out: Path, *ends) -> list[Path]:
    """Three runs, which come to these perplexities."""
    experiment, cells = small()
    by_name = dict(zip((cell.name for cell in cells), ends, strict=True))
    fill(out / experiment.folder, cells, lambda cell: by_name[cell.name])
    return [out / experiment.folder / cell.name for cell in cells]


def test_what_has_ended_is_archived_once_and_found_without_the_runs(reproduce, archive, tmp_path):
    done, diverged, missing = runs(tmp_path / "out", 14.0, "diverged", None)
    (done / "checkpoints").mkdir()
    words = (*WORDS, *FURTHER, f"out={tmp_path}/out")
    said = reproduce(*words, "action=archive")
    assert said.count("  archived\n") == 2 and said.startswith("3 runs: 1 done, 1 diverged, 1 missing\n")
    assert sorted(path.name for path in archive.iterdir()) == sorted((done.name, diverged.name))  # and nothing hidden
    kept = archive / done.name
    assert {path.name for path in kept.iterdir()} == {"config.yaml", "manifest.json", "metrics.jsonl", "status.json"}
    for name in ("metrics.jsonl", "status.json"):
        assert (kept / name).read_bytes() == (done / name).read_bytes()
    written = {path: path.stat().st_mtime_ns for path in archive.rglob("*")}
    assert reproduce(*words, "action=archive").count("  there already\n") == 2
    assert written == {path: path.stat().st_mtime_ns for path in archive.rglob("*")}
    listed = reproduce(*WORDS, *FURTHER[:2], f"out={tmp_path}/nothing")
    assert listed.endswith("3 runs: 1 done, 1 diverged, 1 missing\n") and "loss 2.6391" in listed
    assert not missing.exists()


def test_a_real_run_loses_its_places_and_no_setting(corpus, tmp_path):
    run = trained(corpus, tmp_path / "out", "tracking=none").folder
    manifest = json.loads((run / "manifest.json").read_text())
    command = [f"data.train={tmp_path}/*.txt", f"out={tmp_path}", "cache=/c", "++name='run'", "tracking.mode=offline"]
    manifest |= {"command": [*command, "optim.lr=0.01"], "origin": f"{tmp_path}/other/checkpoints/step-1"}
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert archive_run(run, tmp_path / "kept" / "named") == "archived"
    before, after = read_run(run), read_run(tmp_path / "kept" / "named")
    assert len(grouped([before, after])) == 1 and before.seed == after.seed
    assert (after.config["out"], after.config["cache"], after.config["name"]) == ("runs", None, "named")
    assert after.manifest["command"] == ["data.train=*.txt", "optim.lr=0.01"]
    assert after.manifest["origin"] == "step-1" and after.manifest["groups"] == before.manifest["groups"]
    assert str(tmp_path) not in (after.folder / "manifest.json").read_text()
    assert before.columns.keys() == after.columns.keys()


def test_settings_that_define_a_run_stay_and_are_named(reproduce, archive, tmp_path):
    experiment, _ = small()
    cells = experiment.cells(["data=files", f"data.train={tmp_path}/*.txt"])
    fill(tmp_path / "out" / experiment.folder, cells, lambda cell: 14.0)
    words = (*WORDS, "data=files", f"data.train={tmp_path}/*.txt", f"out={tmp_path}/out")
    said = reproduce(*words, "action=archive")
    assert said.count(f"note: data.train={tmp_path}/*.txt is archived with its place on this machine") == 1
    assert reproduce(*words[:-1], f"out={tmp_path}/nothing").endswith("3 runs: 3 done\n")


def test_what_was_measured_later_comes_after(reproduce, archive, tmp_path):
    done, *_ = runs(tmp_path / "out", 14.0, None, None)
    words = (*WORDS, *FURTHER, f"out={tmp_path}/out", "action=archive")
    reproduce(*words)
    (done / "analysis").mkdir()
    (done / "analysis" / "spectral.jsonl").write_text('{"step": 2}\n')
    (done / "analysis" / "state.safetensors").write_text("large")
    assert "  brought up to date: analysis/spectral.jsonl\n" in reproduce(*words)
    (done / "analysis" / "spectral.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert "  brought up to date: analysis/spectral.jsonl\n" in reproduce(*words)
    assert "  there already\n" in reproduce(*words)
    kept = archive / done.name / "analysis"
    assert [path.name for path in kept.iterdir()] == ["spectral.jsonl"]
    assert (kept / "spectral.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_another_run_of_the_same_settings_is_refused_before_anything_is_written(reproduce, archive, tmp_path, capsys):
    runs(tmp_path / "first", None, None, 14.0)
    reproduce(*WORDS, *FURTHER, f"out={tmp_path}/first", "action=archive")
    *_, other = runs(tmp_path / "second", 15.0, 15.0, 15.0)
    with pytest.raises(SystemExit):
        reproduce(*WORDS, *FURTHER, f"out={tmp_path}/second", "action=archive")
    said = capsys.readouterr().err
    assert said.startswith(f"error: {archive / other.name} has other metrics than {other}") and said.count("\n") == 1
    assert [path.name for path in archive.iterdir()] == [other.name]


def test_runs_of_two_experiments_with_one_name(reproduce, archive, tmp_path):
    """124m_learning_rate and 2_7b both have a muown_wd0-lr=0.001-seed=0."""
    for name in ("2_7b", "124m_learning_rate", "2_7b"):
        experiment = load_experiment(name).part(seeds=1, series=["muown_wd0"])
        if not (tmp_path / name).exists():
            fill(tmp_path / name, [c for c in experiment.cells() if c.lr == 1e-3], lambda cell: 14.0)
        words = (f"experiment={name}", "seeds=1", "series=muown_wd0")
        said = reproduce(*words, f"out={tmp_path}", "action=archive")
        assert "1 done" in reproduce(*words, f"out={tmp_path}/nothing")
    assert "there already" in said
    found = sorted(path.parent.relative_to(archive).as_posix() for path in archive.rglob("config.yaml"))
    assert found == ["124m_learning_rate/muown_wd0-lr=0.001-seed=0", "muown_wd0-lr=0.001-seed=0"]


def test_runs_that_settings_cannot_tell_apart_are_found_again(reproduce, archive, tmp_path):
    experiment = load_experiment("500m_step_time")
    fill(tmp_path / "out" / experiment.folder, experiment.cells(), lambda cell: 14.0)
    reproduce("experiment=500m_step_time", f"out={tmp_path}/out", "action=archive")
    found = progress(experiment, experiment.cells(), str(tmp_path / "nothing"), archive)
    assert [each.state for each in found] == ["done"] * 4 and len({each.folder for each in found}) == 4


def test_a_kill_leaves_no_half_of_a_run(archive, tmp_path, monkeypatch):
    done, *_ = runs(tmp_path / "out", 14.0, None, None)

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "sync_to_disk", killed)
        archive_run(done, archive / done.name)
    assert not (archive / done.name).exists()
    assert archive_run(done, archive / done.name) == "archived"


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
def test_places(text, plain):
    assert without_places({"a": [text]}) == {"a": [plain]}


def test_what_is_not_there_is_not_made_up():
    assert plain_config({"name": "a", "seed": 1}, "b") == {"name": "b", "seed": 1}
    assert plain_config(yaml.safe_load("tracking: {entity: me}\ntrust: [/x/y]"), "b") == {
        "tracking": None,
        "trust": ["y"],
    }
    assert plain_manifest({"ranks": 1}) == {"ranks": 1, "command": []}


def test_a_run_that_measures_itself_is_kept_beside_one_that_does_not(reproduce, archive, tmp_path):
    """Their settings are the same, their metrics are not."""
    experiment = load_experiment("spectral_500m").part(series=["muown_wd0"])
    (cell,) = experiment.cells()
    fill(tmp_path / "out" / experiment.folder, [cell], lambda cell: 14.0)
    plain = dict(cell.config) | {"probes": None, "keep_every": 1000}
    write(archive / cell.name, [line(0, valid=9.0), line(2, 3.0, valid=3.0)], plain, steps=2)
    words = ("experiment=spectral_500m", "series=muown_wd0", f"out={tmp_path}/out", "action=archive")
    assert "  archived\n" in reproduce(*words) and "  there already\n" in reproduce(*words)
    assert (archive / experiment.folder / cell.name / "config.yaml").exists()


def test_a_run_that_measures_itself_is_no_copy_where_nobody_asks(reproduce, archive, tmp_path):
    """An experiment that asks for no probes may find a run with some: it is kept where it is, or beside a plain one."""
    experiment = load_experiment("corpus_spectral").part(points=1, series=["fixed"])
    (cell,) = experiment.cells()
    fill(tmp_path / "out" / experiment.folder, [cell], lambda cell: 14.0)
    words = (f"out={tmp_path}/out", "action=archive", "series=fixed")
    reproduce("experiment=corpus_spectral", *words)
    said = reproduce("experiment=corpus_magnitude", *words)
    assert "1 done" in said and "  there already\n" in said and len(list(archive.glob("**/config.yaml"))) == 1
    plain = dict(cell.config) | {"probes": None}
    (archive / experiment.folder).mkdir()
    (archive / cell.name).rename(archive / experiment.folder / cell.name)
    write(archive / cell.name, [line(0, valid=9.0), line(2, 3.0, valid=3.0)], plain, steps=2)
    assert "  there already\n" in reproduce("experiment=corpus_magnitude", *words)
