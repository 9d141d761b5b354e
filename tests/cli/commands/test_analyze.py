"""`muown-train analyze` as a user meets it; its results equal those of the probes of a run."""

import json
import math
import os
import subprocess
import sys
import threading

import pytest
from filelock import FileLock

from muown_train.analysis.checkpoints import Results
from muown_train.cli.commands.analyze import format_table, main
from muown_train.runs.saved_run import open_run, write_run
from tests.analysis.test_probes import probed
from tests.helpers.runs import built, trained, wait_until

PROBES = ("probes=[spectral,effective_rank,attention_logits,copying]", "probe_every=4")


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    return trained(corpus, tmp_path_factory.mktemp("runs"), *PROBES)


@pytest.fixture
def analyze(capsys):
    def call(*words) -> str:
        main([str(word) for word in words])
        return capsys.readouterr().out

    return call


def results(folder, kind):
    return [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["spectral", "effective_rank", "attention_logits", "copying"])
@pytest.mark.slow
def test_it_finds_what_the_probe_found(run, analyze, tmp_path, kind):
    said = analyze(kind, run.folder, "--all", "--out", tmp_path)
    lines = results(tmp_path / "run", kind)
    assert [line["step"] for line in lines] == [8, 12]
    for line in lines:
        expected = {k: v for k, v in probed(run.folder)[line["step"]].items() if k.startswith(f"{kind}/")}
        assert expected
        found = {f"{kind}/{key}": value for key, value in line.items()}
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert "after step 8" in said and "after step 12" in said
    shown = {"attention_logits": "layer 0", "copying": "second minus first"}
    assert shown.get(kind, "blocks.*.mlp.out.weight") in said


def test_results_go_to_the_run_and_are_not_made_twice(corpus, tmp_path, analyze):
    run = trained(corpus, tmp_path)
    before = (run.folder / "metrics.jsonl").read_bytes()
    said = analyze("spectral", run.folder)
    file = run.folder / "analysis" / "spectral.jsonl"
    line = json.loads(file.read_text())
    assert line["step"] == 12 and str(file) in said
    file.write_text(json.dumps(line | {"blocks.0.mlp.out.weight/spectral_norm": 7654.0}) + "\n")
    assert "7654" in analyze("spectral", run.folder)  # what is there is shown
    assert "7654" not in analyze("spectral", run.folder, "--iterations", 5)  # other settings are measured
    assert "7654" in analyze("spectral", run.folder)  # and take nothing's place
    analyze("spectral", run.folder, "--steps", "8,12")
    found = [(line["step"], line["iterations"]) for line in results(file.parent, "spectral")]
    assert found == [(8, None), (12, None), (12, 5)]
    file.write_text(json.dumps(line | {"checkpoint": "of another run"}) + "\n")
    analyze("spectral", run.folder)
    assert results(file.parent, "spectral") == [line]
    again = built(corpus, tmp_path)  # training does not mind
    assert again.resume()
    again.close()
    assert (run.folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_noise_is_shown_by_matrix_and_quartile(run, analyze, tmp_path):
    said = analyze("gradient_noise", run.folder, "--batches", 2, "--out", tmp_path)
    assert "Muon / Muown" in said and "upper quartile" in said
    (line,) = results(tmp_path / "run", "gradient_noise")
    assert line["batches"] == 2 and line["median/muown"] > 0
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == ["gradient_noise.jsonl"]


def test_by_default_noise_is_of_all_updates(run, analyze, tmp_path):
    analyze("gradient_noise", run.folder, "--out", tmp_path)
    assert results(tmp_path / "run", "gradient_noise")[0]["batches"] == 12


def test_what_another_process_measures_is_waited_for(run, analyze, tmp_path, capsys):
    analyze("spectral", run.folder, "--out", tmp_path)
    file = tmp_path / "run" / "spectral.jsonl"
    (line,) = results(file.parent, "spectral")
    file.unlink()
    lock = FileLock(file.with_name(".spectral.lock"))
    lock.acquire()
    said: list[str] = []
    other = threading.Thread(target=lambda: said.append(analyze("spectral", run.folder, "--out", tmp_path)))
    other.start()
    wait_until(lambda: "another process measures its spectral, wait for it" in capsys.readouterr().err)
    file.write_text(json.dumps(line | {"blocks.0.mlp.out.weight/spectral_norm": 7654.0}) + "\n")
    lock.release()
    other.join()
    assert "7654" in said[0]  # what the other has found


def test_what_was_summed_up_stays_until_the_result_is_kept(run, analyze, tmp_path, monkeypatch):
    def full(self, line):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(Results, "add", full)
        analyze("gradient_noise", run.folder, "--batches", 2, "--out", tmp_path)
    assert len(list((tmp_path / "run").glob("gradient_noise-*"))) == 2
    analyze("gradient_noise", run.folder, "--batches", 2, "--out", tmp_path)
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == ["gradient_noise.jsonl"]


def test_a_norm_that_is_nan_is_the_largest():
    numbers = {f"blocks.{i}.mlp.out.weight/spectral_norm": norm for i, norm in enumerate((2.0, math.nan, 3.0))}
    assert format_table("spectral", numbers)[1].split() == ["blocks.*.mlp.out.weight", "nan"]


@pytest.mark.slow
def test_two_ranks_write_one_result(run, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "muown_train", "analyze", "effective_rank", str(run.folder), "--out", str(tmp_path)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    (line,) = results(tmp_path / "run", "effective_rank")
    expected = {k: v for k, v in probed(run.folder)[12].items() if k.startswith("effective_rank/")}
    assert {f"effective_rank/{k}": v for k, v in line.items() if f"effective_rank/{k}" in expected} == pytest.approx(
        expected, rel=1e-3
    )
    assert done.stdout.count("after step 12") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: WHAT"),
        (["specral", "RUN"], "invalid choice: 'specral'"),
        (["spectral"], "the following arguments are required: RUN"),
        (["spectral", "nowhere"], "there is no folder nowhere: give that of a run"),
        (["spectral", "RUN", "--steps", "5"], "has no checkpoint of step 5; there are 12, 8"),
        (["spectral", "RUN", "--steps", "five"], "--steps five must be steps with commas"),
        (["spectral", "RUN", "--quantiles", "1"], "quantiles=1 must be 0, or 2 or more"),
        (["spectral", "RUN", "--iterations", "-3"], "iterations=-3 must be a whole number of at least 1"),
        (["effective_rank", "RUN", "--tokens", "33"], "tokens=33 must be a multiple of seq_len=32"),
        (["effective_rank", "RUN", "--gradients", "0"], "gradients=0 must be a whole number of at least 1"),
        (["attention_logits", "RUN", "--rows", "0"], "rows=0 must be a whole number of at least 1"),
        (["gradient_noise", "RUN", "--batches", "0"], "--batches 0 must be 1 or more"),
        (["gradient_noise", "RUN", "--save-every", "0"], "--save-every 0 must be 1 or more"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence(run, analyze, capsys, tmp_path, words, message):
    words = [run.folder if word == "RUN" else word for word in words]
    with pytest.raises(SystemExit) as stopped:
        analyze(*words, *(["--out", tmp_path] if len(words) > 1 else []))
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and said.startswith("error: ") and said.count("\n") == 1
    assert not list(tmp_path.glob("**/*.jsonl"))


def test_weights_alone_have_no_gradient_of_R(run, analyze, capsys, tmp_path):
    saved = open_run(run.folder)
    write_run(
        tmp_path / "average",
        saved.load_weights(),
        saved.config.to_dict(),
        1,
        saved.data,
        saved.load_tokenizer().raw,
        {},
    )
    analyze("spectral", tmp_path / "average")
    with pytest.raises(SystemExit):
        analyze("effective_rank", tmp_path / "average")
    assert "holds weights alone" in capsys.readouterr().err
