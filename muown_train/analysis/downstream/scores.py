"""Log-probabilities of continuations by a model that trains, which the ranks compute together."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from muown_train.models.language_model import LanguageModel
from muown_train.runtime.distributed import World

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context, at least one, and of what follows it
Score = tuple[float, bool]  # log-probability in nats, and whether each id is the likeliest

MOST_LOGITS = 2**28  # that a forward pass returns; training, whose memory is planned, never has those of all its rows


@torch.no_grad()
def score_continuations(
    model: LanguageModel,
    pairs: Sequence[Pair],
    seq_len: int,
    rows: int,
    world: World,
    vocabulary: int,
    check_stop: Callable[[], None] = lambda: None,
) -> list[Score]:
    """Return the score of every continuation after its context, the same on every rank; a collective call.

    Of a pair that is longer than `seq_len` + 1 ids the last ones count.

    Args:
        rows: the most pairs per rank and forward pass; fewer where there would be more than MOST_LOGITS logits.
        vocabulary: the model chooses among ids below this.
        check_stop: is called before each forward pass, equally often on every rank; what it raises ends the call.
    """
    cut = [_cut_pair(pair, seq_len) for pair in pairs]
    # rows of a chunk are about as long; the longest come first, which shows at once whether memory suffices
    order = sorted(range(len(cut)), key=lambda i: -len(cut[i][0]))
    rows = max(1, min(rows, MOST_LOGITS // (model.vocab_size * seq_len)))
    chunks = [[cut[i] for i in order[start : start + rows]] for start in range(0, len(cut), rows)]
    own = []
    for start in range(0, len(chunks), world.size):
        check_stop()
        # a rank without a chunk of its own takes part too, since no rank may hold all weights
        chunk = chunks[min(start + world.rank, len(chunks) - 1)]
        own.append(_score_chunk(model, chunk, vocabulary, world.device))
    parts = world.gather(own)
    found = (score for i in range(len(chunks)) for score in parts[i % world.size][i // world.size])
    scores = dict(zip(order, found, strict=True))
    return [scores[i] for i in range(len(cut))]


def _cut_pair(pair: Pair, seq_len: int) -> tuple[list[int], int]:
    """Return the ids of a row, and how many at its end are scored."""
    context, continuation = pair
    ids = [*context, *continuation][-(seq_len + 1) :]
    return ids, min(len(continuation), len(ids) - 1)


def _score_chunk(
    model: LanguageModel, chunk: Sequence[tuple[list[int], int]], vocabulary: int, device: torch.device
) -> list[Score]:
    longest = max(2, *(len(ids) for ids, _ in chunk)) - 1
    inputs = torch.zeros(len(chunk), longest, dtype=torch.int64)  # what follows a row does not change it
    for row, (ids, _) in zip(inputs, chunk, strict=True):
        row[: len(ids) - 1] = torch.tensor(ids[:-1])
    logits: Tensor = model(inputs.to(device))  # (rows, T, V)
    scores = []
    for of_row, (ids, count) in zip(logits, chunk, strict=True):
        targets = torch.tensor(ids[len(ids) - count :], dtype=torch.int64, device=device)  # (count,)
        own = of_row[len(ids) - 1 - count : len(ids) - 1, :vocabulary].float()  # (count, V)
        picked = own.log_softmax(-1).gather(-1, targets[:, None])
        scores.append((float(picked.double().sum()), bool((own.argmax(-1) == targets).all())))
    return scores
