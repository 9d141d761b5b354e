"""What a saved run makes of a text: loss, perplexity and bits per byte, each with an interval.

The text is cut into rows as for validation in training (`evaluation.valid_rows`): each token is a target once, and no
row sees what lies before it. Blocks of rows are what losses are summed over and what intervals come from.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from muown_train.analysis.validation import block_losses, valid_rows
from muown_train.config.resume_check import DATA_IDENTITY
from muown_train.data.cache import cache_folder
from muown_train.data.sources import RunInfo, TrainingData, build_data
from muown_train.data.text.eval_texts import ALL, Text, encoded, token_bytes
from muown_train.data.text.tokenizer import Tokenizer
from muown_train.models.language_model import LanguageModel
from muown_train.models.loss import IGNORE
from muown_train.runs.saved_run import SavedRun
from muown_train.runtime.redaction import redact_tree

LEAST_BLOCKS = 30  # blocks have fewer rows where there would be fewer of them
FEWEST = 30  # blocks that an interval is made of, for which 1.96 is near enough to Student's quantile
WIDTH = 1.96  # standard errors: 95 % of a normal distribution


@dataclass
class Score:
    """Sums over the blocks of one source, of those evaluated so far."""

    targets: np.ndarray  # (n,) int64, tokens of each block
    bytes: np.ndarray | None  # (n,) int64, of text; None where the tokenizer does not tell
    losses: list[float] = field(default_factory=list)  # nats; fewer than n until all is done

    @property
    def done(self) -> int:
        """Tokens evaluated."""
        return int(self.targets[: len(self.losses)].sum())

    def numbers(self) -> dict[str, Any]:
        """The results in JSON; loss in nats per token. `…_interval` is None with fewer than FEWEST blocks."""
        n, losses = len(self.losses), np.array(self.losses)
        loss, error = ratio(losses, self.targets[:n])
        interval = _around(loss, error)
        found: dict[str, Any] = {
            "tokens": self.done,
            "blocks": n,
            "loss": loss,
            "loss_interval": interval,
            "perplexity": _exp(loss),
            "perplexity_interval": interval and [_exp(end) for end in interval],
        }
        if self.bytes is not None and self.bytes[:n].sum():
            nats, error = ratio(losses, self.bytes[:n])
            bits, error = nats / math.log(2), None if error is None else error / math.log(2)
            found |= {"bytes": int(self.bytes[:n].sum()), "bits_per_byte": bits}
            found["bits_per_byte_interval"] = _around(bits, error)
        return found


def ratio(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, float | None]:
    """sum(sums) / sum(sizes) over blocks, and half the width of its 95 % interval, None with fewer than FEWEST blocks.

    Blocks are taken as independent; the variance is that of a ratio estimator (Cochran, Sampling Techniques, 3rd
    edition 1977, section 6.4) for a text that is a small part of all there could be.
    """
    n, total = len(sums), float(sizes.sum())
    value = float(sums.sum()) / total
    if n < FEWEST:
        return value, None
    scatter = float(((sums - value * sizes) ** 2).sum())
    return value, WIDTH * math.sqrt(n / (n - 1) * scatter) / total


def _around(value: float, error: float | None) -> list[float] | None:
    return None if error is None else [value - error, value + error]


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700))


def together(scores: Mapping[str, Score]) -> Score:
    """All that was evaluated, as one source."""
    some = [score for score in scores.values() if score.losses]
    sizes = [None if score.bytes is None else score.bytes[: len(score.losses)] for score in some]
    known = [size for size in sizes if size is not None]
    return Score(
        np.concatenate([score.targets[: len(score.losses)] for score in some]),
        np.concatenate(known) if len(known) == len(sizes) else None,
        [loss for score in some for loss in score.losses],
    )


def difference(score: Score, other: Score) -> dict[str, Any] | None:
    """By how much the loss of `score` is above that of `other` in nats per token, in JSON; None if blocks differ.

    What is hard or easy in a block is so for both: the interval of the difference is far narrower than theirs.
    """
    n = min(len(score.losses), len(other.losses))
    if not np.array_equal(score.targets[:n], other.targets[:n]):
        return None
    value, error = ratio(np.array(score.losses[:n]) - np.array(other.losses[:n]), score.targets[:n])
    return {"loss": value, "loss_interval": _around(value, error)}


def own_validation(
    saved: SavedRun, vocab_size: int, valid_tokens: int | None = None, cache: str | None = None
) -> TrainingData:
    """The run's data, rebuilt from its configuration.

    Args:
        vocab_size: of the model.
        valid_tokens: held-out tokens, by default as many as the run had; cache: folder of prepared data.

    Raises:
        ValueError: they are no longer what the run was trained on, or it does not say what they were.
    """
    if not saved.data or not saved.config.data:
        raise ValueError(
            f"{saved.folder} does not say what it was trained on (imported weights do not): give a text, such as "
            "data=stdlib"
        )
    # a stored folder of prepared data may be a stranger's choice
    config = saved.config
    valid_tokens = valid_tokens or config.valid_tokens
    data = build_data(config.data, RunInfo(config.seq_len, config.seed, valid_tokens, cache_folder(cache), vocab_size))
    for key in DATA_IDENTITY:
        old, new = saved.data.get(key), redact_tree(data.facts.get(key))
        # more held-out tokens may be of more documents
        if old != new and not (key == "held_out_content" and valid_tokens != config.valid_tokens):
            raise ValueError(
                f"the data of {saved.folder} have changed since it was trained ({key} was {old}, is {new}): "
                "give a text to evaluate on, such as data=files data.valid=GLOB"
            )
    return data


@dataclass
class Scoring:
    """A model, its tokens and what was found so far; the source of a run's own validation text is "all"."""

    model: LanguageModel
    tokenizer: Tokenizer
    seq_len: int
    rows: dict[str, Tensor]  # of each source (R, T+1) int64
    block: dict[str, int]  # rows
    scores: dict[str, Score]

    @property
    def digest(self) -> str:
        """Equal for the same ids in the same rows."""
        digest = hashlib.blake2b(digest_size=8)
        for source, rows in self.rows.items():
            digest.update(f"{source} {rows.shape} ".encode())
            digest.update(rows[:, 1:].numpy().tobytes())
        return digest.hexdigest()

    @property
    def tokens(self) -> int:
        """Targets of all rows."""
        return sum(int(score.targets.sum()) for score in self.scores.values())

    def blocks(self, device: torch.device) -> Iterator[int]:
        """Evaluate block by block; gives the number of tokens done after each."""
        done = 0
        for source, rows in self.rows.items():
            score = self.scores[source]
            for loss in block_losses(self.model, rows, self.block[source], device):
                done += int(score.targets[len(score.losses)])
                score.losses.append(loss)
                yield done


def prepared(
    saved: SavedRun,
    model: LanguageModel,
    text: Text | None,
    seq_len: int | None = None,
    micro_batch: int | None = None,
    valid_tokens: int | None = None,
    cache: str | None = None,
) -> Scoring:
    """A run with the rows of a text, or without one of its own validation tokens.

    Args:
        model: of the run, on the device to use.
        seq_len, micro_batch: tokens of a row, rows of a block at most; by default the run's.

    Raises:
        ValueError: see `own_validation` and `encoded`; or rows longer than the model reads.
    """
    seq_len, micro_batch = seq_len or saved.config.seq_len, micro_batch or saved.config.micro_batch
    if seq_len > model.seq_len:
        raise ValueError(f"seq_len={seq_len} is longer than what the model of {saved.folder} reads, {model.seq_len}")
    if text is None:
        data = own_validation(saved, model.vocab_size, valid_tokens, cache)
        tokenizer, ids = data.tokenizer, {ALL: data.valid}
    else:
        tokenizer = saved.load_tokenizer()
        ids = encoded(text, tokenizer)
    sizes = token_bytes(tokenizer)
    scoring = Scoring(model, tokenizer, seq_len, {}, {}, {})
    for source, part in ids.items():
        rows = valid_rows(part, len(part) - 1, seq_len)
        block = max(1, min(micro_batch, len(rows) // LEAST_BLOCKS))
        scoring.rows[source], scoring.block[source] = rows, block
        scoring.scores[source] = _unevaluated(rows, block, sizes)
    return scoring


def _unevaluated(rows: Tensor, block: int, sizes: np.ndarray | None) -> Score:
    starts, targets = np.arange(0, len(rows), block), rows[:, 1:].numpy()
    counts = targets != IGNORE
    in_bytes = None if sizes is None else np.where(counts, sizes[np.where(counts, targets, 0)], 0).sum(axis=1)
    return Score(
        np.add.reduceat(counts.sum(axis=1), starts), None if in_bytes is None else np.add.reduceat(in_bytes, starts)
    )
