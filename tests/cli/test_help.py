"""What the command line says of itself: --help, --version, completion in shells, and words that are no settings."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from muown_train.cli.help import EXAMPLES, SETTINGS, format_help
from muown_train.cli.main import COMMANDS
from muown_train.config.compose import CONFIG_DIR, GROUPS, compose_config, read_first_sentence
from muown_train.config.overrides import quote_text
from muown_train.runtime.suggest import explain_stray_word, suggest_nearest
from tests.cli.test_main import COMMAND, call


@pytest.fixture
def said(monkeypatch, capsys):
    def of(*words: str) -> str:
        assert call(monkeypatch, *words) == (None, "")
        return capsys.readouterr().out

    return of


def test_help_names_every_option_and_what_it_is(said):
    text = said("--help")
    assert text == said("optim=muon", "-h")
    assert len(text.splitlines()) < 95 and max(map(len, text.splitlines()[:-1])) <= 110
    *groups, experiment = GROUPS
    assert all(file.stem in text for file in (CONFIG_DIR / experiment).glob("*.yaml"))
    for group in groups:
        for file in (CONFIG_DIR / group).glob("*.yaml"):
            assert re.search(
                rf"^[a-z]*=? *\*?{file.stem} +{re.escape(read_first_sentence(file.read_text())[:20])}", text, re.M
            )
    for key in SETTINGS:
        assert re.search(rf"^  {re.escape(key)}=\S+ +\w", text, re.M), key
    assert "*tiny" in text and "*muown" in text and "seq_len=256" in text and str(CONFIG_DIR) in text


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "train"])
def test_help_of_a_command_fits_a_terminal(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "80")
    assert call(monkeypatch, command, "--help") in ((None, ""), (0, ""))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= 80


def test_every_option_says_what_it_is():
    for file in CONFIG_DIR.glob("*/*.yaml"):
        assert 10 < len(read_first_sentence(file.read_text())) < 120, f"{file} must begin with a comment"


def test_help_is_of_the_files_that_there_are(tmp_path):
    shutil.copytree(CONFIG_DIR, tmp_path / "configs")
    (tmp_path / "configs" / "optim" / "sgd.yaml").write_text("# Plain descent. And more.\nlr: 1\n")
    assert re.search(r"^ +sgd +Plain descent$", format_help(tmp_path / "configs"), re.M)


@pytest.mark.parametrize("words", [words for words, _ in EXAMPLES])
def test_the_examples_are_settings(words):
    given = [word.replace("'", "") for word in words.split() if not word.startswith("-")]
    compose_config([re.sub(r"=(\w+),.*", r"=\1", word) if "--multirun" in words else word for word in given])


def test_version(said):
    assert re.fullmatch(r"muown_train \d\S* \(Python 3\S*, torch \d\S*, hydra-core \d\S*\)\n", said("--version"))


@pytest.mark.parametrize(
    "line, words",
    [
        ("muown-train optim=mu", "optim=muon optim=muown"),
        ("muown-train seed=1 optim.momen", "optim.momentum="),
        ("muown-train optim=adamw optim.momen", ""),
        ("muown-train optim=lion model=5", "model=500m"),
        ("muown-train schedule=d", "schedule=decay_from"),
    ],
)
def test_completion(line, words, monkeypatch, said):
    monkeypatch.setenv("COMP_LINE", line)
    assert said("-sc", "query=bash").strip() == words


def test_completion_in_bash(tmp_path):
    """The function that is installed, called as bash does when the tab key is hit."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    command = tmp_path / "muown-train"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m muown_train "$@"\n')
    command.chmod(0o755)
    script = """
    eval "$(muown-train -sc install=bash)"
    complete -p muown-train
    COMP_WORDS=(muown-train optim=mu) COMP_CWORD=1 COMP_LINE='muown-train optim=mu' COMP_POINT=20
    hydra_bash_completion
    echo "${COMPREPLY[@]}"
    """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, env=environment)
    complete, reply = done.stdout.splitlines()
    assert complete.endswith("-F hydra_bash_completion muown-train") and reply == "optim=muon optim=muown", done.stderr


@pytest.mark.parametrize(
    "words, meant",
    [
        (["optim=", "muon"], "optim=muon"),
        (["optim.lr=", "1e-3"], "optim.lr=1e-3"),
        (["optim", "=", "muon"], "optim=muon"),
        (["optim", "=muon"], "optim=muon"),
        (["seed=1", "optim.lr", "1e-3", "tokens=5"], "optim.lr=1e-3"),
        (["optim:muon"], "optim=muon"),
    ],
)
def test_a_space_or_a_colon_in_a_setting(monkeypatch, words, meant):
    status, message = call(monkeypatch, *words)
    assert status == 2 and f"settings are key=value without spaces (did you mean {meant}?)" in message


@pytest.mark.parametrize(
    "words, message",
    [
        (["--optim=muon"], "--optim=muon is no flag: settings have no dashes, as in optim=muon"),
        (["-model=tiny"], "-model=tiny is no flag: settings have no dashes, as in model=tiny"),
        (["--optim", "muon"], "--optim is no flag: settings have no dashes, as in optim=…"),
        (["--optim.lr", "1"], "--optim.lr is no flag: settings have no dashes, as in optim.lr=…"),
        (["--hlep"], "there is no flag --hlep (did you mean --help?); see --help"),
        (["--cfg", "jobs"], "argument --cfg/-c: invalid choice: 'jobs'"),
        (["seed=1", "--multirun", "tokens=1"], "tokens=1 stands apart from other settings"),
    ],
)
def test_flags_that_are_none(monkeypatch, capfd, words, message):
    status, said = call(monkeypatch, *words)
    assert status == 2 and said.startswith(f"error: {message}") and len(said.splitlines()) == 1
    assert capfd.readouterr() == ("", "")


def test_a_key_of_an_option_that_was_not_chosen(monkeypatch):
    _, message = call(monkeypatch, "data.trian=a.txt")
    assert message == "error: there is no key data.trian (did you mean data.train, of data=files?)\n"


def test_text_needs_no_quotes_where_nothing_else_could_be_meant():
    kept = ["optim.lr=1e-3", "data.train=[a,b]", "optim.lr=[", "seed", "name='a b'", "optim.rest.vector={lr: 1}"]
    assert quote_text(kept) == kept
    assert quote_text(["checkpoint=runs/a-seed=0"]) == ["checkpoint='runs/a-seed=0'"]
    for text in ("muown-optim.betas=_0.9,0.95_-lr=0.004-seed=0", "runs (1)"):
        assert compose_config(quote_text([f"name={text}"])).name == text
    assert compose_config(["name=a-b=1-seed=0", "out=été"]).name == "a-b=1-seed=0"
    assert compose_config(["out=été/runs"]).out == "été/runs"


def test_names_beside_each_other():
    assert suggest_nearest("67M", ["67m", "1b"]) == " (did you mean 67m?)"
    assert suggest_nearest("optimizer", ["shard_optimizer", "optim"]) == " (did you mean optim?)"
    assert suggest_nearest("epochs", ["seed", "tokens"]) == ""
    expected = "cannot read 'é[': settings are key=value, text with special characters in quotes"
    assert explain_stray_word(["é["], 0) == expected


def test_the_installed_command_and_the_module_are_one():
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout == format_help(CONFIG_DIR) + "\n"
