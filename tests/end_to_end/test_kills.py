"""Two seeded kills of each kind; `python -m tests.helpers.kill_runs` makes more."""

import pytest

from tests.helpers.kill_runs import SAVE_EVERY, run_trials


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) if kind == "one" else kind for kind in SAVE_EVERY]
)
def test_killed_at_a_random_moment_it_goes_on_bit_for_bit(corpus, tmp_path, kind):
    assert run_trials(kind, times=2, seed=1, ranks=2, corpus=corpus, out=tmp_path) == []
