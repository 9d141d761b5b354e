"""What the training loop needs to know of a configuration."""

from collections.abc import Callable
from dataclasses import dataclass

Schedule = Callable[[int, int], float]  # (step, steps) -> multiplier of the base learning rate


@dataclass(frozen=True)
class Settings:
    """What the loop needs to know; intervals in updates."""

    steps: int
    batch_tokens: int  # per update, over all ranks
    seq_len: int
    micro_batch: int  # rows per rank and forward
    eval_every: int
    save_every: int
    log_every: int
    valid_tokens: int
    check_every: int | None = None  # between two comparisons of the weights of all ranks
    probe_every: int | None = None  # between two calls of the probe
    stop_if_unsaved: bool = True  # a checkpoint that cannot be written ends the run; or it goes on without
    grad_clip: float | None = 1.0
    autocast: bool = False  # bfloat16 in the forward pass, float32 weights
    reduce_in_bfloat16: bool = False  # gradients over ranks
    flops_per_token: float | None = None
    peak_flops: float | None = None  # of one device, per second
