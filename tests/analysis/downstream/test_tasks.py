"""Tasks of lm_eval during training: numbers in the lines, the same training, and wrong ones in a sentence before it."""

import importlib.util
import io
import json
from contextlib import redirect_stderr

import pytest
import torch

from muown_train.analysis.downstream.scores import score_continuations
from muown_train.analysis.downstream.tasks import flatten_results
from muown_train.config.compose import load_config
from muown_train.runs.status import Outcome
from tests.end_to_end.test_parallel import list_weights
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import HERE, built, metrics, trained
from tests.training.test_trainer import weights

TASK = """task: words
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: {metric}
"""
DOCUMENTS = [
    {"text": "The kaban of", "choices": [" lodor", " xyz"], "answer": 0},
    {"text": "The mifil has", "choices": [" 12 kahums.", "!!!", "qqq"], "answer": 0},
    {"text": "The rugos of", "choices": ["1", " tedor has"], "answer": 1},
]


def write_task(folder, kind="multiple_choice", metric="acc"):
    (folder / "words.jsonl").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    (folder / "words.yaml").write_text(TASK.format(data=folder / "words.jsonl", kind=kind, metric=metric))
    return f"tasks=[{folder}/words.yaml]"


def test_numbers_are_named_by_task_metric_and_filter():
    results = {
        "words": {"alias": "words", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": 0.1, "exact,strict": 1},
        "a": {"acc,none": "N/A", "acc_stderr,none": "N/A"},
    }
    assert flatten_results(results) == {"tasks/words/acc": 0.5, "tasks/words/exact/strict": 1.0}


@pytest.mark.parametrize(
    "words, message",
    [
        (["tasks=hellaswag"], "tasks='hellaswag' must be a list of tasks of lm_eval"),
        (["eval_tasks_every=5"], r"eval_tasks_every=5 needs tasks=\[…\]"),
        (["tasks=[a]", "eval_tasks_limit=0"], "eval_tasks_limit=0 must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, message):
    with pytest.raises(ValueError, match=message):
        load_config(words)


def test_without_the_package_one_sentence(corpus, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    with pytest.raises(ValueError, match=r"^the library lm_eval is not .*\[tasks\]'`"):
        built(corpus, tmp_path, "tasks=[hellaswag]")
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.fixture
def lm_eval(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return pytest.importorskip("lm_eval")


@pytest.mark.slow
def test_tasks_are_measured_and_training_is_as_without(corpus, tmp_path, lm_eval):
    word = write_task(tmp_path)
    run = trained(corpus, tmp_path / "with", word, "eval_tasks_every=5")
    plain = trained(corpus, tmp_path / "without")
    lines = [line for line in metrics(run.folder) if "tasks/seconds" in line]
    assert [line["step"] for line in lines] == [5, 10, 12]
    tokenizer, found = run.data.tokenizer, []
    for document in DOCUMENTS:
        context = tokenizer.encode_batch([document["text"]])[0].tolist()
        whole = [tokenizer.encode_batch([document["text"] + choice])[0].tolist() for choice in document["choices"]]
        pairs = [(context, ids[len(context) :]) for ids in whole]
        scores = [score for score, _ in score_continuations(run.model.eval(), pairs, 32, 2, HERE, tokenizer.size)]
        found.append(scores.index(max(scores)) == document["answer"])
    assert lines[-1]["tasks/words/acc"] == pytest.approx(sum(found) / 3)
    assert all(torch.equal(a, b) for a, b in zip(weights(run), weights(plain), strict=True))


def train_with_tasks(world, corpus, out, *words):
    run = trained(corpus, out, *words, "micro_batch=1", world=world)
    return list_weights(run), run.model.training


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_share_the_work_and_find_what_one_finds(corpus, tmp_path, lm_eval, parallel):
    kind, words = f"parallel={parallel}", (write_task(tmp_path), "eval_tasks_every=6")
    plain = on_ranks(2, train_with_tasks, corpus, tmp_path / "plain", kind)
    both = on_ranks(2, train_with_tasks, corpus, tmp_path / "both", kind, *words)
    train_with_tasks(HERE, corpus, tmp_path / "one", *words)
    for (found, is_training), (expected, _) in zip(both, plain, strict=True):
        assert is_training and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    of_both, of_one = (metrics(tmp_path / name / "run") for name in ("both", "one"))
    for line, other in zip(of_both, of_one, strict=True):
        assert line.get("tasks/words/acc") == other.get("tasks/words/acc")
    assert [line["step"] for line in of_both if "tasks/seconds" in line] == [6, 12]


def fail_on_main(world, corpus, out, *words):
    import lm_eval.evaluator

    def fail(**_):
        raise KeyError("no such metric")

    lm_eval.evaluator.evaluate = fail
    with redirect_stderr(io.StringIO()) as said:
        train_with_tasks(world, corpus, out, *words)
    return said.getvalue()


@pytest.mark.slow
def test_a_fault_of_the_harness_ends_no_run(corpus, tmp_path, lm_eval):
    said, _ = on_ranks(2, fail_on_main, corpus, tmp_path, write_task(tmp_path))
    lines = metrics(tmp_path / "run")
    assert lines[-1]["step"] == 12 and not any(key.startswith("tasks/") for line in lines for key in line)
    assert "the downstream tasks are not measured this time: KeyError: 'no such metric'" in said


@pytest.mark.slow
def test_a_stop_ends_the_tasks_and_the_resume_owes_them(corpus, tmp_path, lm_eval):
    words = (write_task(tmp_path), "eval_every=12")
    run = built(corpus, tmp_path, *words)
    tasks = run.trainer.measurements[-1].measure

    def stop_and_score(pairs):
        run.trainer.stop.request("SIGTERM")
        return score(pairs)

    score, tasks.score = tasks.score, stop_and_score
    run.resume()
    assert run.train() == Outcome("stopped", "SIGTERM") and run.model.training
    run.close()
    assert metrics(run.folder)[-1]["step"] == 12 and "tasks/seconds" not in metrics(run.folder)[-1]
    trained(corpus, tmp_path, *words)
    assert "tasks/words/acc" in metrics(run.folder)[-1] and "valid/loss" in metrics(run.folder)[-1]
    assert built(corpus, tmp_path, *words).resume() == Outcome("finished")


@pytest.mark.slow
def test_a_task_that_generates_or_is_missing_is_refused(corpus, tmp_path, lm_eval):
    with pytest.raises(ValueError, match="tasks: words is of the kind generate_until: during training there are"):
        built(corpus, tmp_path, write_task(tmp_path, "generate_until", "exact_match"))
    with pytest.raises(ValueError, match=r"tasks: \S+nowhere.yaml cannot be read by lm_eval"):
        built(corpus, tmp_path, f"tasks=[{tmp_path}/nowhere.yaml]")
    with pytest.raises(ValueError, match=r"tasks: lm_eval has no hellaswagg \(did you mean hellaswag\?\)"):
        built(corpus, tmp_path, "tasks=[hellaswagg]")
    with pytest.raises(ValueError, match=r"cannot be read by lm_eval \(\w+Error: .*line \d"):
        (tmp_path / "broken.yaml").write_text("task: words\n  x: [1")
        built(corpus, tmp_path, f"tasks=[{tmp_path}/broken.yaml]")
