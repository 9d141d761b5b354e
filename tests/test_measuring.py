"""What a call takes."""

import gc

import torch

from muown_train.measuring import peak_memory


def test_garbage_from_before_does_not_count_against_a_call():
    taken = []

    def action():
        gc.collect()  # as may happen at any time
        taken.append(torch.zeros(1000))

    cycle = [torch.zeros(50_000)]
    cycle.append(cycle)
    del cycle
    assert 4000 <= peak_memory(action, "cpu") < 8000
