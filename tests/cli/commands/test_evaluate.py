"""`muown-train evaluate` as a user meets it; its numbers against training, transformers and simulation."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from muown_train.analysis import scoring
from muown_train.cli.commands.evaluate import main
from muown_train.data.shards.prepare import prepare_shards
from muown_train.data.text.eval_texts import count_token_bytes, encode_sources, read_eval_text
from muown_train.data.text.tokenizer import HubTokenizer, load_tokenizer
from muown_train.data.token_file import read_tokens
from muown_train.runs.saved_run import open_run
from tests.helpers.runs import metrics, trained
from tests.helpers.text_files import find_tokenizer, word_tokenizer_json
from tests.models.test_gpt import as_llama


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    return trained(corpus, tmp_path_factory.mktemp("runs"), "name='seed=0'", "valid_tokens=960")


@pytest.fixture(scope="module")
def other(corpus, tmp_path_factory):
    """A run with other data and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "tokenizer.json").write_text(word_tokenizer_json())
    return trained(corpus, folder, "name=bytes", f"data.tokenizer={folder}/tokenizer.json", "model.vocab_size=300")


@pytest.fixture
def evaluate(capsys, tmp_path):
    def call(*words) -> tuple[str, list[dict]]:
        file = tmp_path / "results.json"
        main([*map(str, words), "--json", str(file)])
        return capsys.readouterr().out, json.loads(file.read_text())["runs"]

    return call


@pytest.fixture
def texts(corpus, tmp_path):
    """Two files; one has three documents of two sources."""
    documents = [(corpus / f"{i:03d}.txt").read_text() for i in range(4)]
    sources = ["east", "west", "east"]
    lines = [json.dumps({"text": text, "from": source}) for text, source in zip(documents, sources, strict=False)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text(documents[3] + " — naïve")
    return tmp_path, documents


def test_without_data_it_is_the_validation_loss_of_training(run, evaluate):
    said, [found] = evaluate(run.folder)
    last = metrics(run.folder)[-1]
    assert found["step"] == 12 and found["all"]["tokens"] == last["valid/tokens"] == 960
    assert found["all"]["loss"] == pytest.approx(last["valid/loss"], rel=1e-7)
    assert found["all"]["perplexity"] == pytest.approx(math.exp(found["all"]["loss"]))
    text = run.data.tokenizer.decode(run.data.valid[1:].tolist()).replace("<|endoftext|>", "")
    assert found["all"]["bytes"] == len(text.encode())
    bits = found["all"]["loss"] * 960 / math.log(2) / len(text.encode())
    assert found["all"]["bits_per_byte"] == pytest.approx(bits)
    assert f"seed=0 @12     960  {found['all']['loss']:.4f} ± " in said


def test_an_interval_of_blocks_of_one_size_is_that_of_their_mean():
    sums = np.random.default_rng(0).normal(30, 5, size=40)
    value, error = scoring.estimate_ratio(sums, np.full(40, 10))
    assert value == pytest.approx(sums.mean() / 10)
    assert error == pytest.approx(1.96 * sums.std(ddof=1) / math.sqrt(40) / 10)
    assert scoring.estimate_ratio(sums[:29], np.full(29, 10))[1] is None


def test_more_or_less_of_the_held_out_text(run, evaluate):
    more = evaluate(run.folder, "valid_tokens=900", "--step", "8")[1][0]
    assert (more["step"], more["all"]["tokens"]) == (8, 900)


def test_equal_to_the_loss_of_transformers(run, evaluate, texts):
    folder, _ = texts
    found = evaluate(run.folder, "data=files", f"data.valid={folder}/b.txt", "--precision", "float32")[1][0]
    saved = open_run(run.folder)
    tokenizer = saved.load_tokenizer()
    text = (folder / "b.txt").read_text()
    ids = torch.tensor([0, *tokenizer.encode_batch([text])[0].tolist(), 0])
    llama, losses = as_llama(saved.load_model()), []
    with torch.no_grad():
        for row in [ids[start : start + 33] for start in range(0, len(ids) - 1, 32)]:
            losses.append(F.cross_entropy(llama(row[None, :-1]).logits[0], row[1:], reduction="sum").item())
    assert found["all"]["tokens"] == len(ids) - 1
    assert found["all"]["loss"] == pytest.approx(sum(losses) / (len(ids) - 1), abs=1e-5)
    assert found["all"]["bytes"] == len(text.encode())


def test_each_file_is_a_source(run, evaluate, texts):
    folder, documents = texts
    said, [found] = evaluate(run.folder, "data=files", f"data.valid={folder}/*.*")
    assert list(found["sources"]) == ["a.jsonl", "b.txt"]
    alone = evaluate(run.folder, "data=files", f"data.valid={folder}/a.jsonl")[1][0]
    assert alone["sources"] == {} and alone["all"]["tokens"] == found["sources"]["a.jsonl"]["tokens"]
    assert alone["all"]["loss"] == pytest.approx(found["sources"]["a.jsonl"]["loss"], rel=1e-6)
    summed = sum(numbers["loss"] * numbers["tokens"] for numbers in found["sources"].values())
    assert found["all"]["loss"] == pytest.approx(summed / found["all"]["tokens"])
    assert found["all"]["bytes"] == len("".join(documents).encode()) + len(" — naïve".encode())
    assert all(part in said for part in ("2 files", "a.jsonl", "b.txt"))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_sources_by_a_key(run, evaluate, texts, ending):
    folder, documents = texts
    table = pa.table({"from": ["east", "west", "east"], "text": documents[:3]})
    pq.write_table(table, folder / "a.parquet")
    found = evaluate(run.folder, "data=files", f"data.train={folder}/a.{ending}", "--source", "from")[1][0]
    sizes = {source: numbers["bytes"] for source, numbers in found["sources"].items()}
    assert sizes == {"east": len(documents[0] + documents[2]), "west": len(documents[1])}


def test_runs_side_by_side_with_their_difference(run, evaluate, texts):
    folder = texts[0]
    checkpoints = sorted((run.folder / "checkpoints").glob("step-*"))[::-1]
    said, [late, early] = evaluate(*checkpoints, "data=files", f"data.valid={folder}/a.jsonl", "seq_len=16")
    minus = early["all"]["minus_first"]
    assert (
        minus["loss"] == pytest.approx(early["all"]["loss"] - late["all"]["loss"]) and "minus_first" not in late["all"]
    )
    half = [numbers["loss_interval"][1] - numbers["loss"] for numbers in (minus, late["all"])]
    assert 0 < half[0] < half[1]
    assert f"{minus['loss']:+.4f} ± {half[0]:.4f}" in said and "loss minus the first's" in said


def test_tokenizers_differ_the_text_does_not(run, other, evaluate, texts):
    folder, documents = texts
    said, [bpe, of_bytes] = evaluate(run.folder, other.folder, "data=files", f"data.valid={folder}/a.jsonl")
    size = len("".join(documents[:3]))
    assert bpe["all"]["bytes"] == of_bytes["all"]["bytes"] == size
    assert of_bytes["all"]["tokens"] == size + 3 > bpe["all"]["tokens"]
    assert "The tokenizers differ: compare bits per byte" in said and "minus_first" not in of_bytes["all"]


def test_held_out_text_of_a_data_configuration(other, run, evaluate, corpus):
    """Of shards of another tokenizer, read as text by this run's own."""
    folder = other.folder / "shards"
    settings = {"train": f"{corpus}/*.txt", "tokenizer": str(other.folder.parent / "tokenizer.json")}
    prepare_shards(folder, "files", settings, tokens=None, valid_tokens=5000, shard_tokens=10**6)
    [found] = evaluate(run.folder, "data=shards", f"data.path={folder}", "valid_tokens=3000")[1]
    ids = read_tokens(next(folder.glob("*val*.bin")))[:3001]
    text = load_tokenizer(settings["tokenizer"]).decode(ids.tolist()).replace("<|endoftext|>", "")
    assert 2900 < found["all"]["bytes"] == len(text)


def test_data_that_have_changed_are_refused(corpus, tmp_path, evaluate, capsys):
    for i in range(20):
        (tmp_path / f"{i:03d}.txt").write_text((corpus / f"{i:03d}.txt").read_text())
    folder = trained(tmp_path, tmp_path / "runs").folder
    (tmp_path / "000.txt").write_text("Something else. " * 50)
    with pytest.raises(SystemExit):
        evaluate(folder)
    assert "have changed since it was trained (content was" in capsys.readouterr().err


def test_interrupted_it_shows_what_there_is(run, evaluate, monkeypatch, capsys, tmp_path):
    real = scoring.compute_block_losses

    def until_ctrl_c(*arguments):
        for i, loss in enumerate(real(*arguments)):
            if i == 12:
                raise KeyboardInterrupt
            yield loss

    monkeypatch.setattr(scoring, "compute_block_losses", until_ctrl_c)
    with pytest.raises(SystemExit) as stopped:
        evaluate(run.folder)
    said = capsys.readouterr()
    assert stopped.value.code == 130 and "interrupted in seed=0 @12, the table has what was done" in said.err
    assert "seed=0 @12 (a part)     384 " in said.out
    [found] = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert not found["complete"] and found["all"]["blocks"] == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=files"], "no run is given"),
        (["nowhere"], "there is no folder nowhere"),
        (["RUN", "data=fils"], "there is no data=fils (did you mean files?)"),
        (["RUN", "data=files"], "data.valid is not set"),
        (["RUN", "data=files", "data.valid=nothing*.txt"], "data.valid: no file matches 'nothing*.txt'"),
        (["RUN", "data.valid=x.txt"], "data.valid=x.txt has no data to belong to: give data=files"),
        (["RUN", "data=files", "data.vaild=x"], "there is no key data.vaild (did you mean data.valid?)"),
        (["RUN", "data=files", "data.valid=TEXT", "data.tokenizer=gpt2"], "by its own tokenizer"),
        (["RUN", "data=files", "data.valid=TEXT", "valid_tokens=5"], "data=files is read as a whole"),
        (["RUN", "data=files", "data.valid=TEXT", "--source", "origin"], "line 1 has no key 'origin', only text, from"),
        (["RUN", "data=random"], "data=random has no text to evaluate on"),
        (["RUN", "--source", "from"], "--source from is for files"),
        (["RUN", "seq_len=33"], "seq_len=33 is longer than what the model of"),
        (["RUN", "seq_len=0"], "seq_len=0 must be a whole number of at least 1"),
        (["RUN", "lr=3"], "there is no key lr"),
        (["RUN", "--precision", "fp8"], "precision='fp8' must be"),
        (["RUN", "--step", "5"], "has no checkpoint of step 5"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence(run, evaluate, texts, capsys, words, message):
    named = {"RUN": str(run.folder), "TEXT": f"{texts[0]}/a.jsonl"}
    with pytest.raises(SystemExit) as stopped:
        evaluate(*(named.get(word, word.replace("TEXT", named["TEXT"])) for word in words))
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and said.startswith("error: ") and said.count("\n") == 1


def test_an_interval_holds_the_truth_as_often_as_it_says():
    random = np.random.default_rng(0)
    held, trials, blocks = 0, 2000, 100
    for _ in range(trials):
        sizes = random.integers(50, 151, blocks)
        sums = sizes * random.gamma(4, 0.75, blocks)  # a mean of 3 for each token
        value, half = scoring.estimate_ratio(sums, sizes)
        held += abs(value - 3) <= half
    assert held / trials == pytest.approx(0.95, abs=0.02)


def test_few_blocks_have_no_interval():
    assert scoring.estimate_ratio(np.array([2.0, 4.0]), np.array([1, 1])) == (3.0, None)


SLOW_QWEN2 = pytest.param("qwen2_tokenizer.json", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["gpt2.tiktoken", "gpt_neox_20b_tokenizer.json", SLOW_QWEN2])
@pytest.mark.slow
def test_bytes_of_tokens(name, tmp_path):
    check_bytes(load_tokenizer(str(find_tokenizer(name, tmp_path))))


def check_bytes(tokenizer):
    sizes = count_token_bytes(tokenizer)
    text = "naïve — 東京\n\n    def f(x): return '🇩🇪'  \t12345 <|endoftext|>"
    assert sizes[tokenizer.encode_batch([text])[0]].sum() == len(text.encode())
    assert sizes[tokenizer.end_of_text] == 0


def test_bytes_of_tokens_without_files():
    tokenizer = HubTokenizer("bytes", word_tokenizer_json().encode())
    check_bytes(tokenizer)
    assert (count_token_bytes(tokenizer)[:256] == 1).all()


def test_a_tokenizer_that_is_not_of_bytes_has_no_bits_per_byte():
    config = json.loads(word_tokenizer_json())
    config["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    assert count_token_bytes(HubTokenizer("words", json.dumps(config).encode())) is None


def test_every_token_of_the_text_is_a_target(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    data = {"_target_": "muown_train.data.sources.files", "valid": str(tmp_path / "a.txt")}
    tokenizer = HubTokenizer("bytes", word_tokenizer_json().encode())
    ids = encode_sources(read_eval_text(data, None, 1, tmp_path), tokenizer)["all"]
    assert tokenizer.decode(ids.tolist()) == "<|endoftext|>abc<|endoftext|>"
