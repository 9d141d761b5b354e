"""`muown-train sample` as a user meets it."""

import io
import re
import signal
import subprocess
import sys

import pytest

from muown_train.cli.commands import sample as command
from muown_train.cli.commands.sample import main
from muown_train.models.generate import generate
from muown_train.runs.saved_run import open_run, write_run
from tests.helpers.paths import ROOT
from tests.helpers.runs import trained


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    return trained(corpus, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def sample(capsys):
    def call(*words) -> str:
        main([str(word) for word in words])
        return capsys.readouterr().out

    return call


def test_the_prompt_goes_on_greedily(run, sample):
    saved = open_run(run.folder)
    tokenizer = saved.load_tokenizer()
    ids = tokenizer.encode_batch(["The kaban"])[0].tolist()
    text = tokenizer.decode(ids + generate(saved.load_model(), ids, 50, 32, temperature=0))
    assert "<|endoftext|>" not in text
    assert sample(run.folder, "The kaban", "--temperature", 0, "--tokens", 50) == f"{text}\n"


def test_seeds_reproduce_and_samples_count_them_up(run, sample):
    words = (run.folder, "The", "--tokens", 20, "--top-k", 50, "--top-p", 0.9)
    both = sample(*words, "--count", 2, "--seed", 6)
    alone = [sample(*words, "--seed", seed) for seed in (6, 7)]
    assert alone[0] != alone[1]
    assert both == f"--- seed 6 ---\n{alone[0]}--- seed 7 ---\n{alone[1]}"


def test_an_earlier_checkpoint_and_standard_input(run, sample, monkeypatch):
    words = ("--temperature", 0, "--tokens", 10)
    earlier = sample(open_run(run.folder, step=8).checkpoint, "The kaban", *words)
    monkeypatch.setattr(sys, "stdin", io.StringIO("The kaban"))
    assert sample(run.folder, "-", "--step", 8, *words) == earlier


def test_a_document_ends_where_the_model_ends_it(run, sample, monkeypatch):
    import muown_train.models.generate as module

    end = open_run(run.folder).load_tokenizer().end_of_text
    drawn = iter([10, 11, end, 12])
    monkeypatch.setattr(module.torch, "multinomial", lambda *_, **__: next(drawn))
    text = sample(run.folder)
    assert text == open_run(run.folder).load_tokenizer().decode([10, 11]) + "\n"
    assert next(drawn) == 12


WHERE_INTERRUPTED = 7  # tokens


@pytest.fixture
def interrupt(monkeypatch):
    """A list of samples, counted from 1, that Ctrl-C ends after WHERE_INTERRUPTED tokens."""
    import muown_train.models.generate as module

    stream, samples, interrupted = module.stream_tokens, [], []

    def stream_until_interrupted(*words, **options):
        samples.append(1)
        for i, token in enumerate(stream(*words, **options)):
            if i == WHERE_INTERRUPTED and len(samples) in interrupted:
                raise KeyboardInterrupt
            yield token

    monkeypatch.setattr(module, "stream_tokens", stream_until_interrupted)
    return interrupted


def test_each_line_is_a_prompt_and_each_sample_has_the_next_seed(run, sample, monkeypatch):
    words = ("--tokens", 20, "--top-k", 50)
    expected = sample(run.folder, "The", *words, "--seed", 6) + sample(run.folder, *words, "--seed", 7)
    expected += sample(run.folder, "The", *words, "--seed", 8)
    for text in ("The\n\nThe\n", "The\n\nThe"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert sample(run.folder, "--interactive", *words, "--seed", 6) == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert sample(run.folder, "-i") == ""
    typed = io.StringIO("The\n\nThe\n")
    typed.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", typed)
    assert sample(run.folder, "-i", *words, "--seed", 6) == expected  # a file gets no marks of prompts


def test_ctrl_c_ends_the_sample_and_the_next_prompt_is_read(run, sample, monkeypatch, interrupt):
    words = ("--temperature", 0, "--tokens", 20)
    whole = sample(run.folder, "The kaban", *words)
    begun = sample(run.folder, "The kaban", *words[:3], WHERE_INTERRUPTED)
    interrupt += [3, 5]
    monkeypatch.setattr(command, "TWICE", 0.0)
    monkeypatch.setattr(sys, "stdin", io.StringIO("The kaban\n" * 4))
    assert sample(run.folder, "-i", *words) == begun + whole + begun + whole


@pytest.mark.parametrize("words", [["-i"], ["The kaban"]], ids=str)
def test_a_second_ctrl_c_at_once_ends_the_command(run, sample, monkeypatch, capsys, interrupt, words):
    interrupt += [1, 2]
    monkeypatch.setattr(sys, "stdin", io.StringIO("The kaban\n" * 4))
    with pytest.raises(SystemExit) as stopped:
        sample(run.folder, *words, "--temperature", 0)
    said = capsys.readouterr()
    assert stopped.value.code == 130 and said.err.endswith("\ninterrupted\n")
    assert said.out.count("The kaban") == 1 + ("-i" in words) == 1 + said.err.count("[interrupted]")


def test_ctrl_c_at_a_prompt_ends_the_command(run, sample, monkeypatch):
    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    with pytest.raises(SystemExit) as stopped:
        sample(run.folder, "-i")
    assert stopped.value.code == 130


def test_it_answers_a_pipe_line_by_line(run):
    """Each text is there before the next prompt is written, and a signal ends a text that would take minutes."""
    words = [sys.executable, "-m", "muown_train", "sample", str(run.folder), "-i", "--temperature", "0"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    with subprocess.Popen([*words, "--tokens", "5"], **pipes) as process:
        for _ in range(2):
            process.stdin.write("The kaban\n")
            process.stdin.flush()
            assert process.stdout.readline().startswith("The kaban")
            assert re.match(r"\[\d tokens, ", process.stderr.readline())
        process.stdin.close()
        assert process.wait(60) == 0
    with subprocess.Popen([*words, "--tokens", "1000000"], **pipes) as process:
        process.stdin.write("The kaban\n")
        process.stdin.flush()
        assert process.stdout.read(20).startswith("The kaban")
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "[interrupted]\n"
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no folder nowhere: give that of a run"),
        ([], "the following arguments are required: RUN"),
        (["RUN", "--temperature", "-1"], "temperature -1.0 must be a number of at least 0"),
        (["RUN", "--top-p", "2"], "top-p 2.0 must be above 0 and at most 1"),
        (["RUN", "--top-k", "0"], "top-k 0 must be at least 1"),
        (["RUN", "--tokens", "0"], "--tokens 0 must be 1 or more"),
        (["RUN", "The", "-i"], "--interactive reads prompts from standard input: leave out the prompt"),
        (["RUN", "--seed", "-1"], "--seed -1 must be from 0 to 2^63 - 1"),
        (["RUN", "--tokens", "4", "The", "end"], "unrecognized arguments: end"),
        (["RUN", "--step", "5"], "has no checkpoint of step 5; there are 12, 8"),
        (["RUN", "--device", "gpu"], "device gpu cannot be used"),
        (["RUN", "--precision", "fp8"], "precision='fp8' must be auto, bfloat16 or float32"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence(run, sample, capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        sample(*(run.folder if word == "RUN" else word for word in words))
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and said.startswith("error: ") and said.count("\n") == 1


def test_without_a_tokenizer_there_is_no_text(run, tmp_path, sample, capsys):
    saved = open_run(run.folder)
    write_run(tmp_path / "random", saved.load_weights(), saved.config.to_dict(), 1, saved.data, None, {})
    with pytest.raises(SystemExit):
        sample(tmp_path / "random", "The")
    assert "random data have no tokenizer" in capsys.readouterr().err
