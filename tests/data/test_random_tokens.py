"""Random rows are a function of their number alone, and a run trains on them."""

import math

import numpy as np

from muown_train.config.compose import load_config
from muown_train.data.random_tokens import RandomRows
from muown_train.training.build import build_run
from tests.helpers.runs import HERE, SMALL, metrics


def test_rows_depend_on_their_number_alone():
    rows = RandomRows(50, 16, seed=3)
    some, again = rows.take([5, 0, 10**12]), RandomRows(50, 16, seed=3).take([0, 5])
    assert some.shape == (3, 17) and some.dtype == np.int32
    assert some.min() >= 0 and some.max() < 50
    assert np.array_equal(some[[1, 0]], again)
    assert len({row.tobytes() for row in [*some, *RandomRows(50, 16, seed=4).take([0, 5])]}) == 5


def test_a_run_on_random_tokens_has_nothing_to_learn(tmp_path):
    settings = [setting for setting in SMALL if setting != "data=files"]
    run = build_run(load_config(["name=run", *settings, "data=random", f"out={tmp_path}", "optim.lr=1e-3"]), HERE)
    assert not run.resume()
    run.train()
    run.close()
    lines = metrics(run.folder)
    assert lines[-1]["step"] == 12
    assert abs(lines[-1]["valid/loss"] - math.log(4096)) < 0.2
