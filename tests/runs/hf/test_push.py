"""`muown-train export --push` against a hub on the loopback: what arrives, what is said, and what is never said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muown_train.cli.commands.hf import main_export
from tests.helpers.hub_server import Hub
from tests.helpers.paths import ROOT
from tests.helpers.runs import trained

# pushes a small folder to each of several repositories, with a token and an address of the hub
CLIENT = """
import json, os, sys
from pathlib import Path
from huggingface_hub import constants
from muown_train.runs.hf.push import push_folder

said = []
for name, token, endpoint in json.loads(sys.argv[2]):
    os.environ["HF_TOKEN"], constants.ENDPOINT = token, endpoint or constants.ENDPOINT
    try:
        said.append(["pushed", push_folder(Path(sys.argv[1]), name, True, "a message")])
    except Exception as error:
        said.append([type(error).__name__, str(error)])
print(json.dumps(said))
"""


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "hub") as server:
        yield server


def start(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | hub.environment(home) | {"HF_TOKEN": hub.token, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], env=environment, cwd=home.parent, capture_output=True, text=True)
    assert hub.token not in done.stdout + done.stderr and "Traceback" not in done.stderr
    return done


@pytest.mark.slow
def test_what_arrives_is_the_export(corpus, tmp_path, hub):
    run = trained(corpus, tmp_path / "runs")
    words = ("-m", "muown_train", "export", str(run.folder), "--push")
    for name, public in (("me/tiny", []), ("me/tiny", ["--public"]), ("me/open", ["--public"])):
        done = start(hub, tmp_path / "home", *words, name, *public)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith(f"  pushed to {hub.url}/{name}\n")
        sent = {path.name: path.read_bytes() for path in (hub.root / "models" / name).iterdir()}
        assert sent == {path.name: path.read_bytes() for path in (run.folder / "hf").iterdir()}
    assert hub.private == {"me/tiny": True, "me/open": False} and len(hub.uploads) == 1


def test_a_refusal_is_a_sentence_without_the_token(tmp_path, hub):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    secret = "a-token-of-no-known-form"
    cases = [
        ("me/tiny", hub.token, None),
        ("me/tiny", secret, None),
        ("others/tiny", hub.token, None),
        ("me/broken", hub.token, None),
        ("me/tiny", hub.token, "http://127.0.0.1:9"),
    ]
    done = start(hub, tmp_path / "home", "-c", CLIENT, str(folder), json.dumps(cases))
    assert secret not in done.stdout + done.stderr
    pushed, unknown, forbidden, broken, unreachable = json.loads(done.stdout)
    assert pushed == ["pushed", f"{hub.url}/me/tiny"]
    assert unknown[0] == "ValueError" and "it does not know the token: give another to `hf auth login`" in unknown[1]
    assert forbidden[0] == "ValueError" and "the token may not write to others/tiny" in forbidden[1]
    for kind, sentence in (broken, unreachable):
        assert kind == "ConnectionError" and "cannot be pushed to the hub at http://127.0.0.1:" in sentence
        assert sentence.endswith(f"; the export is in {folder}, and the same command pushes it")


@pytest.mark.parametrize("name", ["tiny", "me/", "/tiny", "me/a b", "me/tiny/x", "", "me/-tiny", "me/a..b"])
def test_a_bad_name_is_refused_before_anything_is_written(corpus, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    with pytest.raises(SystemExit) as stopped:
        main_export([str(tmp_path), "--push", name])
    said = capsys.readouterr()
    assert (
        stopped.value.code == 2 and said.out == "" and said.err.startswith(f"error: --push {name} must be OWNER/NAME")
    )


def test_without_a_token_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        main_export([str(tmp_path), "--push", "me/tiny"])
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.out == ""
    assert said.err.startswith("error: --push needs a token of the Hugging Face hub that may write: ")


def test_public_alone_means_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main_export([str(tmp_path), "--public"])
    assert "--public says who may read the repository of --push OWNER/NAME" in capsys.readouterr().err
