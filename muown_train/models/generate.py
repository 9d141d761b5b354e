"""Generate text: tokens are drawn one after the other, and a cache saves reading the earlier ones again.

A model reads `seq_len` positions. Once they are full, it starts anew from the last half of them. So a token always sees
between half and all of them, and a long text is read about once more than it would be with unlimited positions.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muown_train.models.attention import KeyValueCache
from muown_train.models.language_model import LanguageModel

_INCOMPLETE_CHARACTER = "\ufffd"  # stands for the bytes of an unfinished UTF-8 character in decoded text


@dataclass(frozen=True)
class Sampling:
    """The distribution that the next token is drawn from: temperature is applied first, then top-k, then top-p.

    Args:
        temperature: divides the logits; 0, or a number that float32 rounds to 0, takes the most likely token.
        top_k: number of most likely tokens to draw from; None draws from all.
        top_p: the fewest most likely tokens that together have this probability are drawn from (Holtzman et al. 2020,
            arXiv 1904.09751); 1 draws from all.

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

    def compute_probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities (V,) of float32 logits (V,).

        Raises:
            ValueError: some logits are not finite, as those of a run that has diverged.
        """
        if not logits.isfinite().all():
            raise ValueError("the model's logits are not finite: its weights are of no use")
        if self.temperature < torch.finfo(logits.dtype).tiny:
            return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
        # the largest logit becomes 0, so a tiny temperature does not overflow to infinity minus infinity
        logits = (logits - logits.max()) / self.temperature
        if self.top_k is not None and self.top_k < len(logits):
            kept = logits.topk(self.top_k).indices
            logits = torch.full_like(logits, -math.inf).index_copy_(0, kept, logits[kept])
        p = torch.softmax(logits, 0)
        if self.top_p < 1:
            ordered, order = p.sort(descending=True, stable=True)
            mass_before = ordered.double().cumsum(0) - ordered.double()  # probability of all more likely tokens
            p = p.index_fill(0, order[mass_before >= self.top_p], 0.0)
            p = p / p.sum()
        return p


@torch.no_grad()
def stream_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    count: int,
    seq_len: int,
    sampling: Sampling,
    seed: int = 0,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Yield `count` token ids that continue `prompt`.

    Args:
        prompt: at least one id; only the last `seq_len` ids are read.
        seq_len: number of positions that the model reads, at most model.seq_len.
        vocabulary: only ids below this are drawn; by default all that the model has.
    """
    assert prompt and seq_len <= model.seq_len
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)[-seq_len:]  # all ids since the cache was last empty
    unread, cache = ids, KeyValueCache()
    for _ in range(count):
        if len(ids) > seq_len:
            ids = ids[-max(1, seq_len // 2) :]
            unread, cache = ids, KeyValueCache()
        logits = model(torch.tensor([unread], device=device), cache=cache)[0, -1, :vocabulary].float().cpu()
        new_id = int(torch.multinomial(sampling.compute_probabilities(logits), 1, generator=generator))
        yield new_id
        unread = [new_id]
        ids = [*ids, new_id]


def generate(
    model: LanguageModel, prompt: list[int], count: int, seq_len: int, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """Return `count` token ids that continue `prompt`; see `stream_tokens`."""
    return list(stream_tokens(model, prompt, count, seq_len, Sampling(temperature), seed))


def stream_text(
    decode: Callable[[Sequence[int]], str], ids: Iterator[int], before: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text of token ids as they come, in pieces that end with whole characters.

    Args:
        before: ids that the text follows, since some tokenizers decode the first token of a text differently.
    """
    before, waiting = list(before), list[int]()
    for new_id in ids:
        waiting.append(new_id)
        text = _decode_after(decode, before, waiting)
        if not text.endswith(_INCOMPLETE_CHARACTER):
            yield text
            before, waiting = waiting, []
    if waiting:
        yield _decode_after(decode, before, waiting)


def _decode_after(decode: Callable[[Sequence[int]], str], before: list[int], ids: list[int]) -> str:
    """Return the text that `ids` add to that of `before`."""
    return decode([*before, *ids])[len(decode(before)) :]
