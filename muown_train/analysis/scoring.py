"""Score a saved run on a text: loss, perplexity and bits per byte, each with an interval.

The text is cut into rows as for validation in training (`validation.cut_valid_rows`): each token is a target once, and
no row sees the text before it. Losses are summed over blocks of rows, and the intervals come from the blocks.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from muown_train.analysis.validation import compute_block_losses, compute_perplexity, cut_valid_rows
from muown_train.config.resume_check import DATA_IDENTITY
from muown_train.data.cache import locate_cache
from muown_train.data.sources import RunInfo, TrainingData, build_data
from muown_train.data.text.eval_texts import ALL, EvalText, count_token_bytes, encode_sources
from muown_train.data.text.tokenizer import Tokenizer
from muown_train.models.language_model import LanguageModel
from muown_train.models.loss import IGNORE
from muown_train.runs.saved_run import SavedRun
from muown_train.runtime.redaction import redact_tree

MIN_BLOCKS = 30  # a short text gets smaller blocks, so that it has at least as many
MIN_INTERVAL_BLOCKS = 30  # an interval needs as many blocks; then 1.96 is close enough to Student's quantile
WIDTH = 1.96  # standard errors: 95 % of a normal distribution


@dataclass
class Score:
    """The summed losses of the blocks of one source that were evaluated so far."""

    targets: np.ndarray  # (n,) int64, tokens of each block
    bytes: np.ndarray | None  # (n,) int64, bytes of text of each block; None where the tokenizer does not tell
    losses: list[float] = field(default_factory=list)  # nats of each block evaluated so far

    @property
    def done(self) -> int:
        """The number of tokens evaluated."""
        return int(self.targets[: len(self.losses)].sum())

    def summarize(self) -> dict[str, Any]:
        """Return the results for JSON; loss is in nats per token.

        `…_interval` is None with fewer than MIN_INTERVAL_BLOCKS blocks.
        """
        n, losses = len(self.losses), np.array(self.losses)
        loss, error = estimate_ratio(losses, self.targets[:n])
        interval = _make_interval(loss, error)
        summary: dict[str, Any] = {
            "tokens": self.done,
            "blocks": n,
            "loss": loss,
            "loss_interval": interval,
            "perplexity": compute_perplexity(loss),
            "perplexity_interval": interval and [compute_perplexity(end) for end in interval],
        }
        if self.bytes is not None and self.bytes[:n].sum():
            nats, error = estimate_ratio(losses, self.bytes[:n])
            bits, error = nats / math.log(2), None if error is None else error / math.log(2)
            summary |= {"bytes": int(self.bytes[:n].sum()), "bits_per_byte": bits}
            summary["bits_per_byte_interval"] = _make_interval(bits, error)
        return summary


def estimate_ratio(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, float | None]:
    """Return sum(sums) / sum(sizes) over blocks and half the width of its 95 % interval.

    The half width is None with fewer than MIN_INTERVAL_BLOCKS blocks. Blocks count as independent; the variance is
    that of a ratio estimator (Cochran, Sampling Techniques, 3rd edition 1977, section 6.4) for a text that is a small
    part of all possible text.
    """
    n, total = len(sums), float(sizes.sum())
    value = float(sums.sum()) / total
    if n < MIN_INTERVAL_BLOCKS:
        return value, None
    scatter = float(((sums - value * sizes) ** 2).sum())
    return value, WIDTH * math.sqrt(n / (n - 1) * scatter) / total


def _make_interval(value: float, error: float | None) -> list[float] | None:
    return None if error is None else [value - error, value + error]


def merge_scores(scores: Mapping[str, Score]) -> Score:
    """Return one score of everything that was evaluated, as if the sources were one."""
    some = [score for score in scores.values() if score.losses]
    sizes = [None if score.bytes is None else score.bytes[: len(score.losses)] for score in some]
    known = [size for size in sizes if size is not None]
    return Score(
        np.concatenate([score.targets[: len(score.losses)] for score in some]),
        np.concatenate(known) if len(known) == len(sizes) else None,
        [loss for score in some for loss in score.losses],
    )


def compare_scores(score: Score, other: Score) -> dict[str, Any] | None:
    """Return how far the loss of `score` is above that of `other` in nats per token, for JSON; None if blocks differ.

    A hard block is hard for both models, so the interval of the difference is far narrower than those of the losses.
    """
    n = min(len(score.losses), len(other.losses))
    if not np.array_equal(score.targets[:n], other.targets[:n]):
        return None
    value, error = estimate_ratio(np.array(score.losses[:n]) - np.array(other.losses[:n]), score.targets[:n])
    return {"loss": value, "loss_interval": _make_interval(value, error)}


def rebuild_data(
    saved: SavedRun, vocab_size: int, valid_tokens: int | None = None, cache: str | None = None
) -> TrainingData:
    """Rebuild the data of a run from its configuration.

    Args:
        vocab_size: rows of the model's embedding.
        valid_tokens: held-out tokens, by default as many as the run had.
        cache: folder of prepared data.

    Raises:
        ValueError: the data have changed since the run was trained, or the run does not say what they were.
    """
    if not saved.data or not saved.config.data:
        raise ValueError(
            f"{saved.folder} does not say what it was trained on (imported weights do not): give a text, such as "
            "data=stdlib"
        )
    config = saved.config
    valid_tokens = valid_tokens or config.valid_tokens
    # the stored `cache` is not used: in a run from elsewhere it could be any folder of this machine
    data = build_data(config.data, RunInfo(config.seq_len, config.seed, valid_tokens, locate_cache(cache), vocab_size))
    for key in DATA_IDENTITY:
        old, new = saved.data.get(key), redact_tree(data.metadata.get(key))
        # another number of held-out tokens may come from other documents
        if old != new and not (key == "held_out_content" and valid_tokens != config.valid_tokens):
            raise ValueError(
                f"the data of {saved.folder} have changed since it was trained ({key} was {old}, is {new}): "
                "give a text to evaluate on, such as data=files data.valid=GLOB"
            )
    return data


@dataclass
class Scoring:
    """A model, the rows to evaluate it on, and the scores so far.

    A run's own validation text has the single source "all".
    """

    model: LanguageModel
    tokenizer: Tokenizer
    seq_len: int
    rows: dict[str, Tensor]  # (R, T+1) int64 by source
    block: dict[str, int]  # rows of a block by source
    scores: dict[str, Score]

    @property
    def digest(self) -> str:
        """A hash of all rows: two models with the same digest are evaluated on the same targets."""
        digest = hashlib.blake2b(digest_size=8)
        for source, rows in self.rows.items():
            digest.update(f"{source} {rows.shape} ".encode())
            digest.update(rows[:, 1:].numpy().tobytes())
        return digest.hexdigest()

    @property
    def tokens(self) -> int:
        """The number of targets in all rows."""
        return sum(int(score.targets.sum()) for score in self.scores.values())

    def evaluate_blocks(self, device: torch.device) -> Iterator[int]:
        """Evaluate block by block, and yield the number of tokens done after each."""
        done = 0
        for source, rows in self.rows.items():
            score = self.scores[source]
            for loss in compute_block_losses(self.model, rows, self.block[source], device):
                done += int(score.targets[len(score.losses)])
                score.losses.append(loss)
                yield done


def prepare_scoring(
    saved: SavedRun,
    model: LanguageModel,
    text: EvalText | None,
    seq_len: int | None = None,
    micro_batch: int | None = None,
    valid_tokens: int | None = None,
    cache: str | None = None,
) -> Scoring:
    """Cut a text, or without one the run's own validation tokens, into rows to score a run on.

    Args:
        model: the run's model, on the device to use.
        seq_len: tokens of a row, by default the run's.
        micro_batch: largest number of rows in a block, by default the run's.
        valid_tokens, cache: see `rebuild_data`.

    Raises:
        ValueError: rows are longer than the model reads; see also `rebuild_data` and `encode_sources`.
    """
    seq_len, micro_batch = seq_len or saved.config.seq_len, micro_batch or saved.config.micro_batch
    if seq_len > model.seq_len:
        raise ValueError(f"seq_len={seq_len} is longer than what the model of {saved.folder} reads, {model.seq_len}")
    if text is None:
        data = rebuild_data(saved, model.vocab_size, valid_tokens, cache)
        tokenizer, ids = data.tokenizer, {ALL: data.valid}
    else:
        tokenizer = saved.load_tokenizer()
        ids = encode_sources(text, tokenizer)
    sizes = count_token_bytes(tokenizer)
    scoring = Scoring(model, tokenizer, seq_len, {}, {}, {})
    for source, part in ids.items():
        rows = cut_valid_rows(part, len(part) - 1, seq_len)
        block = max(1, min(micro_batch, len(rows) // MIN_BLOCKS))
        scoring.rows[source], scoring.block[source] = rows, block
        scoring.scores[source] = _make_empty_score(rows, block, sizes)
    return scoring


def _make_empty_score(rows: Tensor, block: int, sizes: np.ndarray | None) -> Score:
    starts, targets = np.arange(0, len(rows), block), rows[:, 1:].numpy()
    counts = targets != IGNORE
    in_bytes = None if sizes is None else np.where(counts, sizes[np.where(counts, targets, 0)], 0).sum(axis=1)
    return Score(
        np.add.reduceat(counts.sum(axis=1), starts), None if in_bytes is None else np.add.reduceat(in_bytes, starts)
    )
