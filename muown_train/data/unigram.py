"""The loss of a model that knows only how often each token occurs: what any training must beat."""

from __future__ import annotations

import numpy as np


def unigram_loss(counts: np.ndarray, targets: np.ndarray) -> float:
    """Mean of -log p over `targets` (1-D ids), nats per token; p(id) = (counts[id] + 1) / sum(counts + 1)."""
    smoothed = np.asarray(counts, dtype=np.float64) + 1
    log_p = np.log(smoothed) - np.log(smoothed.sum())
    return float(-log_p[np.asarray(targets, dtype=np.int64)].mean())
