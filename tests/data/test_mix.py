"""data=mix: what it makes of the configurations of its sources, and what it refuses."""

import copy
import json
import re

import numpy as np
import pytest

from muown_train.config.compose import load_config
from muown_train.config.resume_check import check_same_data, check_same_run
from muown_train.data import mix as mix_module
from muown_train.data.mixed_rows import Mixture
from muown_train.data.sources import RunInfo, build_data, files
from muown_train.data.text.eval_texts import read_eval_text
from tests.helpers.text_files import chat_tokenizer, word_tokenizer_json

MIX = ["data=mix", "+data@data.sources.web=files", "+data@data.sources.code=files"]
RUN = {"seq_len": 16, "seed": 0, "vocab_size": 300}
LETTERS = {"web": "w", "code": "c"}  # each source spells its own


@pytest.fixture
def settings(tmp_path):
    """The section `data` of a mix of two folders, three quarters of it web."""
    for name, letter in LETTERS.items():
        (tmp_path / name).mkdir()
        for k in range(200):
            (tmp_path / name / f"{k}.txt").write_text(letter * (20 + k % 30))
    (tmp_path / "words.json").write_text(word_tokenizer_json())
    section = load_config([*MIX, "data.weights={web: 0.75, code: 0.25}"]).data
    for name in LETTERS:
        section["sources"][name]["train"] = str(tmp_path / name)
    return section | {"tokenizer": str(tmp_path / "words.json")}


def build(settings, tmp_path, said=None, **changes):
    run = RunInfo(cache=tmp_path / "cache", progress=(said or []).append, **{"valid_tokens": 400, **RUN, **changes})
    return build_data(settings, run)


def change(settings, path, value):
    """Return the settings with another value at a dotted path."""
    changed = copy.deepcopy(settings)
    *parents, last = path.split(".")
    node = changed
    for key in parents:
        node = node[key]
    node[last] = value
    return changed


def count_letters(data, ids):
    text = data.tokenizer.decode(ids)
    return {name: text.count(letter) for name, letter in LETTERS.items()}


def test_a_mix_is_its_sources_in_their_shares(settings, tmp_path):
    data = build(settings, tmp_path)
    rows = data.train.take(range(400))
    found = [set(data.tokenizer.decode(row).replace("<|endoftext|>", "")) for row in rows.tolist()]
    assert found.count({"w"}) == 300 and found.count({"c"}) == 100  # no row is of both
    run = RunInfo(cache=tmp_path / "cache", valid_tokens=100, progress=lambda line: None, **RUN)
    alone = files(settings["sources"]["code"]["train"], tokenizer=settings["tokenizer"], run=run)
    np.testing.assert_array_equal(
        rows[[k for k, own in enumerate(found) if own == {"c"}]], alone.train.take(range(100))
    )


def test_what_they_hold_out_is_in_the_same_shares_whatever_the_seed(settings, tmp_path):
    first, second = (build(settings, tmp_path, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(first.valid, second.valid)
    assert len(first.valid) == 401 and first.metadata["held_out_tokens"] == 400
    text = first.tokenizer.decode(first.valid)
    assert re.fullmatch(r"(c|<\|endoftext\|>)+(w|<\|endoftext\|>)+", text)  # source after source, by name
    code = len(first.tokenizer.encode_batch([re.match(r"[^w]*", text)[0]])[0])
    assert count_letters(first, first.valid)["code"] in range(80, 101) and code > 0
    shares = Mixture(settings["weights"], 0).count(400)
    assert shares == {"code": 100, "web": 300}


def test_files_to_validate_on(settings, tmp_path):
    (tmp_path / "held.txt").write_text("cw" * 300)
    data = build(settings | {"valid": str(tmp_path / "held.txt")}, tmp_path)
    assert data.tokenizer.decode(data.valid) == ("cw" * 300)[:401]
    every = {name: source["documents"] for name, source in data.metadata["sources"].items()}
    assert every == {"code": 200, "web": 200}  # nothing else is held out
    with pytest.raises(ValueError, match=r"data.sources.code: .*/7.txt is both in data.train and in data.valid"):
        build(settings | {"valid": str(tmp_path / "code" / "7.txt")}, tmp_path)


def test_its_metadata(settings, tmp_path):
    data = build(settings, tmp_path)
    metadata = data.metadata
    assert json.loads(json.dumps(metadata)) == metadata
    assert metadata["data"] == "mix" and metadata["mixture"] == "0.25 code + 0.75 web"
    assert metadata["vocabulary"] == 257 and data.unigram_loss is None
    assert list(metadata["sources"]) == ["code", "web"]
    for name, source in metadata["sources"].items():
        assert source["data"] == "files" and source["weight"] == settings["weights"][name] and source["tokens"] > 1000
        assert f"{name} {source['content']}" in metadata["content"]


def test_settings_for_all_sources_reach_those_that_have_them(settings, tmp_path):
    data = build(settings | {"bos": True}, tmp_path)
    assert data.metadata["bos"] is True and all(each["bos"] is True for each in data.metadata["sources"].values())
    noise = {"_target_": "muown_train.data.random_tokens.random_tokens", "_partial_": True}
    two = change(change(settings, "sources.web", noise), "sources.code", noise) | {"tokenizer": None}
    assert build(two, tmp_path).metadata["content"] == "code random, web random"


def test_it_is_a_text_to_evaluate_on(settings, tmp_path):
    text = read_eval_text(settings, None, 400, tmp_path / "cache")
    documents = [document for document, _ in text.documents()]
    assert text.name == "held-out text of mix" and {document[0] for document in documents if document} == {"c", "w"}


def test_what_sources_say_names_them(settings, tmp_path):
    said: list[str] = [""]
    build(settings, tmp_path, said, valid_tokens=10**6)
    assert [line.split(":")[0] for line in said[1:]] == ["data.sources.code", "data.sources.web"]


SOURCE = {"_target_": "muown_train.data.sources.stdlib", "_partial_": True}
REFUSED = [
    ("sources", None, r"data\.sources is not set: choose two or more, such as \+data@data\.sources\.web=files .*"),
    ("sources", 5, r"data\.sources=5 must be two or more sources by name, such as .*"),
    ("sources", {}, r"data\.sources has none: choose two or more, such as .*"),
    ("sources", {"web": SOURCE}, r"data\.sources has web: choose two or more, such as .*"),
    ("sources", {"a/b": SOURCE, "c": SOURCE}, r"data\.sources has the name 'a/b', which must be text of letters.*"),
    ("sources", {1: SOURCE, "c": SOURCE}, r"data\.sources has the name 1, which must be text of letters.*"),
    ("sources.web", "files", r"data\.sources\.web='files' must be a data configuration, such as .*"),
    ("sources.web", {"train": "a"}, r"data\.sources\.web has train: must be a data configuration, such as .*"),
    ("sources.web", {"a": SOURCE}, r"data\.sources\.web has a: must be a data configuration, such as .*"),
    ("sources.web.trian", "x", r"data\.sources\.web\.trian is no setting of files.*train.*"),
    ("sources.code.train", None, r"data\.sources\.code: data\.train is not set.*"),
    ("sources.web._target_", "os.system", r"data\.sources\.web\._target_='os\.system' is not among .*"),
    ("weight", {}, r"data\.weight is no setting of mix: did you mean weights\?|data\.weight is no setting of mix.*"),
    ("weights", None, r"data\.weights is not set: it must give a weight to each source, such as 'data\.weights=.*"),
    ("weights", [0.7, 0.3], r"data\.weights is \[0\.7, 0\.3\]: it must give a weight .*"),
    ("weights", {"web": 1}, r"data\.weights is {'web': 1}: it must give a weight to each source, such as .*"),
    ("weights.prose", 1, r"data\.weights is {.*'prose': 1}: it must give a weight to each source, such as .*"),
    ("weights.web", 0, r"data\.weights\.web=0 must be a positive number"),
    ("weights.web", -0.5, r"data\.weights\.web=-0\.5 must be a positive number"),
    ("weights.web", "much", r"data\.weights\.web='much' must be a positive number"),
    ("weights.web", float("nan"), r"data\.weights\.web=nan must be a positive number"),
    ("weights.web", 1e9, r"valid_tokens=400 leaves none to data\.sources\.code with weight 0\.25: give more, or .*"),
    ("tokenizer", None, r"data\.tokenizer is not set, and data\.sources\.code would train a tokenizer of its own: .*"),
    ("valid", "nothing/*.txt", r"data\.sources\.code: .*nothing/\*\.txt.*"),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED, ids=[f"{path}={value}" for path, value, _ in REFUSED])
def test_what_it_refuses_before_it_reads(settings, tmp_path, path, value, message):
    with pytest.raises(ValueError) as caught:
        build(change(settings, path, value), tmp_path)
    assert re.fullmatch(message, str(caught.value)), caught.value
    assert not (tmp_path / "cache").exists()


def test_different_tokenizers_are_refused(settings, tmp_path, monkeypatch):
    (tmp_path / "chat.json").write_bytes(chat_tokenizer())
    own = settings | {"tokenizer": None}
    own = change(own, "sources.web.tokenizer", str(tmp_path / "words.json"))
    own = change(own, "sources.code.tokenizer", str(tmp_path / "chat.json"))
    message = r"data\.sources\.code has the tokenizer .*chat\.json, and data\.sources\.web the .*words\.json: all "
    with pytest.raises(ValueError, match=f"^{message}"):
        build(own, tmp_path)
    assert not (tmp_path / "cache").exists()
    build(own | {"tokenizer": settings["tokenizer"]}, tmp_path)  # which counts for all
    begun = change(own | {"tokenizer": settings["tokenizer"]}, "sources.web.bos", True)
    with pytest.raises(ValueError, match=r"the tokenizer of 257 entries with hash \w+, and .*, bos True: all sources"):
        build(begun, tmp_path)
    monkeypatch.setattr(mix_module, "_check_named_tokenizers", lambda makers: None)  # shards bring theirs along
    with pytest.raises(
        ValueError, match=r"of 259 entries with hash \w+, and data\.sources\.web the tokenizer of 257 entries"
    ):
        build(own, tmp_path)


def test_a_file_of_two_sources_is_refused_unless_other_files_are_validated_on(settings, tmp_path):
    both = change(settings, "sources.code.train", [f"{tmp_path}/code", f"{tmp_path}/web/*1.txt"])
    with pytest.raises(
        ValueError, match=r"/web/\S*1\.txt is both in data\.sources\.code and in data\.sources\.web, and"
    ):
        build(both, tmp_path)
    assert not (tmp_path / "cache").exists()
    (tmp_path / "held.txt").write_text("words to validate on " * 9)
    build(both | {"valid": f"{tmp_path}/held.txt"}, tmp_path)


def test_files_to_validate_on_need_a_source_of_files(settings, tmp_path):
    noise = {"_target_": "muown_train.data.random_tokens.random_tokens", "_partial_": True}
    two = change(change(settings, "sources.web", noise), "sources.code", noise)
    with pytest.raises(
        ValueError, match=r"data\.valid=x\.txt needs a source of files: each of code, web holds out its"
    ):
        build(two | {"valid": "x.txt"}, tmp_path)


def test_a_tokenizer_that_is_larger_than_the_model(settings, tmp_path):
    with pytest.raises(ValueError, match=r"data\.sources\.code: .* has 257 entries but model\.vocab_size is 100"):
        build(settings, tmp_path, vocab_size=100)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("weights", {"web": 0.5, "code": 0.5}, r"mixture was 0\.25 code \+ 0\.75 web, is 0\.5 code \+ 0\.5 web"),
        ("sources.web.train", None, r"content was code \w+, web \w+, is code \w+, web \w+"),
    ],
)
def test_a_run_goes_on_with_the_same_mix_alone(settings, tmp_path, path, value, said):
    before, config = build(settings, tmp_path).metadata, {"data": settings}
    value = value or f"{tmp_path}/web/*1.txt"
    changed = change(settings, path, value)
    moved = check_same_run(tmp_path, {"config": config, "data": before}, {"data": changed})
    assert moved and all(line.startswith(f"data.{path}") for line in moved)
    with pytest.raises(ValueError, match=f"holds a run on other data \\({said}\\): give it another name, or"):
        check_same_data(tmp_path, {"data": before}, build(changed, tmp_path).metadata)
    check_same_data(tmp_path, {"data": before}, build(settings, tmp_path).metadata)


def test_a_run_with_a_stream_goes_on_with_the_same_mix_alone(tmp_path):
    words = ["data=mix", "+data@data.sources.web=fineweb_edu", "+data@data.sources.code=files"]
    old, new = (load_config([*words, f"data.weights={{web: {weight}, code: 1}}"]).data for weight in (2, 3))
    stored = {"config": {"data": old}, "data": {"revision": "web abc, code def"}}  # no content
    with pytest.raises(ValueError, match=r"holds a run with data\.weights\.web=2, this one has data\.weights\.web=3: "):
        check_same_run(tmp_path, stored, {"data": new})
    more = change(old, "sources.web.retries", 3)
    assert check_same_run(tmp_path, stored, {"data": more}) == []
    earlier = copy.deepcopy(stored)
    del earlier["config"]["data"]["sources"]["web"]["bos"]  # a setting that this source did not have yet
    assert check_same_run(tmp_path, earlier, {"data": old}) == []
    other = change(old, "sources.web.name", "sample-10BT")
    with pytest.raises(ValueError, match=r"data\.sources\.web\.name=sample-100BT, this one has .*name=sample-10BT: "):
        check_same_run(tmp_path, stored, {"data": other})


def test_each_source_is_in_the_name_of_a_run():
    weights = "data.weights={web: 1, code: 2}"
    mixes = [("files", "stdlib"), ("stdlib", "files"), ("random", "stdlib"), ("stdlib", "random")]
    names = {
        load_config(["data=mix", f"+data@data.sources.web={web}", f"+data@data.sources.code={code}", weights]).name
        for web, code in mixes
    }
    assert len(names) == len(mixes)
