"""A process that may open no more files still says what has failed, and ends as failures of the machine do."""

import errno
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from muown_train.cli.errors import report_errors
from muown_train.cli.process import FAILED, WRONG, exit_with
from muown_train.runs.status import read_status
from muown_train.training.trainer import Trainer
from tests.helpers.runs import built, slow_but, trained


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing, unless it gives a descriptor back."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (used[0] + 1, limits[1]))
    try:
        while True:
            used.append(os.dup(used[0]))
    except OSError:
        pass
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in used:
            os.close(descriptor)


@pytest.mark.parametrize(
    "error, says",
    [
        (OSError(errno.EMFILE, "Too many open files", "/data/a.bin"), "/data/a.bin: Too many open files"),
        (ValueError("data.train: no file matches '*.txt'"), "data.train: no file matches '*.txt'"),  # glob finds none
        (ConnectionError("a hub does not answer"), "a hub does not answer"),
    ],
)
@pytest.mark.parametrize("words", [[], ["seed=3"], ["model=tniy"]])
def test_the_error_is_said_where_no_file_can_be_opened(capsys, error, says, words):
    with no_descriptors(), pytest.raises(SystemExit) as end, report_errors(words):
        raise error
    said = capsys.readouterr().err
    assert end.value.code == FAILED
    assert said == f"error: {says} (this process may open no more files: see `ulimit -n`)\n"
    with pytest.raises(SystemExit) as end, report_errors([]):
        raise ValueError("data.train: no file matches '*.txt'")
    assert end.value.code == WRONG and "ulimit" not in capsys.readouterr().err


def test_the_exit_status_does_not_need_standard_error(monkeypatch):
    def fail(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.stderr, "write", fail)
    with pytest.raises(SystemExit) as end:
        exit_with("error: seed=-1 must be a whole number", WRONG)
    assert end.value.code == WRONG


@pytest.mark.parametrize("name", slow_but(["train_step"], ["train_step", "evaluate", "save"]))
def test_a_run_that_may_open_no_more_files_has_failed_and_goes_on(corpus, tmp_path, monkeypatch, name):
    run = built(corpus, tmp_path)
    run.resume()
    inner = getattr(Trainer, name)
    with (
        pytest.raises(OSError, match="Too many open files"),
        monkeypatch.context() as patch,
        no_descriptors_from(patch, name, inner),
    ):
        run.train()
    run.close()
    status = read_status(tmp_path / "run")
    assert status["state"] == "failed" and "Too many open files" in status["reason"]
    assert read_status(trained(corpus, tmp_path).folder)["state"] == "finished"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(13))


@contextmanager
def no_descriptors_from(patch, name, inner):
    """Use up the descriptors at the second call of a method of the trainer."""
    calls = []
    exhausted = no_descriptors()

    def exhaust(trainer, *args, **kwargs):
        calls.append(name)
        if len(calls) == 2:
            exhausted.__enter__()
        return inner(trainer, *args, **kwargs)

    patch.setattr(Trainer, name, exhaust)
    try:
        yield
    finally:
        exhausted.__exit__(None, None, None)
