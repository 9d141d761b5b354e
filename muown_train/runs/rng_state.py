"""The state of every random number generator of a process, as tensors and JSON."""

import random

import numpy as np
import torch

from muown_train.runs.checkpoint import State
from muown_train.runtime.distributed import World


class RandomState:
    """The global generators of torch (CPU, and this rank's CUDA device), numpy and Python, stored by rank.

    A state of N ranks loads on any number of ranks: a rank without a stored state keeps its generators as they are.
    """

    def __init__(self, world: World) -> None:
        self.rank, self.device = str(world.rank), world.device

    def state_dict(self) -> State:
        numpy = np.random.get_state(legacy=False)
        version, words, gauss = random.getstate()
        state: State = {
            "torch": torch.get_rng_state(),  # (5056,) uint8
            "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
            "python": [version, list(words), gauss],
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return {self.rank: state}

    def load_state_dict(self, state: State, /) -> None:
        if self.rank not in state:
            return
        own = state[self.rank]
        torch.set_rng_state(own["torch"])
        key = np.array(own["numpy"]["state"]["key"], dtype=np.uint32)
        np.random.set_state({**own["numpy"], "state": {**own["numpy"]["state"], "key": key}})
        version, words, gauss = own["python"]
        random.setstate((version, tuple(words), gauss))
        if self.device.type == "cuda" and "cuda" in own:
            torch.cuda.set_rng_state(own["cuda"], self.device)
