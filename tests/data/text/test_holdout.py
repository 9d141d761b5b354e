from hypothesis import given
from hypothesis import strategies as st

from muown_train.data.text.holdout import is_held_out, split_by_content


def labelled(documents):
    return list(split_by_content(lambda: iter(documents)))


@given(st.lists(st.text(max_size=60), max_size=99))
def test_of_few_documents_the_last_twentieth_of_the_text_is_held_out(documents):
    pairs = labelled(documents)
    text = "".join(documents)
    train = "".join(document for document, held in pairs if not held)
    valid = "".join(document for document, held in pairs if held)
    assert train + valid == text and len(valid) == len(text) // 20


def test_a_single_book_is_cut():
    assert labelled(["ab" * 500]) == [("ab" * 475, False), ("ab" * 25, True)]


def test_of_many_documents_one_in_twenty_is_held_out_by_its_content():
    documents = [f"document {k}" for k in range(4000)]
    pairs = labelled(documents)
    assert [document for document, _ in pairs] == documents
    held = {document for document, flag in pairs if flag}
    assert 140 < len(held) < 260
    assert {document for document, flag in labelled(documents[::-1][:3000]) if flag} <= held


def test_repeated_documents_are_never_on_both_sides():
    documents = [f"document {k % 150}" for k in range(600)]
    pairs = labelled(documents)
    sides = [{document for document, held in pairs if held == side} for side in (False, True)]
    assert not sides[0] & sides[1] and all(sides)


def test_something_is_held_out_even_where_the_hash_picks_nothing():
    documents = [text for text in (f"document {k}" for k in range(400)) if not is_held_out(text.encode())][:120]
    train, valid = ([d for d, held in labelled(documents) if held == side] for side in (False, True))
    assert len(train) > 100 and "".join(train + valid) == "".join(documents)
    assert sum(map(len, valid)) == len("".join(documents)) // 20
