"""Rows of T+1 tokens by their number in the run: the one interface of prepared tokens and of streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from muown_train.data.permutation import permute


class RowSource(Protocol):
    """Row i of a run is a function of (data configuration, seq_len, seed, i) alone."""

    seq_len: int

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Rows of the run by number: (len(indices), T+1) int32."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TokenRows:
    """Rows of prepared tokens (1-D, a memory map as a rule), shuffled anew in each epoch; there is no state.

    Row k of the tokens holds ids kT to kT + T inclusive, so each token but the first and the fewer than T
    at the end is a target once an epoch. Raises ValueError where the tokens do not make one row.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, seed: int) -> None:
        self.rows = (len(tokens) - 1) // seq_len
        if self.rows < 1:
            raise ValueError(
                f"the training data have {len(tokens)} tokens, fewer than one row of seq_len + 1 = "
                f"{seq_len + 1}: lower seq_len or give more data"
            )
        self.seq_len = seq_len
        self._tokens = tokens
        self._seed = seed

    def take(self, indices: Sequence[int]) -> np.ndarray:
        result = np.empty((len(indices), self.seq_len + 1), dtype=np.int32)
        for k, row in enumerate(self.numbers(indices)):
            start = int(row) * self.seq_len
            result[k] = self._tokens[start : start + self.seq_len + 1]
        return result

    def numbers(self, indices: Sequence[int]) -> np.ndarray:
        """Which row of the tokens each row of the run is; uint64."""
        epochs, places = np.divmod(np.asarray(indices, dtype=np.int64), self.rows)
        result = np.empty(len(places), dtype=np.uint64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = permute(places[here], self.rows, (self._seed, int(epoch)))
        return result

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
