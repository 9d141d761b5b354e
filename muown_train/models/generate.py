"""Text from a model: tokens are drawn one after the other, each from what the cache keeps of those before.

A model reads `seq_len` positions. Once they are full it starts anew from the last half of them, so that a token always
sees between half and all of them, and long texts cost one reading more on average.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muown_train.models.kv_cache import KeyValueCache
from muown_train.models.language_model import LanguageModel

_HALF_A_CHARACTER = "\ufffd"  # what the bytes of an unfinished UTF-8 character are decoded to


@dataclass(frozen=True)
class Sampling:
    """What the next token is drawn from: first the temperature, then top-k, then top-p.

    Args:
        temperature: divides the logits; 0, or what is so in float32, takes the most likely token.
        top_k: only so many of the most likely; None: all.
        top_p: only the fewest of the most likely that together have this probability (Holtzman et al. 2020, arXiv
            1904.09751); 1: all.

    Raises:
        ValueError: a setting out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} must be a number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top-k {self.top_k} must be at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} must be above 0 and at most 1")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities (V,) of float32 logits (V,).

        Raises:
            ValueError: logits that are not finite, as of a run that has diverged.
        """
        if not logits.isfinite().all():
            raise ValueError("the model's logits are not finite: its weights are of no use")
        if self.temperature < torch.finfo(logits.dtype).tiny:
            return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
        # the largest is 0 from here on, so that a tiny temperature does not overflow to infinity minus infinity
        logits = (logits - logits.max()) / self.temperature
        if self.top_k is not None and self.top_k < len(logits):
            kept = logits.topk(self.top_k).indices
            logits = torch.full_like(logits, -math.inf).index_copy_(0, kept, logits[kept])
        p = torch.softmax(logits, 0)
        if self.top_p < 1:
            ordered, order = p.sort(descending=True, stable=True)
            before = ordered.double().cumsum(0) - ordered.double()  # probability of those more likely
            p = p.index_fill(0, order[before >= self.top_p], 0.0)
            p = p / p.sum()
        return p


@torch.no_grad()
def stream(
    model: LanguageModel,
    prompt: Sequence[int],
    count: int,
    seq_len: int,
    sampling: Sampling,
    seed: int = 0,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Token ids that continue `prompt`, `count` of them.

    Args:
        prompt: at least one id; of a longer one the last `seq_len` are read.
        seq_len: positions that the model reads, at most model.seq_len.
        vocabulary: ids to draw from are below; by default all that the model has.
    """
    assert prompt and seq_len <= model.seq_len
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)[-seq_len:]  # since the cache was empty
    unread, cache = ids, KeyValueCache()
    for _ in range(count):
        if len(ids) > seq_len:
            ids = ids[-max(1, seq_len // 2) :]
            unread, cache = ids, KeyValueCache()
        logits = model(torch.tensor([unread], device=device), cache=cache)[0, -1, :vocabulary].float().cpu()
        new = int(torch.multinomial(sampling.probabilities(logits), 1, generator=generator))
        yield new
        unread = [new]
        ids = [*ids, new]


def generate(
    model: LanguageModel, prompt: list[int], count: int, seq_len: int, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """Continue `prompt` by `count` token ids; see `stream`."""
    return list(stream(model, prompt, count, seq_len, Sampling(temperature), seed))


def pieces(decode: Callable[[Sequence[int]], str], ids: Iterator[int], before: Sequence[int] = ()) -> Iterator[str]:
    """Text of token ids as they come, in pieces that end with whole characters.

    Args:
        before: ids that the text follows: some tokenizers write the first token of a text otherwise.
    """
    before, waiting = list(before), list[int]()
    for new in ids:
        waiting.append(new)
        text = _after(decode, before, waiting)
        if not text.endswith(_HALF_A_CHARACTER):
            yield text
            before, waiting = waiting, []
    if waiting:
        yield _after(decode, before, waiting)


def _after(decode: Callable[[Sequence[int]], str], before: list[int], ids: list[int]) -> str:
    return decode([*before, *ids])[len(decode(before)) :]
