"""Whole runs on a mix of two sources: killed, on other ranks and batches, and with weights that have changed."""

import json

import pytest
import torch

from muown_train.runtime.distributed import World
from tests.cli.test_main import call
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import SMALL, built, losses, metrics, train_until_killed, trained
from tests.helpers.text_files import word_tokenizer_json

pytestmark = pytest.mark.slow
STEPS, ROWS, ROW = 18, 12, 32  # rows of a batch divide among 1, 2, 3 and 4 ranks


@pytest.fixture(scope="module")
def words(corpus, tmp_path_factory):
    """Settings of a run on two parts of the corpus, one of which it passes several times."""
    tokenizer = tmp_path_factory.mktemp("tokenizer") / "words.json"
    tokenizer.write_text(word_tokenizer_json())
    return (
        *("data=mix", "+data@data.sources.web=files", "+data@data.sources.code=files"),
        *(f"data.sources.web.train={corpus}/0*.txt", f"data.sources.code.train={corpus}/119.txt"),
        *("data.weights={web: 0.7, code: 0.3}", f"data.tokenizer={tokenizer}", "model.vocab_size=300"),
        *(f"batch_tokens={ROWS * ROW}", f"tokens={STEPS * ROWS * ROW}", "micro_batch=1", "valid_tokens=40"),
        *("schedule=constant", "schedule.warmup=0"),  # whatever the budget
    )


@pytest.fixture(scope="module")
def whole(corpus, words, tmp_path_factory):
    """A run from start to end on one rank."""
    return trained(corpus, tmp_path_factory.mktemp("whole"), *words)


def hashes(folder):
    lines = [line for line in metrics(folder) if "data/hash" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["data/hash"] for line in lines]


def test_it_learns_and_says_what_it_was_trained_on(whole):
    found = losses(whole.folder)
    assert len(found) == STEPS and found[-1] < found[0] - 0.1
    assert len(set(hashes(whole.folder))) == STEPS
    data = json.loads((whole.folder / "manifest.json").read_text())["data"]
    assert data["mixture"] == "0.3 code + 0.7 web" and data["held_out_tokens"] == 40
    drawn = data["drawn_tokens"]
    assert sum(drawn.values()) == STEPS * ROWS * ROW and abs(drawn["code"] - 0.3 * STEPS * ROWS * ROW) < ROW
    assert {name: source["weight"] for name, source in data["sources"].items()} == {"code": 0.3, "web": 0.7}
    assert drawn["code"] > data["sources"]["code"]["tokens"] and drawn["web"] < data["sources"]["web"]["tokens"]


def test_killed_it_goes_on_bit_for_bit(corpus, words, whole, tmp_path, capsys):
    train_until_killed(built(corpus, tmp_path, *words), 6)
    resumed = trained(corpus, tmp_path, *words)
    data = json.loads((resumed.folder / "manifest.json").read_text())["data"]
    assert f"\n  code: {data['drawn_tokens']['code']:,} tokens of " in capsys.readouterr().out
    assert hashes(resumed.folder) == hashes(whole.folder) and losses(resumed.folder) == losses(whole.folder)
    for (name, p), q in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_micro_batch_changes_no_batch(corpus, words, whole, tmp_path):
    assert hashes(trained(corpus, tmp_path, *words, "micro_batch=3").folder) == hashes(whole.folder)


def train(world: World, corpus, out, words) -> None:
    trained(corpus, out, *words, world=world)


def test_it_goes_on_on_any_number_of_ranks(corpus, words, whole, tmp_path):
    for steps, size in [(4, 2), (8, 4), (11, 1), (STEPS, 3)]:
        on_ranks(size, train, corpus, tmp_path, (*words, f"tokens={steps * ROWS * ROW}"))
    assert hashes(tmp_path / "run") == hashes(whole.folder)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole.folder), abs=1e-3)


def test_bad_numbers_pass_over_the_same_rows(corpus, words, whole, tmp_path):
    """A rollback skips rows of the run, and so some of each source."""
    run = built(corpus, tmp_path, *words)
    run.trainer.loader.skip([(2 * ROWS, 5 * ROWS)])
    found = [f"{next(run.trainer.loader).hash % 2**64:016x}" for _ in range(4)]
    run.close()
    expected = hashes(whole.folder)
    assert found == [*expected[:2], *expected[5:7]]


def test_other_weights_are_refused_in_a_sentence(corpus, words, tmp_path, monkeypatch):
    train_until_killed(built(corpus, tmp_path, *words), 6)
    given = [*SMALL, *words, "name=run", f"out={tmp_path}", f"cache={corpus}/cache"]
    status, said = call(monkeypatch, *given, "data.weights={web: 0.6, code: 0.4}")
    assert status == 2 and said == (
        f"error: {tmp_path}/run holds a run on other data (mixture was 0.3 code + 0.7 web, is 0.4 code + 0.6 web): "
        "give it another name, or the data as they were\n"
    )
    more = [*given, "+data@data.sources.prose=files", f"data.sources.prose.train={corpus}/100.txt"]
    status, said = call(monkeypatch, *more, "+data.weights.prose=1")
    assert status == 2 and "mixture was 0.3 code + 0.7 web, is 0.3 code + 1 prose + 0.7 web)" in said
