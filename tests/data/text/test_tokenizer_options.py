"""Another end-of-text token, special tokens that the text spells, and tokenizers that are refused."""

import base64
import json
import pickle

import numpy as np
import pytest

from muown_train.data import sources
from muown_train.data.shards.dataset import shards
from muown_train.data.shards.prepare import prepare_shards
from muown_train.data.text import tokenizer as module
from muown_train.data.text.growth import bound_growth
from muown_train.data.text.tokenizer import HubTokenizer, load_tokenizer
from tests.helpers.text_files import CHAT, chat_tokenizer, unpack_tokenizer, word_tokenizer_json


def test_special_tokens_are_letters_or_tokens():
    plain, special = HubTokenizer("chat", chat_tokenizer()), HubTokenizer("chat", chat_tokenizer(), special_tokens=True)
    (letters,), (ids,) = plain.encode_batch([CHAT]), special.encode_batch([CHAT])
    assert len(letters) == len(CHAT) and max(letters) < 256
    assert [i for i in ids.tolist() if i > 255] == [257, 258, 256]
    assert plain.decode(letters) == special.decode(ids) == CHAT
    assert plain.find_spelt_tokens(CHAT) == {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    assert not plain.find_spelt_tokens("<|im_start> <im_end>") and not special.find_spelt_tokens(CHAT)
    assert plain.options == {} and special.options == {"special_tokens": True}
    assert plain.fingerprint == special.fingerprint  # it is that of the file
    again = pickle.loads(pickle.dumps(special))
    assert again.encode_batch([CHAT])[0].tolist() == ids.tolist()


@pytest.mark.slow
def test_tiktoken_gives_the_ids_of_the_library_for_special_tokens(tmp_path):
    path = unpack_tokenizer("gpt_neox_20b_tokenizer.json", tmp_path)
    ours = load_tokenizer(str(path), special_tokens=True)
    texts = ["plain text", "a<|endoftext|>b <|padding|>\n", "<|endoftext", "<|endoftext|>" * 3, " <|padding|> "]
    assert ours.backend == "tiktoken"
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids.tolist() == ours._library.encode(text, add_special_tokens=False).ids


def test_another_end_of_text_token():
    raw = chat_tokenizer()
    other = HubTokenizer("chat", raw, end_of_text="<|im_end|>")
    assert other.end_of_text == 258 and other.options == {"end_of_text": "<|im_end|>"}
    assert HubTokenizer("chat", raw, end_of_text="<|endoftext|>").options == {}  # the one that it takes by itself
    with pytest.raises(
        ValueError, match=r"data.end_of_text=<\|im_stop\|> is no token of tokenizer chat \(did you mean"
    ):
        HubTokenizer("chat", raw, end_of_text="<|im_stop|>")
    with pytest.raises(ValueError, match=r"data.end_of_text=5 is no token of tokenizer chat"):
        HubTokenizer("chat", raw, end_of_text=5)
    for ordinary in ("A", "Ġ"):
        with pytest.raises(ValueError, match=rf"data.end_of_text={ordinary} is a token that texts contain: name a sp"):
            HubTokenizer("chat", raw, end_of_text=ordinary, special_tokens=ordinary == "A")
    odd = chat_tokenizer(added_tokens=json.loads(raw)["added_tokens"][1:])
    with pytest.raises(ValueError, match=r"name one of its special tokens by data.end_of_text"):
        HubTokenizer("odd", odd)
    ended = HubTokenizer("odd", odd, end_of_text="<|im_end|>")
    assert ended.decode([ended.end_of_text]) == "<|im_end|>"


@pytest.fixture
def chats(tmp_path):
    lines = [json.dumps({"text": f"{CHAT if k % 4 == 0 else 'plain'} {k}"}) for k in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "chat.json").write_bytes(chat_tokenizer())
    return tmp_path


def load(folder, **options):
    said = []
    run = sources.RunInfo(16, 0, 10**6, folder / "cache", 4096, said.append)
    return sources.files(str(folder / "a.jsonl"), tokenizer=str(folder / "chat.json"), run=run, **options), said


def test_training_says_what_the_text_spells_and_both_choices_have_their_own_data(chats):
    plain, said = load(chats)
    warning = "the text spells special tokens of tokenizer .*: <|endoftext|> in 50 documents, <|im_end|> in 50"
    (line,) = [line for line in said if "spells" in line]
    assert warning.split(".*")[1] in line and "data.special_tokens=true takes them as tokens" in line
    assert line in load(chats)[1]  # from the cache too
    special, said = load(chats, special_tokens=True)
    assert not [line for line in said if "spells" in line]
    assert special.metadata["special_tokens"] is True and "special_tokens" not in plain.metadata
    assert (special.valid == 257).any() and not (plain.valid == 257).any()
    ended, _ = load(chats, end_of_text="<|im_end|>")
    assert ended.metadata["end_of_text"] == "<|im_end|>" and ended.valid[-1] == 258
    assert len(list((chats / "cache").glob("files-*/index.json"))) == 3


def test_shards_keep_how_they_were_made(chats, capsys):
    settings = {"train": str(chats / "a.jsonl"), "tokenizer": str(chats / "chat.json")}
    run = sources.RunInfo(16, 0, 100, chats / "cache", 4096)
    prepare_shards(chats / "plain", "files", settings, None, 200, 1000)
    assert "<|im_start|> in 50 documents" in capsys.readouterr().err
    shards(str(chats / "plain"), run=run)
    assert "<|im_start|> in 50 documents" in capsys.readouterr().err
    options = {"end_of_text": "<|im_end|>", "special_tokens": True}
    prepare_shards(chats / "special", "files", settings | options, None, 200, 1000)
    data = shards(str(chats / "special"), run=run)
    assert data.tokenizer.end_of_text == 258 and (data.valid == 257).any()
    assert options.items() <= data.metadata.items()
    shards(str(chats / "special"), str(chats / "chat.json"), **options, run=run)
    with pytest.raises(ValueError, match=r"were made with data.special_tokens=false, not true"):
        shards(str(chats / "plain"), special_tokens=True, run=run)
    with pytest.raises(ValueError, match=r"begun with data.special_tokens=false, not with data.special_tokens=true"):
        prepare_shards(chats / "plain", "files", settings | {"special_tokens": True}, None, 200, 1000)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
KNOWN = [  # normalizers and decoders of published tokenizers
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, REPLACE | {"content": "▁"}]},  # Llama 2
    {"type": "Sequence", "normalizers": [REPLACE, {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]},
    {"type": "Sequence", "normalizers": [{"type": "Nmt"}, {"type": "NFKC"}, REPLACE | {"pattern": {"Regex": " {2,}"}}]},
    {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, REPLACE]},
    {"type": "BertNormalizer", "clean_text": True},
    {"type": "ByteLevel"},
    {"type": "NFC"},
    None,
]
GROWING = [
    REPLACE | {"content": "a" * 101},
    {"type": "Sequence", "normalizers": [REPLACE] * 3},
    {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [REPLACE] * 2}, REPLACE]},
    {"type": "Sequence", "normalizers": [REPLACE | {"pattern": {"Regex": "x*"}}] * 2},
    {"type": "Sequence", "normalizers": [REPLACE | {"pattern": {"String": ""}}] * 2},
    {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 7},
    {"type": "Sequence", "normalizers": [{"type": "BertNormalizer"}] * 5},
    {"type": "Sequence", "normalizers": [{"type": "CTC"}, {"type": "BPEDecoder", "suffix": ""}] * 4},
    {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "x" * 50}, {"type": "Prepend", "prepend": "yy"}],
    },
    {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + b"x" * 101).decode()},
]


def test_known_rules_are_accepted():
    assert max(map(bound_growth, KNOWN)) <= 12


@pytest.mark.parametrize("rule", GROWING)
def test_rules_that_let_text_grow_are_refused(rule):
    for part, key in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders")):
        own = {"type": "Sequence", key: rule["normalizers"]} if rule["type"] == "Sequence" else rule
        with pytest.raises(ValueError, match=rf"tokenizer t is refused: its {part} may make text more than 100 times"):
            HubTokenizer("t", chat_tokenizer(**{part: own}))


def test_a_text_that_the_memory_does_not_hold_is_refused(monkeypatch):
    tokenizer = HubTokenizer("words", chat_tokenizer(normalizer={"type": "Lowercase"}))
    assert tokenizer.backend == "tokenizers"
    monkeypatch.setattr(module, "read_memory", lambda: 1_000_000)
    assert len(tokenizer.encode_batch(["x" * 10_000])[0]) == 10_000
    with pytest.raises(ValueError, match=r"cannot encode a text of 10,001 characters without line ends"):
        tokenizer.encode_batch(["fine", "x" * 10_001])


@pytest.mark.parametrize(
    "raw", [b"[]", b"5", b"[" * 100_000, b'{"normalizer": {"type": "Sequence", "normalizers": 5}}']
)
def test_other_content_is_one_sentence(raw):
    with pytest.raises(ValueError, match="tokenizer t is not a file of the tokenizers library"):
        HubTokenizer("t", raw)


def test_a_regular_expression_that_explodes_names_the_text(capfd):
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": True}
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    raw = chat_tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})
    tokenizer = HubTokenizer("bomb", raw)
    assert [len(ids) for ids in tokenizer.encode_batch(["fine", "aab"])] == [4, 3]
    with pytest.raises(ValueError, match=r"tokenizer bomb cannot encode the text that begins with 'bad: aaa"):
        tokenizer.encode_batch(["fine", "bad: " + "a" * 60, "fine"])


def test_the_ids_of_a_tokenizer_without_options_are_what_they_were():
    ids = HubTokenizer("chat", chat_tokenizer()).encode_batch(["a<|im_start|>"])[0]
    np.testing.assert_array_equal(
        ids, HubTokenizer("words", word_tokenizer_json().encode()).encode_batch(["a<|im_start|>"])[0]
    )
