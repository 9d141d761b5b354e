"""Ids by tiktoken are those of the `tokenizers` library, and where they might not be, `tokenizers` is used."""

import base64
import functools
import json
import multiprocessing
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from muown_train.data.text import tiktoken_bpe
from muown_train.data.text import tokenizer as module
from muown_train.data.text.tiktoken_bpe import (
    CHECK_TEXTS,
    QWEN2_WORDS,
    ByteBPE,
    build_tokenizer_json,
    convert_gpt2_ranks,
)
from muown_train.data.text.tokenizer import HubTokenizer, load_tokenizer
from muown_train.data.text.train_bpe import train_bpe
from tests.helpers.paths import SHARED
from tests.helpers.text_files import SAMPLE, unpack_tokenizer

# As tiktoken ships it for GPT-2 (tiktoken_ext/openai_public.py, r50k).
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
QWEN2_SPLIT = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {"Regex": QWEN2_WORDS + r"|\s+(?!\S)|\s+"},
            "behavior": "Isolated",
            "invert": False,
        },
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    ],
}
PROSE = "The cat's mat, it isn't 12 but 1234: naïve café, 東京都!\n\n\tdef f(x):\r\n        return x  # ok\n" * 3
ODD_TEXTS = ["", "\x00", "\x00\x01\x1b[0m\x7f\x85 a", "a\n\x00\n\n \x1f\x1c", "\ufffd", " ", "\n", "\U0010ffff", PROSE]
ODD_PIECES = [" ", "  ", "   ", " " * 25, "\n", "\r\n", "\t", "\xa0", "'", "'s", "'LL", "a", "The", "é", "e\u0301"]
ODD_PIECES += [
    "\u0323",
    "1",
    "²",
    "東",
    "京都",
    "!",
    "...",
    "👍🏽",
    "\u200d",
    "\x00",
    "<|endoftext|>",
    "\u1ac1",
    "\u0378",
]
ODD_PIECES += ["ſ", "\u212b", "~^`"]


def run(length, i, **flags):
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    return {"id": i, "content": " " * length, **plain, **flags}


@functools.cache
def trained() -> bytes:
    return train_bpe(lambda: iter([PROSE, *CHECK_TEXTS]))


def variant(name: str) -> dict:
    """The file of a small BPE in the form of GPT-2, GPT-NeoX or Qwen2."""
    config = json.loads(trained())
    if name != "gpt2":
        config["normalizer"] = {"type": "NFC"}
    if name == "neox":
        first = len(config["model"]["vocab"])
        config["added_tokens"] += [run(length, first + 24 - length) for length in range(24, 1, -1)]
    if name == "qwen2":
        config["pre_tokenizer"] = QWEN2_SPLIT
    return config


@functools.cache
def ours(name: str) -> HubTokenizer:
    return HubTokenizer(name, json.dumps(variant(name)).encode())


@functools.cache
def theirs(name: str) -> Tokenizer:
    return reference(variant(name))


def reference(config: dict) -> Tokenizer:
    library = Tokenizer.from_str(json.dumps(config))
    library.encode_special_tokens = True
    return library


def assert_same_ids(tokenizer: HubTokenizer, library: Tokenizer, texts: list[str]) -> None:
    encoded = tokenizer.encode_batch(texts)
    for text, ids, expected in zip(texts, encoded, library.encode_batch_fast(texts), strict=True):
        assert ids.dtype == np.uint32 and ids.tolist() == expected.ids, repr(text[:200])


@pytest.mark.parametrize("name", ["gpt2", "neox", "qwen2"])
class TestSameIds:
    def test_tiktoken_encodes(self, name):
        assert ours(name).backend == "tiktoken"
        assert_same_ids(ours(name), theirs(name), [*ODD_TEXTS, *CHECK_TEXTS])

    @given(texts=st.lists(st.text(), max_size=4))
    def test_any_text(self, name, texts):
        assert_same_ids(ours(name), theirs(name), texts)

    @settings(max_examples=300)
    @given(text=st.lists(st.sampled_from(ODD_PIECES), max_size=30).map("".join))
    def test_odd_neighbours(self, name, text):
        assert_same_ids(ours(name), theirs(name), [text])

    @pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.long)])
    def test_code_points(self, name, step):
        letters = [chr(i) for i in range(0, sys.maxunicode + 1, step) if not 0xD800 <= i < 0xE000]
        texts = [f"a{c}\u0334 {c}1{c}\u0300'{c}  {c}!{c}\n{c}" for c in letters]
        for start in range(0, len(texts), 1000):
            assert_same_ids(ours(name), theirs(name), ["".join(texts[start : start + 1000])])

    @pytest.mark.parametrize("long", ["a", " ", "1", "\n"])
    @pytest.mark.slow
    def test_many_characters_without_a_boundary(self, name, long):
        """White space exhausts the memory of most patterns between half a million and a million characters."""
        assert_same_ids(ours(name), theirs(name), [long * (1_000_000 if long.isspace() else 200_000) + "b"])

    def test_lone_surrogates_are_replaced(self, name):
        assert_same_ids(ours(name), theirs(name), ["a\ufffdb"])
        assert ours(name).decode(ours(name).encode_batch(["a\ud800b"])[0]) == "a\ufffdb"

    def test_threads_change_nothing(self, name, monkeypatch):
        texts = [PROSE * (k % 5) + "é" * k for k in range(200)]
        alone = [ids.tolist() for ids in ours(name).encode_batch(texts)]
        monkeypatch.setattr(module, "count_threads", lambda: 3)
        monkeypatch.setattr(module, "THREADS_FROM", 1)
        monkeypatch.setattr(module, "THREAD_CHARACTERS", 500)
        assert [ids.tolist() for ids in ours(name).encode_batch(texts)] == alone

    def test_worker_processes_can_be_given_it(self, name):
        copy = pickle.loads(pickle.dumps(ours(name)))
        assert copy.backend == "tiktoken"
        assert_same_ids(copy, theirs(name), list(CHECK_TEXTS))


def swap_ids(config):
    vocab = config["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]


def swap_merges(config):
    merges = config["model"]["merges"]
    merges[40], merges[90] = merges[90], merges[40]


def token_out_of_reach(config):
    """A last token ~^` from ~ and ^`, where ~^ is merged before ^` is."""
    vocab, merges = config["model"]["vocab"], config["model"]["merges"]
    for left, right in [("~", "^"), ("^", "`"), ("~", "^`")]:
        vocab[left + right] = len(vocab)
        merges.append([left, right])


def lose_byte(config):
    vocab, merges = config["model"]["vocab"], config["model"]["merges"]
    lost = {token for token in vocab if "~" in token}
    config["model"]["vocab"] = {token: i for token, i in vocab.items() if token not in lost}
    config["model"]["merges"] = [merge for merge in merges if "~" not in "".join(merge)]


ALTERED = {
    "two ids swapped": swap_ids,
    "two merges swapped": swap_merges,
    "a token that its own bytes do not merge to": token_out_of_reach,
    "a byte without a token": lose_byte,
    "a token that is no merge": lambda c: c["model"]["vocab"].update({"zzzzq": len(c["model"]["vocab"])}),
    "unknown token": lambda c: c["model"].update(unk_token="<|endoftext|>"),
    "byte fallback": lambda c: c["model"].update(byte_fallback=True),
    "another normalizer": lambda c: c.update(normalizer={"type": "NFKC"}),
    "prefix space": lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
    "no pattern": lambda c: c["pre_tokenizer"].update(use_regex=False),
    "another pattern": lambda c: c.update(
        pre_tokenizer=json.loads(json.dumps(QWEN2_SPLIT).replace(r"|\\p{N}|", r"|\\p{N}{1,3}|"))
    ),
    "pattern removed": lambda c: c.update(
        pre_tokenizer=json.loads(json.dumps(QWEN2_SPLIT).replace("Isolated", "Removed"))
    ),
    "no pre-tokenizer": lambda c: c.update(pre_tokenizer=None),
    "digits apart": lambda c: c.update(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, c["pre_tokenizer"]],
        }
    ),
    "runs with a gap": lambda c: c.update(added_tokens=[t for t in c["added_tokens"] if t["content"] != " " * 7]),
    "a run that strips": lambda c: c["added_tokens"].append(c["added_tokens"].pop() | {"rstrip": True}),
    "a word added": lambda c: c["added_tokens"].append(run(2, 9999) | {"content": "cat"}),
    "runs with another pattern": lambda c: c.update(pre_tokenizer=QWEN2_SPLIT),
}


@pytest.mark.parametrize("change", ALTERED)
def test_what_is_not_understood_is_left_to_the_library(change):
    config = variant("neox")
    ALTERED[change](config)
    tokenizer = HubTokenizer("altered", json.dumps(config).encode())
    assert tokenizer.backend == "tokenizers"
    assert_same_ids(tokenizer, reference(config), [*ODD_TEXTS, *CHECK_TEXTS, "~^`"])


def test_worker_processes_can_be_given_the_library_too():
    config = variant("neox") | {"normalizer": {"type": "NFKC"}}
    copy = pickle.loads(pickle.dumps(HubTokenizer("nfkc", json.dumps(config).encode())))
    assert_same_ids(copy, reference(config), list(CHECK_TEXTS))


def test_dropout_is_left_to_the_library():
    config = variant("gpt2")
    config["model"]["dropout"] = 0.5
    assert HubTokenizer("dropout", json.dumps(config).encode()).backend == "tokenizers"


def test_tiktoken_would_differ_for_a_token_out_of_reach():
    config = variant("gpt2")
    token_out_of_reach(config)
    ranks = {token: rank + 1 for token, rank in ranks_of(config).items()}
    library, naive = reference(config), ByteBPE(ranks, GPT2_PATTERN, None, 0)
    assert library.encode("~^`").tokens == ["~^", "`"] and naive.encode("~^`").tolist() == [ranks[b"~^`"]]


def test_other_ids_on_the_check_text_are_a_reason_to_fall_back(monkeypatch):
    right = tiktoken_bpe.build_byte_bpe

    def wrong(config, end_of_text):
        assert right(config, end_of_text) is not None
        return right(config | {"normalizer": None}, end_of_text)

    monkeypatch.setattr(tiktoken_bpe, "build_byte_bpe", wrong)
    tokenizer = HubTokenizer("nfc", json.dumps(variant("neox")).encode())
    assert tokenizer.backend == "tokenizers"
    assert_same_ids(tokenizer, theirs("neox"), list(CHECK_TEXTS))


def ranks_of(config: dict) -> dict[bytes, int]:
    """Ranks 0, 1, ... of the small BPE, whose id 0 is <|endoftext|>: the single bytes come first."""
    letters = tiktoken_bpe.build_byte_alphabet()
    return {bytes(map(letters.__getitem__, t)): i - 1 for t, i in config["model"]["vocab"].items() if i}


def tiktoken_reference(ranks):
    import tiktoken

    return tiktoken.Encoding("reference", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})


@pytest.mark.slow
def test_merges_are_recovered_from_ranks():
    config, ranks = variant("gpt2"), ranks_of(variant("gpt2"))
    made = json.loads(build_tokenizer_json(ranks))
    assert [m.split(" ") for m in made["model"]["merges"]] == config["model"]["merges"]
    tokenizer = HubTokenizer("ranks", build_tokenizer_json(ranks))
    assert tokenizer.backend == "tiktoken" and tokenizer.end_of_text == len(ranks) == tokenizer.size - 1
    texts = [*ODD_TEXTS, *CHECK_TEXTS]
    assert [i.tolist() for i in tokenizer.encode_batch(texts)] == tiktoken_reference(ranks).encode_ordinary_batch(texts)
    assert tokenizer.decode([*tokenizer.encode_batch(["the cat"])[0], len(ranks)]) == "the cat<|endoftext|>"


@pytest.mark.slow
def test_files_of_ranks_that_are_no_gpt2(tmp_path, monkeypatch):
    ranks = ranks_of(variant("gpt2"))

    def raw(ranks):
        return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())

    with pytest.raises(
        ValueError, match=f"x.tiktoken has {len(ranks)} ranks; the only .tiktoken file that can be read is GPT-2's"
    ):
        convert_gpt2_ranks("x.tiktoken", raw(ranks))
    for line in [b"IQ==", b"IQ== x", b"!!! 3", b"a b c", b"\xff\xfe 1"]:
        with pytest.raises(ValueError, match=r"x\.tiktoken line 2 is not a token in base64 and its rank"):
            convert_gpt2_ranks("x.tiktoken", b"IQ== 0\n" + line)
    monkeypatch.setattr(tiktoken_bpe, "GPT2_RANKS", len(ranks))
    assert convert_gpt2_ranks("x.tiktoken", raw(ranks)) == build_tokenizer_json(ranks)
    (tmp_path / "x.tiktoken").write_bytes(raw(ranks))
    assert load_tokenizer(str(tmp_path / "x.tiktoken")).end_of_text == len(ranks)
    last = max(ranks, key=ranks.get)
    for wrong, words in [
        (ranks | {last: len(ranks)}, "without a gap"),
        ({t: len(ranks) - 1 - i for t, i in ranks.items()}, "the first 256 the single bytes"),
        ({t: i for t, i in ranks.items() if t != last} | {b"\x00zq\xff": len(ranks) - 1}, "two earlier ones"),
    ]:
        with pytest.raises(ValueError, match=f"x.tiktoken: .*{words}"):
            convert_gpt2_ranks("x.tiktoken", raw(wrong))
    with pytest.raises(ValueError, match="there is no file"):
        load_tokenizer("gone.tiktoken")


def test_threads_share_the_cores(monkeypatch):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert module.count_threads() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert module.count_threads() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert module.count_threads() == 1


def test_a_worker_process_encodes_with_one_thread():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(module.count_threads) == 1


# The published tokenizers on real text.


def read_texts(whole: bool) -> list[str]:
    import pyarrow.parquet as pq

    files = sorted((SHARED / "corpus").glob("*.parquet")) if whole else [SAMPLE]
    return [text for file in files for text in pq.read_table(file)["text"].to_pylist()]


def find_tokenizer(name, whole, tmp_path):
    """Qwen2's file is too large for a fixture, and so is the whole corpus."""
    if whole and not (SHARED / "corpus").is_dir():
        pytest.skip("needs the whole corpus")
    if "qwen2" not in name:
        return unpack_tokenizer(name, tmp_path)
    if not (SHARED / "tokenizers" / name).is_file():
        pytest.skip(f"needs {name}")
    return SHARED / "tokenizers" / name


WHOLE = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["sample", "whole"])


@WHOLE
@pytest.mark.parametrize("name", ["gpt_neox_20b_tokenizer.json", "qwen2_tokenizer.json"])
def test_published_tokenizers_on_the_corpus(name, whole, tmp_path):
    path = find_tokenizer(name, whole, tmp_path)
    tokenizer, library = load_tokenizer(str(path)), reference(json.loads(path.read_text()))
    assert tokenizer.backend == "tiktoken" and tokenizer.size == library.get_vocab_size()
    assert tokenizer.end_of_text == library.token_to_id("<|endoftext|>")
    texts = [*ODD_TEXTS, *CHECK_TEXTS, *read_texts(whole)]
    for start in range(0, len(texts), 100):
        assert_same_ids(tokenizer, library, texts[start : start + 100])


@WHOLE
def test_gpt2_on_the_corpus(whole, tmp_path):
    path = find_tokenizer("gpt2.tiktoken", whole, tmp_path)
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.open("rb"))}
    tokenizer, library = load_tokenizer(str(path)), tiktoken_reference(ranks)
    assert tokenizer.backend == "tiktoken" and tokenizer.end_of_text == 50256 and tokenizer.size == 50257
    texts = [*ODD_TEXTS, *CHECK_TEXTS, *read_texts(whole)]
    for start in range(0, len(texts), 100):
        some = texts[start : start + 100]
        assert [ids.tolist() for ids in tokenizer.encode_batch(some)] == list(map(library.encode_ordinary, some))
