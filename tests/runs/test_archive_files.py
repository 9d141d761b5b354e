"""Archives of runs: what is written comes back byte for byte, archives stay small and few, and faults are said."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from muown_train.cli.commands.compare import find_paths
from muown_train.runs.archive_files import ArchivedRun, RunArchive, find_archived_runs, list_archives
from muown_train.runs.metrics import encode_line
from muown_train.runs.record import NoRun, read_archived_runs, read_run
from tests.helpers.folders import line, settings, write

LINES = [
    {"step": 0, "tokens": 0, "valid/loss": 8.301926374435425, "valid/tokens": 2**53 + 1},
    {"step": 1, "train/loss": 1 / 3, "data/hash": "26289a8929079e50", "flag": True, "none": None},
    {"step": 2, "train/loss": float("nan"), "train/grad_norm": float("inf"), "list": [1, 2.5], "data/hash": "é"},
    {"step": 3, "train/loss": 5e-324, "train/grad_norm": 1.7976931348623157e308, "train/lr": 0},
]


def record(seed: int = 0, **files: bytes) -> ArchivedRun:
    lines = b"".join(map(encode_line, LINES))
    others = {f"analysis/{name}.jsonl": content for name, content in files.items()}
    status = {"state": "finished", "step": 3, "steps": 3}
    return ArchivedRun(settings(seed), {"device": "a device"}, status, {"metrics.jsonl": lines, **others})


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "runs" / "some.experiment"


def test_records_come_back_as_they_were(path):
    RunArchive(path).write({"b": record(1), "a": record(0, spectral=b'{"step": 3, "blocks.0/x": 0.1}\n')})
    RunArchive(path).write({"c": record(2)})
    assert sorted(file.name for file in path.parent.iterdir()) == ["some.experiment.json", "some.experiment.tar.xz"]
    kept = RunArchive(path)
    assert list(kept.entries) == ["a", "b", "c"]
    assert kept.get("b") == record(1) and kept.get("c") == record(2)
    assert kept.get("a") == record(0, spectral=b'{"step": 3, "blocks.0/x": 0.1}\n')
    assert [archive.path for archive in list_archives(path.parent)] == [path]


def test_an_archived_run_reads_like_its_folder(path, tmp_path):
    """The same values of the same types: integers, booleans, texts, numbers that only some lines have, NaN."""
    live = write(tmp_path / "a", [], settings())
    (live / "metrics.jsonl").write_bytes(record().files["metrics.jsonl"])
    (live / "status.json").write_text(json.dumps(record().status))
    RunArchive(path).write({"a": record(spectral=b'{"step": 3}\n')})
    one, other = read_run(live), read_run(path / "a")
    assert repr(one.read_lines("metrics.jsonl")) == repr(other.read_lines("metrics.jsonl"))
    assert other.read_lines("metrics.jsonl")[1] == LINES[1] and one.state == other.state == "finished"
    assert repr(one.columns) == repr(other.columns) and one.config == other.config
    assert other.read_lines("analysis/spectral.jsonl") == [{"step": 3}]
    assert one.read_lines("analysis/spectral.jsonl") == other.read_lines("analysis/none.jsonl") == []
    assert [run.folder for run in read_archived_runs(path.parent)] == [path / "a"]


def test_the_same_runs_make_the_same_bytes(path, tmp_path):
    for place in (path, tmp_path / "other"):
        RunArchive(place).write({"a": record(0), "b": record(1)})
    for end in (".json", ".tar.xz"):
        assert Path(f"{path}{end}").read_bytes() == Path(f"{tmp_path}/other{end}").read_bytes()
    written = Path(f"{path}.tar.xz").stat().st_mtime_ns
    RunArchive(path).write({"a": ArchivedRun({"seed": 5}, {}, {}, record(0).files)})
    assert Path(f"{path}.tar.xz").stat().st_mtime_ns == written and RunArchive(path).entries["a"]["config"] == {
        "seed": 5
    }


def test_files_of_runs_that_the_index_does_not_name_are_dropped(path):
    RunArchive(path).write({"a": record(0), "b": record(1)})
    index = Path(f"{path}.json")
    index.write_text(json.dumps({"a": json.loads(index.read_text())["a"]}))
    RunArchive(path).write({"c": record(2)})
    assert RunArchive(path).files.keys() == {"a/metrics.jsonl", "c/metrics.jsonl"}


def test_archives_that_are_absent_or_broken(path, tmp_path):
    assert RunArchive(path).entries == {} and RunArchive(path).files == {} and not read_archived_runs(path.parent)
    RunArchive(path).write({"a": record(0), "b": record(1)})
    with pytest.raises(NoRun, match=r"some\.experiment holds 2 archived runs: give one, such as .*some\.experiment/a$"):
        read_run(path)
    with pytest.raises(NoRun, match="/c is no folder"):
        read_run(path / "c")
    Path(f"{path}.tar.xz").write_bytes(Path(f"{path}.tar.xz").read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"some\.experiment\.tar\.xz is damaged: .*restore it"):
        read_run(path / "a").last("step")
    Path(f"{path}.tar.xz").unlink()
    assert read_run(path / "a").damage == "metrics.jsonl ends at step 0, the run at step 3"
    Path(f"{path}.json").write_text("<<<<<<< HEAD\n{}")
    with pytest.raises(ValueError, match=r"some\.experiment\.json is no JSON: .*restore it"):
        read_archived_runs(path.parent)


def test_runs_are_found_by_relative_paths(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunArchive(Path("kept")).write({"a": record(4)})
    write(tmp_path / "b", [line(1)], settings(5))
    assert read_run("kept/a").seed == 4 and read_run("b").seed == 5 and len(read_archived_runs(Path())) == 1
    with pytest.raises(NoRun, match=r"^c is no folder"):
        read_run("c")


def test_archived_runs_are_found_by_patterns(path):
    RunArchive(path).write({"a-lr=0.1": record(0), "b-lr=0.1": record(1)})
    RunArchive(path.with_name("other")).write({"a-lr=0.2": record(2)})
    found = find_archived_runs(f"{path.parent}/*/a-*")
    assert found == [path.with_name("other") / "a-lr=0.2", path / "a-lr=0.1"]
    assert find_archived_runs(f"{path}/b-lr=0.1") == [path / "b-lr=0.1"] and not find_archived_runs("b-lr=0.1")
    assert find_paths([f"{path}/*"]) == [path / "a-lr=0.1", path / "b-lr=0.1"]


def test_a_folder_comes_before_an_archive_of_its_name(path):
    RunArchive(path).write({"a": record(0)})
    write(path / "a", [line(1)], settings(7))
    assert read_run(path / "a").seed == 7


def test_reading_archives_loads_neither_torch_nor_pyarrow():
    program = "import sys, muown_train.runs.archive_files as a; print({'torch', 'pyarrow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"
