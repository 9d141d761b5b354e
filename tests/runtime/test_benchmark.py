"""The peak memory of a call counts the call's own tensors."""

import gc

import pytest
import torch

from muown_train.runtime.benchmark import measure_peak_memory


@pytest.mark.slow
def test_garbage_of_an_earlier_call_does_not_count_against_a_later_one():
    def leave_garbage():
        cycle = [torch.zeros(50_000)]
        cycle.append(cycle)

    def action():
        gc.collect()  # as may happen at any time
        torch.zeros(1000)

    measure_peak_memory(leave_garbage, "cpu")
    assert 4000 <= measure_peak_memory(action, "cpu") < 8000
