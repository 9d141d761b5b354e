"""Weights compared across ranks: any change is found, on any dtype and shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.runtime import replica_check
from muown_train.runtime.distributed import World
from muown_train.runtime.replica_check import find_divergent_ranks, hash_tensor
from tests.helpers.ranks import on_ranks

BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float64: 8}
dtypes = st.sampled_from(list(BYTES))


def of_bytes(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


@st.composite
def tensors(draw, least: int = 0) -> torch.Tensor:
    """Any bits, those of NaN and of denormal numbers too."""
    dtype = draw(dtypes)
    count = draw(st.integers(least, 40))
    return of_bytes(draw(st.binary(min_size=BYTES[dtype] * count, max_size=BYTES[dtype] * count)), dtype)


def bits(p: torch.Tensor) -> torch.Tensor:
    return p.reshape(-1).view(torch.uint8)


def hash_of(p: torch.Tensor) -> int:
    return int(hash_tensor(p))


@pytest.fixture(params=[4, 1 << 20], ids=["chunks of 4 words", "one chunk"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(replica_check, "_CHUNK", request.param)
    replica_check._make_weights.cache_clear()
    yield
    replica_check._make_weights.cache_clear()


@given(tensors())
def test_equal_bits_have_equal_hashes_whatever_the_strides(p):
    assert hash_of(p) == hash_of(p.clone()) == hash_of(torch.stack([p, p], dim=1)[:, 1])
    if len(p) % 2 == 0:
        assert hash_of(p) == hash_of(p.view(2, -1))


@pytest.mark.usefixtures("chunk")
def test_any_flipped_bit_is_found():
    @given(tensors(least=1), st.data())
    def found(p, data):
        other = p.clone()
        bits(other)[data.draw(st.integers(0, len(bits(p)) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert hash_of(other) != hash_of(p)

    found()


@pytest.mark.usefixtures("chunk")
def test_any_swap_of_two_elements_is_found():
    @given(tensors(least=2), st.data())
    def found(p, data):
        i, j = data.draw(st.lists(st.integers(0, len(p) - 1), min_size=2, max_size=2, unique=True))
        other = p.clone()
        other[i], other[j] = p[j], p[i]
        assert (hash_of(other) != hash_of(p)) == (not torch.equal(bits(other), bits(p)))

    found()


@pytest.mark.usefixtures("chunk")
def test_any_other_difference_is_found():
    @settings(max_examples=300)
    @given(dtypes, st.data())
    def found(dtype, data):
        size = BYTES[dtype] * data.draw(st.integers(1, 12))
        a, b = (of_bytes(data.draw(st.binary(min_size=size, max_size=size)), dtype) for _ in range(2))
        assert (hash_of(a) == hash_of(b)) == torch.equal(bits(a), bits(b))

    found()


def test_weights_are_odd_and_no_two_are_alike_where_it_matters():
    """For elements of up to 32 bits a swap goes unseen only if two weights are equal modulo 2^33."""
    one_word = torch.zeros(300, dtype=torch.int32)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(replica_check, "_CHUNK", 16)
        replica_check._make_weights.cache_clear()
        found = []
        for k in range(300):
            one_word[k] = 1
            found.append(hash_of(one_word))
            one_word[k] = 0
    replica_check._make_weights.cache_clear()
    assert [weight % 2**33 for weight in found] == [2 * k + 1 for k in range(300)]
    assert len({weight >> 33 for weight in found}) > 290  # and the upper bits follow no pattern


def test_scalars_nothing_and_opposite_signs():
    assert hash_of(torch.empty(0)) == 0
    assert hash_of(torch.tensor(1.5)) == hash_of(torch.tensor([1.5])) != hash_of(torch.tensor(-1.5))
    assert hash_of(torch.tensor([0.0, -0.0])) != hash_of(torch.tensor([-0.0, 0.0]))
    big = torch.arange(3_000_000.0)  # several chunks
    other = big.clone()
    other[[5, 2_500_000]] = big[[2_500_000, 5]]
    assert hash_of(big) != hash_of(other)


def test_one_rank_has_none_to_differ_from():
    assert find_divergent_ranks([("w", torch.ones(2))], World(0, 1, torch.device("cpu"))) is None


def compared(world: World) -> list[str | None]:
    """Return what the check says on this rank in each case."""

    def weights(odd: dict[int, float]) -> list[tuple[str, torch.Tensor]]:
        same = torch.arange(6.0).view(2, 3)
        other = same.clone()
        other[1, 2] += odd.get(world.rank, 0.0)
        last = torch.full((), float(world.rank in odd), dtype=torch.bfloat16)  # differs as well, but later
        return [("a", same), ("nothing", torch.empty(0)), ("b", other), ("c", last)]

    last = world.size - 1
    nan = torch.tensor([float("nan")])
    cases = [weights({}), [("nan", nan)], weights({last: 1e-6}), weights({0: 1.0})]
    cases.append(weights({rank: float(rank) for rank in range(world.size)}))  # no two are alike
    return [find_divergent_ranks(case, world) for case in cases]


def test_two_ranks_where_no_value_has_most():
    class Second(World):
        """The second of two ranks; what the first one has goes before."""

        def gather(self, value):
            return [first, value]

    here, one, two = Second(1, 2, torch.device("cpu")), torch.ones(3), torch.ones(3).mul(2)
    first = [hash_of(one), hash_of(two)]
    assert find_divergent_ranks([("a", one), ("b", two)], here) is None
    assert find_divergent_ranks([("a", one), ("b", one)], here) == "the weights of b on rank 1 are not those of rank 0"


@pytest.mark.slow
def test_three_ranks_by_majority():
    first, *others = on_ranks(3, compared)
    assert others == [first, first]
    assert first == [
        None,
        None,
        "the weights of b on rank 2 are not those of rank 0",
        "the weights of b on rank 0 are not those of rank 1",
        "the weights of b on ranks 1, 2 are not those of rank 0",
    ]
