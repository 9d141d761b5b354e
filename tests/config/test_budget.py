"""From tokens to rows and updates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muown_train.config.budget import compute_batch_rows, compute_steps


@given(st.integers(1, 10**6), st.integers(1, 2048), st.integers(1, 32), st.integers(1, 16))
def test_a_batch_is_exact_or_refused_with_ones_that_can_be_made(batch_tokens, seq_len, micro_batch, ranks):
    try:
        rows = compute_batch_rows(batch_tokens, seq_len, micro_batch, ranks)
    except ValueError as error:
        offered = [int(word) for word in str(error).split("such as ")[1].replace(" or ", " ").split()]
        assert min(abs(size - batch_tokens) for size in offered) <= seq_len * micro_batch * ranks
        for size in offered:
            compute_batch_rows(size, seq_len, micro_batch, ranks)
    else:
        assert rows * seq_len == batch_tokens and rows % (micro_batch * ranks) == 0


@pytest.mark.parametrize(
    "tokens, per_parameter, parameters, expected",
    [
        (5e9, None, 123_568_896, 9537),
        (1e10, None, 511_371_520, 19073),
        (None, 20, 123_568_896, 4714),
        (1.33274e9, None, 66_650_624, 2542),  # the paper's width figure
        (6e9, None, 308_184_320, 11444),
    ],
)
def test_steps_of_a_budget(tokens, per_parameter, parameters, expected):
    assert compute_steps(tokens, per_parameter, parameters, 524288) == expected


@pytest.mark.parametrize("budget", [(None, None), (1e9, 20)])
def test_one_budget_and_only_one(budget):
    with pytest.raises(ValueError, match="set one of them"):
        compute_steps(*budget, 1000, 8192)


def test_a_budget_below_one_step():
    with pytest.raises(ValueError, match="less than one step"):
        compute_steps(100, None, 1000, 8192)
