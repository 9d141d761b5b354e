"""A disk that cannot take what a script writes: no wrong setting, so status 1, and a sentence that names the folder."""

import os
import re
import subprocess
import sys

import pytest

from muown_train.cli import main as __main__
from muown_train.cli.errors import FAILED, WRONG, report_errors
from muown_train.runs.hf.export import export_run
from muown_train.runs.saved_run import open_run
from muown_train.runtime import atomic_files as files
from tests.cli.test_main import limited
from tests.helpers.paths import ROOT
from tests.helpers.runs import slow_but, trained


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A run with two checkpoints and an export."""
    run = trained(corpus, tmp_path_factory.mktemp("runs"))
    export_run(open_run(run.folder), run.folder / "hf")
    return run


@pytest.mark.parametrize(
    "words",
    slow_but([("average.py", "{}")], [("average.py", "{}"), ("export_hf.py", "{}"), ("import_hf.py", "{}/hf")]),
    ids=" ".join,
)
@pytest.mark.parametrize("room", [10, 200_000], ids=["before", "amid the weights"])
def test_a_script_that_writes_a_folder(run, tmp_path, words, room):
    script, source = words[0], words[1].format(run.folder)
    command = [sys.executable, str(ROOT / "scripts" / script), source, "--out", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=limited(room))
    assert done.returncode == FAILED
    assert re.fullmatch(rf"error: {tmp_path}/out(/[\w.]+)?: File too large\n", done.stderr), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]


@pytest.mark.parametrize("number", __main__._PASSING, ids=os.strerror)
def test_what_passes_is_no_wrong_setting(number, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended, report_errors([]), files.atomic_folder(tmp_path / "out", lambda _: None):
        raise OSError(number, os.strerror(number))
    said = capsys.readouterr().err
    assert ended.value.code == FAILED and f"{tmp_path / 'out'}: " in said and said.count("\n") == 1


def test_a_file_elsewhere_is_named_itself(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended, report_errors([]), files.atomic_folder(tmp_path / "out", lambda _: None):
        (tmp_path / "missing").read_text()
    assert ended.value.code == WRONG and f"{tmp_path / 'missing'}: No such file" in capsys.readouterr().err
