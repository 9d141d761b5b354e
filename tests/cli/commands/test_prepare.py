"""`muown-train prepare` as a user meets it: killed, interrupted, misspelt, in front of a hub that fails."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muown_train.cli.main import main
from muown_train.data.shards import prepare
from tests.data.hub.test_hub import build
from tests.helpers.hub_server import Fault, Hub
from tests.helpers.paths import COMMAND, ROOT
from tests.helpers.prepared import contents, documents_in, tokens_of
from tests.helpers.runs import wait_until
from tests.helpers.text_files import word_tokenizer_json

INTERRUPTED = "interrupted; the same command goes on after the last complete shard"


def command(*words, **environment):
    return subprocess.Popen(
        [*COMMAND, "prepare", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_killed_for_real(tmp_path, kill):
    words = random.Random(1)
    texts = ("".join(words.choices("abcdefgh \n", k=words.randint(1, 9000))) for _ in range(1000))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "tokenizer.json").write_text(word_tokenizer_json())
    settings = {"train": str(tmp_path / "a.jsonl"), "valid": None, "tokenizer": str(tmp_path / "tokenizer.json")}
    arguments = [f"data.{key}={value}" for key, value in settings.items() if value]
    arguments += ["data=files", f"out={tmp_path / 'out'}", "valid_tokens=1e5", "shard_tokens=1e5", "tokens=4e6"]

    process = command(*arguments)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (tmp_path / "out" / "train_000003.bin").exists():
        time.sleep(0.01)
    process.send_signal(kill)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == -kill, error
    if kill == signal.SIGINT:
        assert error.splitlines()[-1] == INTERRUPTED
    state = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert 2 < len(state["shards"]) < 41

    process = command(*arguments)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 0, error
    assert "going on after" in error and "is finished: 4,000,000 tokens" in error
    settings["text"] = "text"
    prepare.prepare_shards(tmp_path / "whole", "files", settings, 4_000_000, 100_000, 100_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("seconds", [0.2, *(pytest.param(k / 10, marks=pytest.mark.slow) for k in range(3, 16))])
def test_interrupted_at_any_moment(tmp_path, seconds):
    """Most of these moments are while libraries are imported."""
    (tmp_path / "a.txt").write_text("many words " * 3_000_000)
    (tmp_path / "tokenizer.json").write_text(word_tokenizer_json())
    files = (f"data.tokenizer={tmp_path}/tokenizer.json", f"data.train={tmp_path}/*.txt")
    words = [*files, f"out={tmp_path / 'out'}"]
    process = command("data=files", *words)
    # the command handles signals before it imports its first library, whose parts then show in its memory
    wait_until(lambda: "_yaml" in Path(f"/proc/{process.pid}/maps").read_text())
    time.sleep(seconds - 0.2)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT and error.splitlines() == [INTERRUPTED]


@pytest.mark.slow
def test_the_production_configuration_from_a_hub_that_fails(tmp_path):
    words = ["data=fineweb_edu", f"out={tmp_path / 'out'}", "valid_tokens=1000", "shard_tokens=5e5"]
    root = build(tmp_path / "hub", range(3))
    # each longer than what is encoded together, or the failure would come before anything is written
    texts = [[f"Document {k} of file {file}: " + "words " * 1400 for k in range(300)] for file in range(3)]
    for path, own in zip(sorted(root.glob("datasets/HuggingFaceFW/**/*.parquet")), texts, strict=True):
        pq.write_table(pa.table({"text": own}), path, row_group_size=64)
    with Hub(root) as hub:
        hub.next_requests(10**6, Fault(status=503), below="002.parquet")
        process = command(*words, "data.retries=0", **hub.environment(tmp_path / "home"))
        error = process.communicate(timeout=120)[1]
        assert process.returncode == 1
        assert "002.parquet failed 1 times in a row" in error.splitlines()[-1]
        assert len(json.loads((tmp_path / "out" / "progress.json").read_text())["shards"]) > 1
        hub.next_requests(1, Fault(status=503), below="002.parquet")
        process = command(*words, **hub.environment(tmp_path / "home"))
        error = process.communicate(timeout=120)[1]
    assert process.returncode == 0, error
    assert "going on after" in error and "trying again" in error
    found = documents_in(tokens_of(tmp_path / "out", "valid")) + documents_in(tokens_of(tmp_path / "out", "train"))
    assert found == [text for own in texts for text in own]
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["source"]["revision"] == hub.commit and index["source"]["data"] == "HuggingFaceFW/fineweb-edu"
    assert index["tokenizer"]["name"] == "EleutherAI/gpt-neox-20b"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == word_tokenizer_json()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=files", "out=x", "token=5"], "there is no key token (did you mean tokens?); see --help"),
        (["data=files", "out=x", "tokens=-5"], "tokens=-5 must be a whole number of at least 1"),
        (
            ["data=files", "out=x", "tokens=1e30"],
            "tokens=1e+30 must be a whole number of at least 1 and less than 2^63",
        ),
        (["data=files", "out=x", "tokens=inf"], "tokens=inf must be a whole number"),
        (["data=fineweb_edu", "out=x", "data.streams=1.5"], "data.streams=1.5 must be a whole number"),
        (["data=fineweb_edu", "out=x", "data.shuffle=0"], "data.shuffle=0 must be a whole number of at least 1"),
        (["data=fineweb_edu", "out=x", "data.retries=-1"], "data.retries=-1 must be a whole number of at least 0"),
        (["data=fineweb_edu", "out=x", "data.retries=true"], "data.retries=True must be a whole number"),
        (["data=files"], "out is not set"),
        (["out=x"], "data is not set"),
        (["data=fles", "out=x"], "there is no data=fles (did you mean files?)"),
        (["data=files", "out=x", "data.trian=x"], "there is no key data.trian (did you mean data.train?)"),
    ],
)
def test_bad_words_are_one_sentence(words, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["muown-train", "prepare", *words])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # Ctrl-C is the test runner's here
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
