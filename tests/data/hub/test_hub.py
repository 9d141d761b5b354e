"""The unmodified production configuration against a hub on the loopback, in a process of its own."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muown_train.data.rows import permute
from tests.helpers.hub_server import Fault, Hub
from tests.helpers.paths import ROOT, SHARED
from tests.helpers.text_files import SAMPLE, word_tokenizer_json

CORPUS = SHARED / "corpus"
CARD = """---
configs:
- config_name: sample-100BT
  data_files:
  - split: train
    path: sample/100BT/*
---
"""
T = 32

CLIENT = """
import json, sys
from pathlib import Path
import yaml
from hydra.utils import instantiate
from muown_train.data.loader import Loader
from muown_train.data.sources import RunInfo
from tests.helpers.text_files import union

published = yaml.safe_load(Path("configs/data/fineweb_edu.yaml").read_text())

def attempt(cache, legs, config, run):
    run = {"seq_len": 32, "seed": 0, "valid_tokens": 300, "vocab_size": 50280, "cache": Path(cache)} | run
    load = instantiate(published | config)
    run = RunInfo(**run)
    data, state, batches = load(run=run), None, []
    for size, steps in legs:
        loaders = [Loader(load(run=run).train, 12, rank, size) for rank in range(size)]
        for loader in loaders:
            if state:
                loader.load_state_dict(state)
        for _ in range(steps):
            parts = [next(loader) for loader in loaders]
            rows = [parts[k % size].tokens[k // size].tolist() for k in range(12)]
            batches.append([sum(part.hash for part in parts) % 2**64, rows])
        state = json.loads(json.dumps(union(loader.state_dict() for loader in loaders)))
        for loader in loaders:
            loader.close()
    return {"metadata": data.metadata, "valid": data.valid.tolist(), "batches": batches, "state": state}

results = []
for case in json.loads(sys.argv[1]):
    try:
        results.append(attempt(**case))
    except Exception as error:
        results.append({"error": type(error).__name__, "message": str(error)})
print(json.dumps(results))
"""


def clients(environment, tmp_path, cases, said=False):
    defaults = {"cache": str(tmp_path / "cache"), "legs": [], "config": {}, "run": {}}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, json.dumps([defaults | case for case in cases])],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return (results, done.stderr) if said else results


def client(environment, tmp_path, said=False, **case):
    (result,), lines = clients(environment, tmp_path, [case], said=True)
    return (result, lines) if said else result


def texts_of(file):
    return [f"Document {k} of file {file}: {'words ' * (k % 9)}." for k in range(300 if file < 4 else 60)]


def build(root, files, group=64):
    data = root / "datasets" / "HuggingFaceFW" / "fineweb-edu"
    (data / "sample" / "100BT").mkdir(parents=True)
    (data / "README.md").write_text(CARD)
    for file in files:
        count = len(texts_of(file))
        table = pa.table({"id": [str(k) for k in range(count)], "text": texts_of(file), "score": range(count)})
        pq.write_table(table, data / "sample" / "100BT" / f"{file:03d}.parquet", row_group_size=group)
    model = root / "models" / "EleutherAI" / "gpt-neox-20b"
    model.mkdir(parents=True)
    (model / "tokenizer.json").write_text(word_tokenizer_json())
    (root / "models" / "HuggingFaceFW" / "other").mkdir(parents=True)
    lines = root / "datasets" / "owner" / "lines"
    lines.mkdir(parents=True)
    for file in range(3):
        texts = [json.dumps({"body": text, "n": k}) for k, text in enumerate(texts_of(file))]
        (lines / f"train-{file}.jsonl").write_text("\n".join(texts))
    broken = root / "datasets" / "owner" / "broken"
    broken.mkdir()
    pq.write_table(pa.table({"text": texts_of(0)}), broken / "train-0.parquet", row_group_size=group)
    raw = (broken / "train-0.parquet").read_bytes()
    (broken / "train-1.parquet").write_bytes(raw[:200] + bytes(len(raw) - 200))  # no parquet file any more
    return root


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with Hub(build(tmp_path_factory.mktemp("hub"), range(5))) as hub:
        yield hub


LINES = {"path": "owner/lines", "name": None, "text": "body"}
WRONG = [
    ({"path": "nobody/nothing"}, "the hub has no data set nobody/nothing"),
    ({"path": "no/such/name"}, "data.path='no/such/name' is not a name of a data set"),
    ({"name": "sample-1BT"}, "data set HuggingFaceFW/fineweb-edu (sample-1BT)"),
    ({"split": "test"}, "split 'test'"),
    ({"text": "body"}, "has no column 'body' (data.text); its columns: id, text, score"),
    ({"text": "score"}, "column 'score' (data.text) holds int64, not text"),
    ({"revision": "v9"}, "has no revision 'v9' (data.revision)"),
    ({"tokenizer": "nobody/nothing"}, "data.tokenizer=nobody/nothing: the hub has no such model"),
    ({"tokenizer": "HuggingFaceFW/other"}, "this model has no tokenizer.json"),
    ({"streams": 0}, "data.streams=0 must be a whole number of at least 1"),
    ({"streams": 1.5}, "data.streams=1.5 must be a whole number"),
    ({"streams": True}, "data.streams=True must be a whole number"),
    ({"shuffle": 0}, "data.shuffle=0 must be a whole number of at least 1"),
    ({"retries": -1}, "data.retries=-1 must be a whole number of at least 0"),
]
CASES = {
    "published": {"legs": [(1, 8)]},
    "lines": {"legs": [(1, 60)], "config": LINES},
    "lines, changing ranks": {"legs": [(2, 17), (1, 1), (3, 42)], "config": LINES},
    "small vocabulary": {"config": {"path": "owner/never_looked_up"}, "run": {"vocab_size": 100}},
    "broken file": {"config": {"path": "owner/broken", "name": None}},
    **{str(config): {"config": config} for config, _ in WRONG},
}


@pytest.fixture(scope="module")
def results(hub, tmp_path_factory):
    """What one process got in each of the cases above: to start it takes longer than any of them."""
    folder = tmp_path_factory.mktemp("client")
    return dict(zip(CASES, clients(hub.environment(folder), folder, list(CASES.values())), strict=True))


def decode(ids):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(word_tokenizer_json()).decode(ids, skip_special_tokens=False)


def shuffled(texts, seed, stream):
    """The order in which a stream that begins with these texts, fewer than a window holds, reads them."""
    return [texts[k] for k in permute(np.arange(len(texts)), len(texts), (seed, 0, stream, 0)).tolist()]


def test_streaming_from_the_hub(hub, results):
    result = results["published"]
    metadata = result["metadata"]
    assert metadata["files"] == 5 and metadata["streams"] == 20 and metadata["revision"] == hub.commit
    assert metadata["tokenizer"] == "EleutherAI/gpt-neox-20b" and metadata["held_out_tokens"] == 300

    assert len(result["valid"]) == 301
    held_out = "<|endoftext|>".join(texts_of(4))
    assert held_out.startswith(decode(result["valid"]))

    rows = [row for _, batch in result["batches"] for row in batch]
    groups = [texts_of(file)[64 * k : 64 * k + 64] for file in range(4) for k in range(5)]
    for number, group in enumerate(permute(np.arange(20), 20, (0,)).tolist()):
        own = rows[number::20]
        joined = own[0][:1] + [token for row in own for token in row[1:]]
        assert "<|endoftext|>".join(shuffled(groups[group], 0, number)).startswith(decode(joined))


@pytest.mark.slow
def test_with_more_files_than_streams_the_last_is_held_out(hub, tmp_path):
    cases = [{"legs": [(1, 4)], "config": {"streams": 4, "shuffle": 1}, "run": {"valid_tokens": v}} for v in (300, 9)]
    result, fewer = clients(hub.environment(tmp_path), tmp_path, cases)
    assert result["metadata"]["streams"] == 4 and result["batches"] == fewer["batches"] and len(fewer["valid"]) == 10
    rows = [row for _, batch in result["batches"] for row in batch]
    for number, file in enumerate(permute(np.arange(4), 4, (0,)).tolist()):
        own = rows[number::4]
        joined = own[0][:1] + [token for row in own for token in row[1:]]
        assert "<|endoftext|>".join(texts_of(file)).startswith(decode(joined))


def test_files_of_other_formats(results):
    alone, changing = results["lines"], results["lines, changing ranks"]
    assert alone["metadata"]["streams"] == 2 and alone["metadata"]["files"] == 3, alone
    assert alone["batches"] == changing["batches"] and "<|endoftext|>".join(texts_of(2)).startswith(
        decode(alone["valid"])
    )
    order = permute(np.arange(2), 2, (0,)).tolist()
    first = shuffled(texts_of(order[0])[:128], 0, 0)
    assert "<|endoftext|>".join(first).startswith(decode(alone["batches"][0][1][0]))


@pytest.mark.slow
def test_a_hub_that_fails_now_and_then_changes_no_row(hub, tmp_path):
    environment = hub.environment(tmp_path)
    alone = client(environment, tmp_path, legs=[(1, 50)])
    faults = [Fault(status=503), Fault(cut=3), Fault(status=429, headers={"Retry-After": "1"})]
    hub.disturb = lambda path, number: faults[number // 11 % 3] if number % 11 == 0 else None
    try:
        disturbed, said = client(environment, tmp_path, legs=[(2, 20), (1, 30)], said=True)
    finally:
        hub.disturb = lambda path, number: None
    assert disturbed["batches"] == alone["batches"]
    lines = [line for line in said.splitlines() if "trying again" in line]
    assert lines and all(
        "data set HuggingFaceFW/fineweb-edu (sample-100BT): reading sample/100BT/00" in x for x in lines
    )


@pytest.mark.slow
def test_ranks_and_resumes_see_the_same_rows(hub, tmp_path):
    cases = [{"legs": [(1, 60)]}, {"legs": [(2, 13), (1, 29), (4, 11), (3, 7)]}]
    alone, changing = clients(hub.environment(tmp_path), tmp_path, cases)
    assert changing["batches"] == alone["batches"]
    assert changing["state"]["rows"] == alone["state"]["rows"] == 60 * 12
    assert len(alone["state"]["streams"]) == 20


@pytest.mark.slow
def test_of_a_single_row_group_training_skips_what_is_held_out(tmp_path):
    with Hub(build(tmp_path / "hub", [0], group=1000)) as hub:
        case = {"legs": [(1, 1)], "run": {"valid_tokens": 100}, "config": {"shuffle": 1}}
        result, error = clients(hub.environment(tmp_path), tmp_path, [case, {"run": {"valid_tokens": 10**6}}])
    assert "is one part, and all is held out: lower valid_tokens=1000000" in error["message"]
    held_out = decode(result["valid"]).split("<|endoftext|>")
    whole = [text for text in texts_of(0) if text in held_out]
    assert result["metadata"]["streams"] == 1 and whole
    first = decode(result["batches"][0][1][0])
    skipped = len(held_out)  # the last one held out is cut, and skipped too
    assert texts_of(0)[skipped].startswith(first[:20])


def test_a_vocabulary_too_small_is_an_error_before_the_data_are_looked_up(hub, results):
    result = results["small vocabulary"]
    assert result["error"] == "ValueError"
    assert result["message"] == (
        "tokenizer EleutherAI/gpt-neox-20b has 257 entries but model.vocab_size is 100: "
        "set model.vocab_size to at least 257"
    )
    assert hub.requests and not [path for _, path in hub.requests if "never_looked_up" in path]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[str(config) for config, _ in WRONG])
def test_errors_before_training(results, config, message):
    result = results[str(config)]
    assert result.get("error") == "ValueError", result
    assert message in result["message"] and "\n" not in result["message"]


@pytest.mark.parametrize(
    "name", ["HuggingFaceFW/fineweb-edu", pytest.param("EleutherAI/gpt-neox-20b", marks=pytest.mark.long)]
)
@pytest.mark.slow
def test_no_hub(hub, tmp_path, name):
    """For the tokenizer the hub's client tries again for half a minute."""
    local = str(hub.root / "models" / "EleutherAI" / "gpt-neox-20b")
    config = {"tokenizer": local} if name.startswith("HuggingFaceFW") else {}
    dead = {**hub.environment(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    result = client(dead, tmp_path, config=config)
    assert result["error"] == "ConnectionError", result
    assert name in result["message"] and "refused" in result["message"] and "\n" not in result["message"]


def test_a_broken_file(results):
    result = results["broken file"]
    assert result["error"] == "ConnectionError"
    assert "data set owner/broken: reading train-1.parquet failed" in result["message"]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["sample", "whole"])
def test_the_corpus_under_the_name_of_fineweb_edu(tmp_path, whole):
    if whole and not CORPUS.is_dir():
        pytest.skip("needs the whole corpus")
    paths = sorted(CORPUS.glob("train-*.parquet")) if whole else [SAMPLE]
    files = [pq.ParquetFile(path) for path in paths]
    groups = [(file, group) for file, shard in enumerate(files) for group in range(shard.num_row_groups)][:-1]
    root = build(tmp_path / "hub", [])
    for path in paths:
        (root / "datasets/HuggingFaceFW/fineweb-edu/sample/100BT" / path.name).symlink_to(path)
    with Hub(root) as hub:
        result = client(hub.environment(tmp_path), tmp_path, legs=[(1, 3), (2, 2)])
    assert result["metadata"]["files"] == len(paths) and result["metadata"]["streams"] == len(groups)
    assert (len(paths), len(groups)) == ((8, 31) if whole else (1, 6))
    rows = np.array([row for _, batch in result["batches"] for row in batch])
    assert rows.shape == (60, T + 1) and rows.max() <= 256
    file, group = groups[int(permute(np.arange(len(groups)), len(groups), (0,))[0])]
    window = files[file].read_row_group(group, columns=["text"]).column(0)[:128].to_pylist()
    assert shuffled(window, 0, 0)[0].startswith(decode(rows[0].tolist())[:20])
