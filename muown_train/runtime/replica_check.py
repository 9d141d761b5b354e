"""Check that the ranks of a run still hold the same weights, bit for bit.

Each parameter is hashed on its device, in exact integer arithmetic. The hash is the sum over the parameter's words of
word * weight, modulo 2^64, with odd weights that differ modulo 2^33. So the flip of any one bit changes the hash, and
so does a swap of any two of the first 2^32 elements of up to 32 bits. Any other change goes unseen with a probability
of about 2^-31 or less. Equal bits count as equal, also those of NaN.

The hash moves 24 bytes for each word of 4 bytes, six times as many as reading the weights once; on a CPU core it takes
ten times as long as their sum.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from muown_train.optim.row_shards.placement import get_local
from muown_train.runtime.distributed import World

_CHUNK = 1 << 20  # words hashed at once, with a temporary tensor of 8 MiB
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, whose multiples modulo 2^64 are well spread
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # the type of a word, by bytes of an element


def find_divergent_ranks(
    named_parameters: Iterable[tuple[str, Tensor]], world: World, copies: Sequence[Sequence[int]] | None = None
) -> str | None:
    """Name the first parameter whose copies are not the same, and the ranks that differ; a collective call.

    Args:
        named_parameters: the same names and shapes on every rank; of a DTensor the rows of this rank are compared.
        copies: the ranks that hold one copy together, for each copy; by default each rank has its own.

    Returns:
        None if all parameters are equal; otherwise one sentence, the same on every rank. It names the ranks that differ
        from the most common value, or from the lowest rank's where several values are equally common.
    """
    if world.size == 1 or (copies is not None and len(copies) == 1):
        return None
    peers = [range(world.size)] if copies is None else list(zip(*copies, strict=True))  # who has the same rows
    names, parameters = zip(*named_parameters, strict=True)
    hashes = torch.stack([hash_tensor(get_local(p)) for p in parameters]).tolist()
    for name, values in zip(names, zip(*world.gather(hashes), strict=True), strict=True):
        for ranks in peers:
            # the first of equally common values is the lowest rank's
            usual = Counter(values[rank] for rank in ranks).most_common(1)[0][0]
            divergent = [rank for rank in ranks if values[rank] != usual]
            if divergent:
                shown = f"rank{'s' * (len(divergent) > 1)} {', '.join(map(str, divergent))}"
                first = next(rank for rank in ranks if values[rank] == usual)
                return f"the weights of {name} on {shown} are not those of rank {first}"
    return None


def hash_tensor(p: Tensor) -> Tensor:
    """Return a hash of a tensor's bits, () int64 on its device."""
    elements = p.detach().contiguous()
    # as_strided, since reshape(-1) leaves odd strides to tensors of less than two elements
    words = elements.as_strided((elements.numel(),), (1,)).view(_WORDS[p.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=p.device)
    product = torch.empty(min(len(words), _CHUNK), dtype=torch.int64, device=p.device)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        # word k = start + j has the weight w(j) * (1 + 2^33 * n) + 2 * start with some n, which is 2k + 1 modulo 2^33
        spread = 1 + ((start // _CHUNK * _GOLDEN % 2**64 >> 33) << 33)
        weighted = torch.mul(chunk, _make_weights(p.device)[: len(chunk)], out=product[: len(chunk)]).sum()
        total += weighted * (spread if spread < 2**63 else spread - 2**64) + chunk.sum(dtype=torch.int64) * (2 * start)
    return total


@lru_cache(maxsize=1)
def _make_weights(device: torch.device) -> Tensor:
    """Return w(j), (_CHUNK,) int64, with random upper 31 bits and 2j + 1 in the lower 33."""
    generator = torch.Generator().manual_seed(0)
    upper = torch.randint(0, 2**31, (_CHUNK,), generator=generator)
    return (upper * 2**33 + torch.arange(1, 2 * _CHUNK, 2)).to(device)
