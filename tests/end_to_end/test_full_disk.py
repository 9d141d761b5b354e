"""A disk that cannot take what a command writes: no wrong setting, so status 1 and a sentence that names the folder."""

import contextlib
import errno
import os
import re
import resource

import pytest
from matplotlib.figure import Figure

from muown_train.cli import errors
from muown_train.cli.errors import FAILED, WRONG, report_errors
from muown_train.data.cache import build_once
from muown_train.experiments.report import style
from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.hf.export import export_run
from muown_train.runs.saved_run import open_run
from muown_train.runs.state import RandomState
from muown_train.runtime import atomic_files as files
from tests.cli.test_main import call
from tests.helpers.runs import HERE, trained


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A run with two checkpoints and an export."""
    run = trained(corpus, tmp_path_factory.mktemp("runs"))
    export_run(open_run(run.folder), run.folder / "hf")
    return run


@contextlib.contextmanager
def file_size_limit(size):
    """No file of this process may grow beyond so many bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# capsys keeps the output in memory: pytest's own capture is a file, which is limited too
@pytest.mark.parametrize("words", ["average {}", "export {}", "import {}/hf"])
@pytest.mark.parametrize("room", [10, 200_000], ids=["before", "amid the weights"])
def test_a_command_that_writes_a_folder(run, tmp_path, monkeypatch, capsys, words, room):
    with file_size_limit(room):
        status, said = call(monkeypatch, *words.format(run.folder).split(), "--out", str(tmp_path / "out"))
    assert status == FAILED
    assert re.fullmatch(rf"error: {tmp_path}/out(/[\w.]+)?: File too large\n", said), said
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]


@pytest.mark.parametrize("number", errors._TEMPORARY, ids=os.strerror)
def test_what_passes_is_no_wrong_setting(number, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended, report_errors([]), files.atomic_folder(tmp_path / "out", lambda _: None):
        raise OSError(number, os.strerror(number))
    said = capsys.readouterr().err
    assert ended.value.code == FAILED and f"{tmp_path / 'out'}: " in said and said.count("\n") == 1


def test_a_full_cache_is_no_wrong_setting(capsys, tmp_path):
    def build(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a file raises it that is being written

    with pytest.raises(SystemExit) as ended, report_errors([]):
        build_once(tmp_path / "data", build, print)
    said = capsys.readouterr().err
    assert ended.value.code == FAILED
    assert said.startswith(f"error: cannot write the data cache {tmp_path / 'data'} (No space left on device)")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: files.write_atomic(path, b"0" * 1000),
        lambda path: style.save_figure(Figure(), [path.with_suffix(".png")]),
        lambda path: Checkpoints(path, HERE).save(1, {"random": RandomState(HERE)}, wait=True),
    ],
)
def test_a_file_that_does_not_fit_is_named(capsys, tmp_path, write):
    with file_size_limit(100), pytest.raises(SystemExit) as ended, report_errors([]):
        write(tmp_path / "a")
    assert ended.value.code == FAILED and f"{tmp_path}/a" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []  # what was written takes no room


def test_a_file_elsewhere_is_named_itself(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended, report_errors([]), files.atomic_folder(tmp_path / "out", lambda _: None):
        (tmp_path / "missing").read_text()
    assert ended.value.code == WRONG and f"{tmp_path / 'missing'}: No such file" in capsys.readouterr().err
