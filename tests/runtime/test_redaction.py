"""Secrets never reach what a run writes and says."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from omegaconf import OmegaConf

from muown_train.cli.main import main
from muown_train.cli.messages import explain_error
from muown_train.config.run_name import check_run_name, default_run_name
from muown_train.runs import manifest
from muown_train.runtime.redaction import redact, redact_tracebacks, redact_tree
from tests.config.test_trust import trees
from tests.helpers.runs import SMALL, slow_but

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
HEX = "0123456789abcdef0123456789abcdef01234567"  # as a W&B key, and as a commit of git


@pytest.fixture
def secrets(monkeypatch) -> dict[str, str]:
    """Secrets of the environment."""
    values = {
        "HF_TOKEN": TOKEN,
        "WANDB_API_KEY": HEX[::-1],
        "MY_SERVICE_TOKEN": "some words, 'quoted' \"twice\" \\ é",
        "DB_PASSWORD": "correct-horse",
        "PGPASSWORD": "correct-horse-battery",
        "AWS_SECRET_ACCESS_KEY": "abcd/efgh+ijkl",
        "SIGNING_KEY": "sign-me-1",
        "SMTP_PASS": "mail-me-1",
        "KEYPASSPHRASE": "open-sesame-1",
        "SERVICE_CREDENTIALS": "user and word",
        "AUTH": "basic words-1",
        "SLACK_WEBHOOK": "slack-hook-words",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHORT_TOKEN", "3072")
    for name in ("TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK", "PWD_OLD", "MONKEY", "KEYBOARD", "COMPASS"):
        monkeypatch.setenv(name, "something")
    return values


def test_values_of_the_environment_are_hidden(secrets):
    for value in secrets.values():
        for text in (value, f"x{value}y {value}", json.dumps([value]), repr(value), yaml.safe_dump([value], width=999)):
            assert value not in redact(text) and value not in json.dumps(redact(text)), text
    assert redact("a correct-horse-battery b") == "a *** b"  # not only the shorter one that it begins with
    assert redact("tokens=3072 something") == "tokens=3072 something"


@pytest.mark.parametrize(
    "text, expected",
    [
        (f"401 for {TOKEN}: denied", "401 for ***: denied"),
        (f"data.text={TOKEN}", "data.text=***"),
        (f'{{"api_key": "{HEX}"}}', '{"api_key": "***"}'),
        (f"WANDB_API_KEY={HEX}", "WANDB_API_KEY=***"),
        (f"wandb: key: {HEX}.", "wandb: key: ***."),
        ("wandb_v1_" + "aB3_" * 20 + " x", "*** x"),
        ("https://me:pass@word@host:80/x@y", "https://***@host:80/x@y"),
        ("https://secret@host/x", "https://***@host/x"),
        ("s3://id:key@bucket/x 'ftp://:pass@host'", "s3://***@bucket/x 'ftp://***@host'"),
        ("https://h/f?a=1&X-Amz-Signature=0f&b=2", "https://h/f?a=1&X-Amz-Signature=***&b=2"),
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer ***"),
        ("+data.token=abcdefgh1 seed=1", "+data.token=*** seed=1"),
        ("hub_token: 'abcdefgh1'", "hub_token: '***'"),
        ("push with ghp_" + "a1B2" * 9 + ".", "push with ***."),
        ("github_pat_11ABC_" + "x9" * 30 + " glpat-" + "a1_-" * 5, "*** ***"),
        ("OpenAI's sk-proj-abc123DEF456ghi789jkl or sk-" + "a1" * 24, "OpenAI's *** or ***"),
        ("AKIAIOSFODNN7EXAMPLE, ASIAIOSFODNN7EXAMPLE", "***, ***"),
        ("AIza" + "a1_-b" * 7 + " xoxb-123456789012-abcdef", "*** ***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_1", "***"),
        ("to https://hooks.slack.com/services/T0/B0/xyz!", "to https://hooks.slack.com/***"),
        ("https://discord.com/api/webhooks/12/ab-c_d", "https://discord.com/api/webhooks/***"),
        ("https://me.webhook.office.com/webhookb2/12@3/x", "https://me.webhook.office.com/***"),
        (
            "mail_pass=abcdefgh1 private_key: abcdefgh2 credentials=abcdefgh3",
            "mail_pass=*** private_key: *** credentials=***",
        ),
    ],
)
def test_secrets_are_hidden_by_their_form(text, expected):
    assert redact(text) == expected
    assert redact(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"commit {HEX}",
        f'"git_commit": "{HEX}+"',
        f'"sha256": "{HEX}"',
        "data/hash 0123456789abcdef",
        "tokens=30720000000 batch_tokens=524288000",
        "end_of_text_token: <|endoftext|>",
        "data.token=${oc.env:MY_OWN_TOKEN}",
        "git@github.com:me/x.git ssh://git@host/x",
        "https://host/a?b=c#d",
        "hf_internal_testing/tiny hf_hub_download",
        "blocks.0.attention.key.weight = 12345678",
        "sk-learn-and-other-names-that-are-long sort_key=abcdefgh1 pk_",
        "https://host/hooked/x https://github.com/me/x/tree/main/hooks",
        "AKIAN and ghp_short and eyJ.a.b bypass=abcdefgh1",
        "(runs/x=1,y=2-seed=0) 10:20:30 optim.lr=0.001",
    ],
)
def test_innocent_text_stays(text):
    assert redact(text) == text


def test_trees_are_hidden_leaf_by_leaf(secrets):
    tree = {"a": [f"x {TOKEN}", 3, None, True], TOKEN: 1.5, "password": "a b c d e", "b": {"api_key": HEX, "token": 5}}
    assert redact_tree(tree) == {
        "a": ["x ***", 3, None, True],
        "***": 1.5,
        "password": "***",
        "b": {"api_key": "***", "token": 5},
    }


@given(trees)
def test_a_tree_without_secrets_stays(tree):
    assert redact_tree(tree) == tree


def test_config_and_manifest_hide_and_can_be_read(secrets, tmp_path):
    config = {"data": {"text": TOKEN, "train": "https://a:b@c/d"}, "lr": 1e-8, "seed": 0, "name": None, "x": ["1e-8"]}
    for value in secrets.values():
        text = OmegaConf.to_yaml(OmegaConf.create(config | {"other": value}))
        manifest.write(tmp_path, yaml.safe_load(text), {"command": [f"data.text={value}"], "n": 1})
        for name in ("config.yaml", "manifest.json"):
            assert value not in (tmp_path / name).read_text()
        expected = config | {"data": {"text": "***", "train": "https://***@c/d"}, "other": "***"}
        assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == expected
        assert json.loads((tmp_path / "manifest.json").read_text()) == {"command": ["data.text=***"], "n": 1}


def test_names_of_runs_hide_and_still_differ(secrets):
    def name(*overrides: str) -> str:
        return check_run_name(default_run_name({"model": "tiny", "optim": "muown"}, list(overrides), 0))

    first, second = name(f"data.text={TOKEN}"), name("data.text=hf_BbCdEfGhIjKlMnOpQrStUvWxYz01234567")
    assert first != second and first != name()
    for value in secrets.values():
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        shown = name(f"data.text='{quoted}'")
        assert value not in shown and re.sub(r"[^\w]", "_", value) not in shown


def test_settings_that_change_no_result_change_no_name():
    plain = default_run_name({"model": "tiny", "optim": "muown"}, [], 0)
    others = [
        "give_up_after=3",
        "time_limit=60",
        "keep_every=10",
        "keep_best=true",
        "trust=[a.b]",
        "replica_check_every=5",
    ]
    assert default_run_name({"model": "tiny", "optim": "muown"}, others, 0) == plain


def test_errors_hide(secrets):
    for value in secrets.values():
        assert value not in explain_error(ValueError(f"data.text={value!r} is wrong"), [])
        assert value not in explain_error(FileNotFoundError(2, "no such file", value), [])
        assert value not in explain_error(ValueError("x"), [f"data.text={value}["])  # cannot be parsed


def test_tracebacks_hide(capfd):
    def fail(text: str) -> None:
        raise RuntimeError(f"failed with {text}")

    before = threading.excepthook
    with pytest.raises(SystemExit) as caught, redact_tracebacks():
        thread = threading.Thread(target=fail, args=[f"the thread's {TOKEN}"])
        thread.start()
        thread.join()
        try:
            fail(f"the first {TOKEN}")
        except RuntimeError as error:
            raise OSError(f"the second {TOKEN}") from error
    said = capfd.readouterr().err
    assert caught.value.code == 1 and TOKEN not in said and "in fail" in said
    assert all(f"the {which} ***" in said for which in ("thread's", "first", "second"))
    with pytest.raises(SystemExit, match="7"), redact_tracebacks():
        sys.exit(7)
    assert capfd.readouterr().err == "" and threading.excepthook is before


def files_with(folder: Path, *secret: str) -> list[str]:
    """Files in a folder whose name or content has one of the secrets."""
    found = []
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if any(text in str(path.relative_to(folder)) or text.encode() in content for text in secret):
            found.append(str(path))
    return found


def overrides(corpus: Path, out: Path, text: str) -> list[str]:
    """A small run with a secret among its settings."""
    places = [f"data.train={corpus}/*.txt", f"out={out}", f"cache={corpus}/cache"]
    return [*SMALL, *places, "tokens=1024", f"data.text={text}"]


@pytest.mark.parametrize("text", slow_but([TOKEN], ["${oc.env:HF_TOKEN}", TOKEN]))
def test_a_run_whose_settings_hold_a_secret_never_shows_it(corpus, tmp_path, monkeypatch, capfd, secrets, text):
    arguments = overrides(corpus, tmp_path, text)
    monkeypatch.setattr(sys, "argv", ["muown_train", *arguments])
    for _ in range(2):  # the second time it finds itself finished
        main()
    monkeypatch.setattr(sys, "argv", ["muown_train", "--multirun", *arguments])
    main()
    assert (tmp_path / "multirun.yaml").exists()
    with pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "argv", ["muown_train", *arguments, f"data.train=/no/{TOKEN}/*.txt"])
        main()
    said = capfd.readouterr()
    assert "validation loss" in said.out and "/no/***/*.txt" in said.err
    assert TOKEN not in said.out + said.err
    assert list(tmp_path.rglob("manifest.json")) and files_with(tmp_path, *secrets.values()) == []


@pytest.mark.slow
def test_nor_does_it_with_wandb_and_a_traceback(corpus, tmp_path, secrets):
    tracking = ["tracking=wandb", "tracking.mode=offline"]
    command = [sys.executable, "-m", "muown_train", *overrides(corpus, tmp_path, TOKEN), *tracking]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert list(tmp_path.rglob("*.wandb")) and files_with(tmp_path, *secrets.values()) == []
    failing = [*command, f"data.train=/no/{TOKEN}/*.txt"]
    done = subprocess.run(failing, capture_output=True, text=True, env=environment | {"MUOWN_TRACEBACK": "1"})
    assert done.returncode != 0 and "Traceback" in done.stderr and TOKEN not in done.stdout + done.stderr
