"""Sampling: against transformers and plain formulas, past the end of the cache, streamed in whole characters."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muown_train.data.text.tokenizer import HubTokenizer
from muown_train.data.text.train_bpe import train_bpe
from muown_train.models.generate import Sampling, generate, stream_text, stream_tokens
from tests.models.test_gpt import as_llama, small

GREEDY = Sampling(temperature=0)
LOGITS = st.lists(st.integers(-320, 320), min_size=1, max_size=40).map(lambda x: torch.tensor(x) / 16)


def spread(**sizes):
    """Return a small model whose most likely tokens are not all the same."""
    model = small(**sizes).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model


@pytest.mark.parametrize("length", [1, 2, 7, 20])
def test_greedy_is_that_of_transformers(length):
    model = spread(seq_len=64)
    prompt = torch.randint(0, 97, (1, length))
    theirs = as_llama(model).generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    ours = generate(model, prompt[0].tolist(), 40, 64, temperature=0)
    assert len(set(ours)) > 5
    assert ours == theirs[0, length:].tolist()


@pytest.mark.parametrize("prompt", [[3, 4], [5] * 8, list(range(20))], ids=len)
def test_past_the_end_it_starts_anew_from_the_last_half(prompt):
    model = spread(seq_len=8)
    ids = prompt[-8:]
    expected = []
    for _ in range(25):
        if len(ids) > 8:
            ids = ids[-4:]
        new = int(model(torch.tensor([ids]))[0, -1].argmax())
        expected.append(new)
        ids = [*ids, new]
    assert generate(model, prompt, 25, seq_len=8, temperature=0) == expected


def test_one_position_is_enough():
    model = spread(seq_len=1)
    ids = [3]
    for _ in range(5):
        ids.append(int(model(torch.tensor([ids[-1:]]))[0, -1].argmax()))
    assert generate(model, [3], 5, 1, temperature=0) == ids[1:]


def test_samples_are_those_without_a_cache():
    model = spread()
    generator = torch.Generator().manual_seed(5)
    ids = [1, 2]
    for _ in range(25):
        logits = model(torch.tensor([ids]))[0, -1].detach()
        ids.append(int(torch.multinomial(torch.softmax(logits / 0.8, 0), 1, generator=generator)))
    assert generate(model, [1, 2], 25, 32, temperature=0.8, seed=5) == ids[2:]


def test_a_seed_gives_the_same_again_and_another_does_not():
    model = spread()
    first, again, other = (generate(model, [3], 20, 32, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_ids_that_the_tokenizer_lacks_are_never_drawn():
    model = spread()
    all_of_them = list(stream_tokens(model, [3], 100, 32, Sampling(5.0)))
    below = list(stream_tokens(model, [3], 100, 32, Sampling(5.0), vocabulary=50))
    assert max(all_of_them) >= 50 > max(below)


@given(LOGITS)
def test_top_k_of_one_is_greedy(logits):
    for sampling in (GREEDY, Sampling(1.0, top_k=1), Sampling(1e-30)):
        p = sampling.compute_probabilities(logits)
        best = p.nonzero().flatten()
        assert p.sum() == pytest.approx(1) and (logits[best] == logits.max()).all()
        assert sampling.temperature == 1e-30 or len(best) == 1


@given(LOGITS, st.integers(1, 60), st.floats(0.1, 10))
def test_top_k_keeps_the_likeliest_in_proportion(logits, k, temperature):
    p, all_p = Sampling(temperature, top_k=k).compute_probabilities(logits), torch.softmax(logits / temperature, 0)
    kept = all_p.sort(descending=True).values[:k]
    torch.testing.assert_close(p.sort(descending=True).values[: len(kept)], kept / kept.sum(), atol=1e-6, rtol=1e-4)
    assert (p > 0).sum() <= k
    if k >= len(logits):
        torch.testing.assert_close(p, all_p)


@given(LOGITS, st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set(logits, top_p):
    p, all_p = Sampling(1.0, top_p=top_p).compute_probabilities(logits), torch.softmax(logits, 0)
    kept = p > 0
    mass, least = all_p[kept].double().sum().item(), all_p[kept].min().item()
    assert mass >= top_p - 1e-6
    assert mass - least < top_p + 1e-6
    assert kept.all() or least >= all_p[~kept].max().item()
    torch.testing.assert_close(p[kept], all_p[kept] / all_p[kept].sum())


def test_logits_that_are_no_numbers_are_said():
    with pytest.raises(ValueError, match="not finite"):
        GREEDY.compute_probabilities(torch.tensor([0.0, math.nan]))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -1}, "temperature -1 must be"),
        ({"temperature": math.nan}, "temperature nan must be"),
        ({"top_k": 0}, "top-k 0 must be"),
        ({"top_p": 0}, "top-p 0 must be"),
        ({"top_p": 1.5}, "top-p 1.5 must be"),
    ],
    ids=str,
)
def test_settings_out_of_range(setting, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**setting)


@pytest.fixture(scope="module")
def tokenizer():
    return HubTokenizer("bpe", train_bpe(lambda: iter(["the cat sat on the mat\n" * 40, "naïve café"])))


@given(ids=st.lists(st.integers(1, 256), max_size=20))
def test_pieces_are_the_text_whatever_the_ids(tokenizer, ids):
    assert "".join(stream_text(tokenizer.decode, iter(ids))) == tokenizer.decode(ids)


@given(text=st.text(), split=st.integers(0, 20))
def test_no_piece_has_half_a_character(tokenizer, text, split):
    ids = tokenizer.encode_batch([text])[0].tolist()
    before, after = ids[:split], ids[split:]
    found = list(stream_text(tokenizer.decode, iter(after), before))
    if "\ufffd" not in tokenizer.decode(before) + tokenizer.decode(after):
        assert tokenizer.decode(before) + "".join(found) == text
        assert not any("\ufffd" in piece for piece in found)


def test_text_comes_as_soon_as_a_character_is_whole(tokenizer):
    ids = tokenizer.encode_batch(["a€b"])[0].tolist()  # € is three bytes of no merge
    assert len(ids) == 5
    assert list(stream_text(tokenizer.decode, iter(ids))) == ["a", "€", "b"]


def test_a_temperature_that_float32_cannot_hold_is_zero():
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert Sampling(temperature=1e-320).compute_probabilities(logits).tolist() == [0, 1, 0]


def test_top_p_keeps_no_more_than_it_needs():
    assert Sampling(temperature=1.0, top_p=0.5).compute_probabilities(torch.zeros(2)).tolist() == [1, 0]
