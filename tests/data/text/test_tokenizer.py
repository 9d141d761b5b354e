import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muown_train.data.text import tokenizer as module
from muown_train.data.text.tokenizer import (
    HubTokenizer,
    check_vocabulary,
    choose_dtype,
    encode_documents,
    load_tokenizer,
)
from muown_train.data.text.train_bpe import sample_evenly, train_bpe
from tests.helpers.text_files import ByteTokenizer, word_tokenizer_json

TEXTS = ["the cat sat on the mat\n" * 40, "def f(x):\n    return x + 1\n" * 30, "naïve café — 東京"]


@pytest.fixture(scope="module")
def bpe():
    return HubTokenizer("bpe", train_bpe(lambda: iter(TEXTS)))


def test_bpe_learns_words_and_is_deterministic(bpe):
    assert train_bpe(lambda: iter(TEXTS)) == train_bpe(lambda: iter(TEXTS))
    assert bpe.end_of_text == 0 and 257 <= bpe.size <= 4096
    assert len(bpe.encode_batch([TEXTS[0]])[0]) < len(TEXTS[0]) / 3


def ids_of(tokenizer, texts):
    return [ids.tolist() for ids in tokenizer.encode_batch(texts)]


@given(st.lists(st.text(), max_size=4))
def test_round_trip(bpe, texts):
    assert [bpe.decode(ids) for ids in bpe.encode_batch(texts)] == texts


@pytest.mark.parametrize("text", ["", "\x00\x01\x1b[0m\x7f", "   \n\t \n\n", "\r\n" * 5, "a" * 300_000, "\U0010ffff"])
def test_round_trip_of_odd_text(bpe, text):
    assert bpe.decode(bpe.encode_batch([text])[0]) == text


def test_lone_surrogates_are_replaced(bpe):
    assert bpe.decode(bpe.encode_batch(["a\ud800b"])[0]) == "a\ufffdb"


@pytest.mark.parametrize("special", [True, False])
def test_text_that_spells_a_control_token_is_text(special):
    tokenizer = HubTokenizer("words", word_tokenizer_json(special=special).encode())
    text = "before <|endoftext|> after"
    ids = tokenizer.encode_batch([text])[0]
    assert tokenizer.end_of_text == 256 and 256 not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([256]) == "<|endoftext|>"


def test_long_texts_are_encoded_in_pieces_with_the_same_ids(bpe, monkeypatch):
    text = "".join(f"line {k} of it{chr(10) * (1 + k % 3)}{' ' * (k % 5)}" for k in range(500)) + "end"
    whole = ids_of(bpe, [text, "short"])
    monkeypatch.setattr(module, "PIECE", 100)
    assert len(list(module._split_text(text))) > 20
    assert ids_of(bpe, [text, "short"]) == whole
    assert list(module._split_text("y" * 1000)) == ["y" * 1000]


@pytest.mark.parametrize("word", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_end_of_text_is_found(word):
    assert HubTokenizer("t", word_tokenizer_json(word).encode()).end_of_text == 256


def test_no_end_of_text_is_an_error():
    with pytest.raises(ValueError, match="tokenizer t has no end-of-text token"):
        HubTokenizer("t", word_tokenizer_json("").encode())


def test_paths(tmp_path):
    (tmp_path / "tokenizer.json").write_text(word_tokenizer_json())
    by_folder, by_file = load_tokenizer(str(tmp_path)), load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert by_folder.fingerprint == by_file.fingerprint
    assert by_folder.size == 257
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken.json is not a file of the tokenizers library"):
        load_tokenizer(str(tmp_path / "broken.json"))
    (tmp_path / "empty").mkdir()
    for missing in ["gone.json", str(tmp_path / "gone"), "./gone", "a/b/c", str(tmp_path / "empty")]:
        with pytest.raises(ValueError, match="there is no file"):
            load_tokenizer(missing)


def test_vocabulary_too_small():
    with pytest.raises(ValueError) as error:
        check_vocabulary("neox", 50277, 4096)
    assert str(error.value) == (
        "tokenizer neox has 50277 entries but model.vocab_size is 4096: set model.vocab_size to at least 50277"
    )
    check_vocabulary("neox", 50277, 50277)


@given(st.lists(st.text(max_size=50), max_size=20))
def test_documents_of_a_real_tokenizer_end_with_end_of_text(bpe, texts):
    encoded = list(encode_documents(iter(texts), bpe))
    assert [ids.tolist() for ids in encoded] == [[*ids, bpe.end_of_text] for ids in ids_of(bpe, texts)]
    assert all(ids.dtype == np.uint16 for ids in encoded)


@given(st.lists(st.text(max_size=50), max_size=20))
def test_documents_end_with_end_of_text(texts):
    encoded = list(encode_documents(iter(texts), ByteTokenizer()))
    assert [ids.tolist() for ids in encoded] == [[b + 1 for b in text.encode()] + [0] for text in texts]
    assert all(ids.dtype == np.uint16 for ids in encoded)


def test_dtype_is_wide_enough():
    assert choose_dtype(65536) == np.uint16 and choose_dtype(65537) == np.uint32


def test_the_sample_is_spread_evenly():
    documents = [chr(97 + k) * 1_000_000 for k in range(10)]
    taken = "".join(sample_evenly(lambda: iter(documents), 2_000_000))
    assert 1_900_000 < len(taken) < 2_100_000
    assert all(100_000 < taken.count(letter) < 300_000 for letter in "abcdefghij")
    assert "".join(sample_evenly(lambda: iter(documents), 10**8)) == "".join(documents)
