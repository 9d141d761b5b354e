"""Every architecture is causal, checks its settings, and gives the same logits with a cache."""

import math
from functools import partial

import pytest
import torch

from muown_train.models.attention import KeyValueCache, observe_attention
from muown_train.models.language_model import build_model
from tests.models import test_gpt, test_qwen2, test_speedrun, test_track3

SMALL = {  # vocabularies of 97
    "gpt": test_gpt.small,
    "qwen2": test_qwen2.small,
    "speedrun": test_speedrun.small,
    "track3": partial(test_track3.small, noise=0.2),  # its logits are zero at first
}
every_model = pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)


@every_model
def test_no_token_sees_a_later_one(small):
    model = small().eval()
    ids = torch.randint(97, (1, 20))
    changed = ids.clone()
    changed[0, 12] = (ids[0, 12] + 1) % 97
    with torch.no_grad():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("value", [0, -0.02, math.inf, math.nan, "0.02"])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        (name, key)
        for name in SMALL
        for key in ("init_std", "rope_base", "norm_eps")
        if (name, key) != ("speedrun", "init_std") and name != "track3"
    ],
)
def test_numbers_that_cannot_be(name, key, value):
    with pytest.raises(ValueError, match=f"model.{key}={value!r} must be a positive number"):
        SMALL[name](**{key: value})


@every_model
@pytest.mark.parametrize("parts", [[1] * 20, [7, 1, 12], [20]])
def test_a_cache_gives_the_logits_of_the_whole(small, parts):
    model, ids, cache = small().eval(), torch.randint(97, (2, 20)), KeyValueCache()
    with torch.no_grad():
        logits = torch.cat([model(part, cache=cache) for part in ids.split(parts, dim=1)], dim=1)
        torch.testing.assert_close(logits, model(ids), rtol=1e-5, atol=1e-5)
    assert cache.length == 20


def test_a_model_is_built_from_its_settings_if_it_reads_whole_rows():
    settings = dict(_target_="muown_train.models.gpt.GPT", vocab_size=97, layers=1, dim=16, heads=2, seq_len=32)
    assert build_model(settings, 32).seq_len == 32
    with pytest.raises(ValueError, match=r"model.seq_len=32 is shorter than seq_len=33, the rows it is to train on"):
        build_model(settings, 33)
    with pytest.raises(ValueError, match=r"model.layer is no setting of GPT \(did you mean layers\?\)"):
        build_model(settings | {"layer": 2}, 32)


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_attention_is_named_for_is_what_it_gets(small, dtype, monkeypatch):
    """The name of the implementation is asked for q as the model gives it to attention in training."""
    model, asked, given = small(), [], []
    monkeypatch.setattr("muown_train.models.language_model.name_implementation", asked.append)
    model.name_attention(20, dtype == torch.bfloat16)
    ids = torch.randint(97, (1, 20))
    with observe_attention(lambda q, k, scale: given.append(q)), torch.autocast("cpu", dtype, dtype == torch.bfloat16):
        model(ids, ids)
    assert asked[0].shape == given[0].shape and asked[0].dtype == given[0].dtype
    assert asked[0].requires_grad
