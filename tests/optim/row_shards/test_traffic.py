"""The bytes that a step sends: counted for the matrices of 500m on 4 ranks, without data and without a network."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from muown_train.models.gpt import GPT
from muown_train.optim import Muown, NorMuon, param_groups

pytestmark = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::alltoall_base_", "Meta"),
    reason="this torch has no all-to-all of tensors without data",
)
RANKS = 4


class ByteCounter(TorchDispatchMode):
    """Counts the bytes that this rank sends to others, by collective."""

    def __init__(self):
        super().__init__()
        self.sent = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here
        result = function(*args, **(kwargs or {}))
        name, rank = function._schema.name, dist.get_rank()
        if name == "c10d::alltoall_base_":
            _, given, _, _, counts = args[:5]
            self.count("all-to-all", (given.numel() - counts[rank]) * given.itemsize)
        elif name == "_c10d_functional::all_gather_into_tensor":
            self.count("all-gather", result.nbytes * (RANKS - 1) // RANKS)  # in a ring
        elif name == "_c10d_functional::reduce_scatter_tensor":
            self.count("reduce-scatter", args[0].nbytes * (RANKS - 1) // RANKS)
        elif name in ("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_", "c10d::allreduce_"):
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.count("all-reduce", sum(2 * t.nbytes * (RANKS - 1) // RANKS for t in tensors))
        elif name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(("wait_tensor", "autograd")):
            assert name == "c10d::allgather_", name  # the agreement, through the CPUs
            self.count("agreement", sum(t.nbytes for t in args[1]) * (RANKS - 1))
        return result

    def count(self, kind, sent):
        calls, total = self.sent.get(kind, (0, 0))
        self.sent[kind] = calls + 1, total + sent


def make_shards(model, mesh):
    """Return the groups of a model on the meta device with DTensors in place of its matrices."""
    groups = []
    for group in param_groups(model)[0]:
        params = []
        for name, p in group["params"]:
            rows = -(-p.shape[0] // RANKS)
            low = min(dist.get_rank() * rows, p.shape[0])
            local = torch.empty(min(rows, p.shape[0] - low), p.shape[1], device="meta")
            shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
            shard = nn.Parameter(shard)
            shard.grad = shard.detach().clone()
            params.append((name, shard))
        groups.append(group | {"params": params})
    return groups


def make_model(layers):
    with torch.device("meta"):
        return GPT(vocab_size=50280, layers=layers, dim=1280, heads=20, seq_len=1024)


def count_bytes(make, layers, ranks=range(RANKS)):
    """Return what ranks send in the second step of an optimizer of the matrices of some layers of 500m."""
    counts = []
    for rank in ranks:
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        try:
            groups = make_shards(make_model(layers), init_device_mesh("cpu", (RANKS,)))
            optimizer = make(groups)
            optimizer.step()
            with ByteCounter() as counter:
                optimizer.step()
            counts.append(counter.sent)
        finally:
            dist.destroy_process_group()
    return counts


def sum_bytes(counts):
    """Return the most that a rank sends, in all collectives but the agreement, and the number of collectives."""
    rows = [[value for kind, value in own.items() if kind != "agreement"] for own in counts]
    return max(sum(sent for _, sent in own) for own in rows), max(sum(calls for calls, _ in own) for own in rows)


@pytest.fixture(autouse=True)
def no_products(monkeypatch):
    """Leave out the products, which take seconds on the meta device too."""
    monkeypatch.setattr("muown_train.optim.core.matrix.orthogonalize", lambda X, group: X)


def make_muown(groups):
    return Muown(groups, lr=0.1, ns_dtype="bfloat16")


@pytest.mark.parametrize("layers", [4, pytest.param(22, marks=pytest.mark.slow)])
def test_a_step_sends_about_half_of_what_gathering_all_matrices_would(layers):
    counts = count_bytes(make_muown, layers)
    sent, calls = sum_bytes(counts)
    elements = sum(p.numel() for group in param_groups(make_model(layers))[0] for _, p in group["params"])
    gathered = 2 * elements * (RANKS - 1) // RANKS  # in a ring, if all ranks get X of all matrices in bfloat16
    assert calls == 6  # X and O, of each shape
    assert all(own["agreement"] == (1, 16 * (RANKS - 1)) for own in counts)
    assert sent < 0.51 * gathered  # 22 layers do not divide evenly
    # dion's way: an all-to-all each way of stacks with one matrix for each rank, filled up with matrices of zeros. A
    # rank sends its rows but for those of its own matrix, and the result but for its own rows.
    dion = sum(
        2 * 2 * -(-count * layers // RANKS) * (RANKS - 1) * m * n // RANKS
        for count, m, n in ((4, 1280, 1280), (1, 7168, 1280), (1, 1280, 3584))
    )
    assert sent <= dion
    megabytes = [round(own["all-to-all"][1] / 1e6) for own in counts]
    print(f"{layers} layers: ranks send {megabytes} MB, dion's {dion / 1e6:.0f}, all-gather {gathered / 1e6:.0f}")


def test_an_all_reduce_of_two_numbers_for_each_matrix_is_all_that_normuon_adds():
    counts = count_bytes(lambda groups: NorMuon(groups, lr=0.1, ns_dtype="bfloat16"), 4, ranks=[1])
    blocks = 4 * 6  # q, k, v, the projections of attention, and the two matrices of the MLP
    calls, sent = counts[0]["all-reduce"]  # of several matrices together
    assert calls < blocks and sent == blocks * 2 * 8 * (RANKS - 1) // RANKS


@pytest.mark.slow
def test_torch_sends_sixteen_times_as_much_in_hundreds_of_collectives():
    ours, our_calls = sum_bytes(count_bytes(make_muown, 22, ranks=[2]))
    muon = count_bytes(lambda groups: torch.optim.Muon([{"params": g["params"]} for g in groups], lr=0.1), 22, [1])
    theirs, their_calls = sum_bytes(muon)
    assert theirs > 15 * ours and their_calls > 200 * our_calls
    print(f"torch sends {theirs / 1e6:.0f} MB in {their_calls} collectives")
