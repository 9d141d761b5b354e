"""What the parts of check_gpu.py share: the models that are measured, and what a part may take."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]  # a line of the table that "table" names, under its other keys


@dataclass
class Model:
    """A model that is measured: its size, and the settings of its training on one GPU."""

    layers: int
    dim: int
    heads: int
    seq_len: int
    micro_batch: int
    words: Sequence[str]


# The batch of the 500M model is a quarter of the paper's, as on each of four GPUs.
MODELS = {
    "124m": Model(12, 768, 12, 1024, 32, ["model=124m", "compile=true"]),
    "500m": Model(22, 1280, 20, 2048, 8, ["model=500m", "compile=true", "batch_tokens=131072"]),
}
TINY_WORDS = "model.layers=2 model.dim=32 model.heads=2 model.vocab_size=512 seq_len=32 micro_batch=2 batch_tokens=128"
TINY = Model(2, 32, 2, 32, 2, [*TINY_WORDS.split(), "compile=true", "precision=bfloat16"])


@dataclass
class Limits:
    """What a part may take: the device, tiny sizes or not, the time, and the models and data it was given."""

    device: torch.device
    dry_run: bool
    deadline: float  # on the monotonic clock
    names: list[str]
    data: str | None

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.deadline - time.monotonic()

    @property
    def models(self) -> dict[str, Model]:
        return {"tiny": TINY} if self.dry_run else {name: MODELS[name] for name in self.names}
