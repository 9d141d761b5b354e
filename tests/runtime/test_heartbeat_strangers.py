"""Strangers at the port where rank 0 waits for the others, and where it listens."""

import errno
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from typing import Any

import pytest

from muown_train.runtime.heartbeat import connect
from muown_train.runtime.heartbeat.connect import Door, connect_heartbeat
from tests.runtime.test_heartbeat import leave_together

TOKEN = "0123456789abcdef"


@contextmanager
def a_door(size: int = 3, within: float = 20) -> Iterator[tuple[Any, Any]]:
    """A door in a thread: what opens a connection to it, and its future result. Connections end with the context."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        future = pool.submit(Door(server, TOKEN, size).wait_for_ranks, within)

        def knock(said: bytes = b"") -> socket.socket:
            connection = stack.enter_context(socket.create_connection(server.getsockname(), timeout=20))
            connection.sendall(said)
            return connection

        yield knock, future


def come(rank: int) -> bytes:
    return f"{TOKEN} {rank}\n".encode()


def check_ranks(future, *connections):
    """Check that the door let in these connections, in order of rank, and no other."""
    found = future.result(20)
    try:
        assert {rank: found[rank].getpeername() for rank in found} == {
            i + 1: connection.getsockname() for i, connection in enumerate(connections)
        }
    finally:
        for connection in found.values():
            connection.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\x00\xfe\n",
        b"x" * 1_000_000,  # a huge line
        b"\n" * 1000,
        b"0123456789abcdee 1\n",  # another token
        *(f"{TOKEN} {rank}\n".encode() for rank in ("99", "abc", "0", "-1", "01", "", "1 1", "9" * 50)),
        f"{TOKEN}\n".encode(),
        come(1) + b"lost rank 1 by my word\n",
        b"failed by my word\n" + come(1),
    ],
    ids=lambda said: repr(said[:30]),
)
def test_who_says_something_else_is_sent_away_at_once(said):
    with a_door() as (knock, future):
        stranger = knock()
        with suppress(ConnectionError):
            stranger.sendall(said)
            assert stranger.recv(10) == b""
        check_ranks(future, knock(come(1)), knock(come(2)))


def test_who_is_silent_slow_or_says_half_is_sent_away_after_a_while(monkeypatch):
    monkeypatch.setattr(connect, "_STRANGER_TIMEOUT", 0.2)
    with a_door() as (knock, future):
        silent, half, slow = knock(), knock(come(1)[:9]), knock()
        first = knock(come(1))
        for byte in come(2)[:5]:
            time.sleep(0.06)
            try:
                slow.sendall(bytes([byte]))
            except ConnectionError:
                break
        for stranger in (silent, half, slow):
            with suppress(ConnectionError):
                assert stranger.recv(10) == b""
        check_ranks(future, first, knock(come(2)))


def test_a_rank_comes_once_and_may_speak_slowly():
    with a_door() as (knock, future):
        first = knock()
        for byte in come(1):
            first.sendall(bytes([byte]))
        time.sleep(0.05)
        again = knock(come(1))
        assert again.recv(10) == b""
        check_ranks(future, first, knock(come(2)))


def test_who_goes_or_resets_at_once_does_not_matter():
    with a_door() as (knock, future):
        for said in (b"", TOKEN.encode(), come(9)):
            knock(said).close()
            reset = knock(said)
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            reset.close()
        check_ranks(future, knock(come(1)), knock(come(2)))


def test_of_many_strangers_the_oldest_go():
    with a_door() as (knock, future):
        silent = [knock() for _ in range(3 * connect._MOST_STRANGERS)]
        assert silent[0].recv(10) == b""
        check_ranks(future, knock(come(1)), knock(come(2)))


def test_without_descriptors_the_door_waits(monkeypatch):
    accept, tries = socket.socket.accept, []

    def fail_often(server):
        tries.append(None)
        if len(tries) < 5:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(server)

    monkeypatch.setattr(socket.socket, "accept", fail_often)
    with a_door() as (knock, future):
        check_ranks(future, knock(come(1)), knock(come(2)))


def test_ranks_that_do_not_come_are_named():
    with a_door(size=4, within=0.3) as (knock, future):
        knock(come(2))
        with pytest.raises(TimeoutError, match=r"not heard of within 0\.3 s: rank 1, 3"):
            future.result()


def _open_door(port: Any, results: Any) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port.send(server.getsockname()[1])
    results.send(sorted(Door(server, TOKEN, 3).wait_for_ranks(60)))


@pytest.mark.slow
def test_of_1100_silent_strangers_none_keeps_a_rank_out():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_open_door, args=(sender, sender), daemon=True)
    process.start()
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        stack.callback(process.kill)
        address = "127.0.0.1", receiver.recv()
        for i in range(1102):
            connection = stack.enter_context(socket.create_connection(address, timeout=20))
            if i in (600, 1101):
                connection.sendall(come(1 if i == 600 else 2))
        assert receiver.recv() == [1, 2]


def on_threads(monkeypatch, hosts, **environment):
    """Connect ranks in threads of this process, on hosts of these names; their monitors."""
    names = threading.local()
    given: list[Any] = [None] * len(hosts)
    barrier = threading.Barrier(len(hosts))
    monkeypatch.setattr(socket, "gethostname", lambda: hosts[names.rank])
    for key, value in environment.items():
        monkeypatch.setenv(key, value)

    def connect_rank(rank):
        def gather(value):
            given[rank] = value
            barrier.wait(20)
            found = list(given)
            barrier.wait(20)
            return found

        names.rank = rank
        return connect_heartbeat(rank, gather)

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(connect_rank, range(len(hosts))))


def start_and_leave(monitors):
    for monitor in monitors:
        monitor.__enter__()
    leave_together(monitors)


@pytest.fixture
def servers(monkeypatch):
    """The listening sockets that are made."""
    made, create = [], socket.create_server

    def create_server(*args, **kwargs):
        made.append(create(*args, **kwargs))
        addresses.append(made[-1].getsockname()[:2])
        return made[-1]

    addresses: list[Any] = []
    monkeypatch.setattr(socket, "create_server", create_server)
    return addresses


@pytest.mark.parametrize(
    "hosts, master, interface, says",
    [
        (["a", "a", "a"], "192.0.2.1", "127.0.0.1", ""),  # one host: its loopback interface
        (["a", "b", "c"], "127.0.0.1", "127.0.0.1", ""),  # several: the address by which they know rank 0
        (["a", "b", "c"], "localhost", "127.0.0.1", ""),
    ],
)
def test_rank_0_listens_on_one_interface_until_all_have_come(
    monkeypatch, capfd, servers, hosts, master, interface, says
):
    monitors = on_threads(monkeypatch, hosts, MASTER_ADDR=master)
    ((host, port),) = servers
    assert host == interface and capfd.readouterr().err == says
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))
    start_and_leave(monitors)


def test_where_the_address_is_not_rank_0s_own_it_listens_on_all_interfaces_and_says_so(monkeypatch, capfd, servers):
    resolve = connect._resolve_master
    monkeypatch.setattr(connect, "_resolve_master", lambda: resolve() and "192.0.2.1")  # reserved for documentation
    monitors = on_threads(monkeypatch, ["a", "b"], MASTER_ADDR="localhost")
    assert servers[0][0] in ("::", "0.0.0.0")
    assert (
        "rank 0 listens for heartbeats on all of its network interfaces for a moment (MASTER_ADDR=localhost: at 192"
        in (capfd.readouterr().err)
    )
    start_and_leave(monitors)


@pytest.mark.parametrize("name", ["create_server", "create_connection", "socketpair"])
def test_a_heartbeat_that_cannot_be_set_up_is_a_warning(monkeypatch, capfd, name):
    def fail(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, name, fail)
    monkeypatch.setattr(connect, "ANSWER_TIMEOUT", 0.2)
    monkeypatch.setattr(Door.wait_for_ranks, "__defaults__", (0.2,))
    assert on_threads(monkeypatch, ["a", "a"]) == [None, None]
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.endswith("only the time-out of a collective will tell\n")
