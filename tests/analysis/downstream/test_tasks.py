"""Tasks of lm_eval during training: numbers in the lines, the same training, and wrong ones in a sentence before it."""

import importlib.util
import json

import pytest
import torch

from muown_train.analysis.downstream.scores import score_continuations
from muown_train.analysis.downstream.tasks import flatten_results
from muown_train.config.compose import load_config
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
    with pytest.raises(ValueError, match=r"^the library lm_eval is not .*\[lm_eval\]'`"):
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


@pytest.mark.slow
def test_a_task_that_generates_or_is_missing_is_refused(corpus, tmp_path, lm_eval):
    with pytest.raises(ValueError, match="tasks: words is of the kind generate_until: during training there are"):
        built(corpus, tmp_path, write_task(tmp_path, "generate_until", "exact_match"))
    with pytest.raises(ValueError, match=r"tasks: \S+nowhere.yaml cannot be read by lm_eval"):
        built(corpus, tmp_path, f"tasks=[{tmp_path}/nowhere.yaml]")
