"""The network that NCCL's log names, and errors of ranks that do not reach one another."""

import os
from pathlib import Path

import pytest

from muown_train.runtime import network
from muown_train.runtime.network import NcclNetwork, log_nccl, parse_nccl_log, read_nccl_network, translate_error

# lines as NCCL 2.27 writes them on the first of two nodes with four GPUs each
LOG = """\
n1:4711:4711 [0] NCCL INFO cudaDriverVersion 12080
n1:4711:4711 [0] NCCL INFO Bootstrap: Using hsn0:10.0.0.1<0>
n1:4711:4790 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
{net}
n1:4711:4790 [0] NCCL INFO Using network {name}
n1:4711:4790 [0] NCCL INFO ncclCommInitRankConfig comm 0x5566 rank 0 nranks 8 cudaDev 0 busId 901000 - Init START
n1:4711:4790 [0] NCCL INFO comm 0x5566 rank 0 nRanks 8 nNodes {nodes} localRanks 4 localRank 0 MNNVL 0
n1:4711:4790 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
"""
NETS = {
    "IB": "n1:4711:4790 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB hsn0:10.0.0.1<0>",
    "Socket": "n1:4711:4790 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.0.0.1<0>",
    "AWS Libfabric": "n1:4711:4790 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)",
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_what_a_log_names(name, nodes):
    found = parse_nccl_log(LOG.format(name=name, net=NETS[name], nodes=nodes))
    assert found == NcclNetwork(name, nodes) and found.is_slow == (name == "Socket" and nodes == 2)


def test_logs_that_say_less():
    early = "n1:5:5 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\nn1:5:5 [0] NCCL INFO Using network Socket\n"
    assert parse_nccl_log(early) == NcclNetwork("Socket", None) and not parse_nccl_log(early).is_slow
    assert parse_nccl_log("") is None and parse_nccl_log("NCCL version 2.27.5+cuda12.9\n") is None


@pytest.fixture
def variables(monkeypatch):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")  # so that the values of the test go after it
        monkeypatch.delenv(name)
    monkeypatch.setattr(network, "_own_log", None)
    return monkeypatch


def test_a_log_of_our_own_is_read_and_removed(variables):
    log_nccl()
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT")
    file = Path(os.environ["NCCL_DEBUG_FILE"])
    file.write_text(LOG.format(name="IB", net=NETS["IB"], nodes=2))
    assert read_nccl_network() == NcclNetwork("IB", 2) and not file.exists()
    assert read_nccl_network() is None


def test_the_log_that_a_user_asks_for_is_left_as_it_is(variables, tmp_path):
    variables.setenv("NCCL_DEBUG", "INFO")
    log_nccl()
    assert "NCCL_DEBUG_FILE" not in os.environ and read_nccl_network() is None
    variables.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/log.%p")
    file = tmp_path / f"log.{os.getpid()}"
    file.write_text(LOG.format(name="Socket", net=NETS["Socket"], nodes=2))
    assert read_nccl_network() == NcclNetwork("Socket", 2) and file.exists()


@pytest.mark.parametrize(
    ("text", "kind", "part"),
    [
        # as torch 2.13 says it in two network namespaces whose host names do not resolve
        (
            "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out "
            "connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:16297$0",
            ConnectionError,
            "set GLOO_SOCKET_IFNAME to the network interface between nodes, such as eth0 or hsn0",
        ),
        (
            "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. "
            "Unable to find address for: nosuch",
            ValueError,
            "GLOO_SOCKET_IFNAME=nosuch must be a network interface with an address",
        ),
        (
            "NCCL error in: NCCLUtils.cpp:77, invalid usage\nncclInvalidUsage: This usually reflects invalid usage of "
            "NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            ValueError,
            "two ranks have the same GPU",
        ),
    ],
    ids=["names", "interface", "same GPU"],
)
def test_ranks_that_do_not_reach_one_another(monkeypatch, text, kind, part):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    error = translate_error(RuntimeError(text))
    assert type(error) is kind and part in str(error) and "\n" not in str(error)


def test_other_errors_stay():
    assert translate_error(RuntimeError("Connection reset by peer")) is None
