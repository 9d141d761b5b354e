"""Connect all ranks to rank 0, past strangers who connect to its port too.

Rank 0 listens only until all ranks are connected, which takes a moment at the start: on its loopback interface where
all ranks are on one host, and otherwise at the address by which the others know its node. Whoever does not know the
token, which ranks get through the process group, is not let in.
"""

import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from muown_train.runtime.heartbeat.monitor import (
    ANSWER_TIMEOUT,
    LATE_AFTER,
    LOST_AFTER,
    UNWATCHED,
    HeartbeatMonitor,
    receive,
    say,
)

_STRANGER_TIMEOUT = 5.0  # seconds that a connection has to say the token
_MOST_STRANGERS = 32  # connections that have not said it


class Endpoint(NamedTuple):
    """The address where rank 0 listens, and the token that a rank says first."""

    host: str
    port: int
    token: str


def connect_heartbeat(
    rank: int,
    gather: Callable[[Any], list[Any]],
    lost_after: float = LOST_AFTER,
    late_after: float = LATE_AFTER,
    count_collectives: Callable[[], int] = lambda: 0,
) -> "HeartbeatMonitor | None":
    """Connect all ranks to rank 0; a collective call, which raises no errors of its own.

    Args:
        gather: a collective that returns the object of every rank, in order of rank.
        lost_after, late_after, count_collectives: see `HeartbeatMonitor`.

    Returns:
        The monitor of this rank; None, after a warning, if a rank cannot reach rank 0.
    """
    hosts: list[str] = gather(socket.gethostname())
    addresses: list[str | None] = gather(_resolve_master())
    server = endpoint = monitor = problem = None
    try:
        if rank == 0:
            server, host = _listen(None if len(set(hosts)) == 1 else addresses)
            endpoint = Endpoint(host, server.getsockname()[1], secrets.token_hex(8))
    except OSError as error:
        problem = f"rank 0 on {hosts[0]} cannot listen: {error}"
    endpoint = gather(endpoint)[0]
    with ExitStack() as stack:
        try:
            if endpoint and server:
                connections = Door(server, endpoint.token, len(hosts)).wait_for_ranks()
            elif endpoint:
                connections = {0: _connect(endpoint, rank)}
            if endpoint:
                for connection in connections.values():
                    stack.callback(connection.close)
                monitor = HeartbeatMonitor(rank, hosts, connections, lost_after, late_after, count_collectives)
        except OSError as error:
            place = f" at {endpoint.host}:{endpoint.port}" if endpoint else ""
            problem = f"rank {rank} on {hosts[rank]} cannot connect with the others{place}: {error}"
        if server:
            server.close()
        problem = next(filter(None, gather(problem)), None)
        if problem is None:
            stack.pop_all()
            return monitor
    if rank == 0:
        say(f"{problem}; {UNWATCHED}")
    return None


def _resolve_master() -> str | None:
    """Return the address of rank 0's node as this process sees it; None if its name cannot be resolved."""
    with suppress(OSError, UnicodeError):
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        return str(socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)[0][4][0])
    return None


def _listen(addresses: Sequence[str | None] | None) -> tuple[socket.socket, str]:
    """Return a listening socket, and the name or address by which the ranks reach it.

    Args:
        addresses: the address of rank 0's node as each rank sees it; None if all ranks are on one host.
    """
    if addresses is None:
        return socket.create_server(("127.0.0.1", 0), backlog=1024), "127.0.0.1"
    seen = {address for address in addresses[1:] if address}
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if len(seen) == 1:
        address = seen.pop()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, 0), family=family, backlog=1024), address
        except OSError as error:
            why = f"at {address}, its address for the other ranks, it cannot: {error.strerror}"
    else:
        why = f"the other ranks know it by {' and '.join(sorted(seen)) or 'no address'}"
    say(f"rank 0 listens for heartbeats on all of its network interfaces for a moment (MASTER_ADDR={master}: {why})")
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual), master


def _connect(endpoint: Endpoint, rank: int) -> socket.socket:
    connection = socket.create_connection((endpoint.host, endpoint.port), timeout=ANSWER_TIMEOUT)
    connection.sendall(f"{endpoint.token} {rank}\n".encode())
    return connection


class Door:
    """The listening socket of rank 0, until all ranks are connected.

    A stranger is whoever has not said the token and the number of a rank that has not come yet. There are a few dozen
    at a time, for some seconds each. The oldest goes when another one comes or descriptors run out, so that a true rank
    gets in.
    """

    def __init__(self, server: socket.socket, token: str, size: int) -> None:
        self._server = server
        self._expected = {f"{token} {rank}\n".encode(): rank for rank in range(1, size)}
        self._ranks: dict[int, socket.socket] = {}
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}  # when each has come, and what it has said
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def wait_for_ranks(self, within: float = ANSWER_TIMEOUT) -> dict[int, socket.socket]:
        """Return the connections of all other ranks, by rank; those of strangers are closed.

        Args:
            within: seconds for all ranks to come.

        Raises:
            TimeoutError: some have not come.
        """
        deadline = time.monotonic() + within
        try:
            while self._expected and time.monotonic() < deadline:
                for key, _ in self._selector.select(0.1):
                    source: Any = self._accept() if key.fileobj is self._server else key.fileobj
                    if source in self._strangers:
                        self._read(source)
                now = time.monotonic()
                for stranger, (since, _) in list(self._strangers.items()):
                    if len(self._strangers) > _MOST_STRANGERS or now - since > _STRANGER_TIMEOUT:
                        self._send_away(stranger)
            if self._expected:
                missing = ", ".join(map(str, sorted(self._expected.values())))
                raise TimeoutError(f"not heard of within {within:g} s: rank {missing}")
            return self._ranks
        except BaseException:
            for connection in self._ranks.values():
                connection.close()
            raise
        finally:
            for stranger in self._strangers:
                stranger.close()
            self._selector.close()

    def _accept(self) -> socket.socket | None:
        try:
            connection = self._server.accept()[0]
        except OSError:  # no descriptor is left, or whoever came has gone already
            for stranger in list(self._strangers)[:1]:
                self._send_away(stranger)
            time.sleep(0.01)
            return None
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._strangers[connection] = time.monotonic(), b""
        return connection

    def _read(self, stranger: socket.socket) -> None:
        received = receive(stranger)
        if received is None:
            return
        since, said = self._strangers[stranger]
        said += received
        rank = self._expected.pop(said, None)
        if rank is not None:
            del self._strangers[stranger]
            self._selector.unregister(stranger)
            self._ranks[rank] = stranger
        elif received and any(line.startswith(said) for line in self._expected):
            self._strangers[stranger] = since, said
        else:
            self._send_away(stranger)

    def _send_away(self, stranger: socket.socket) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        stranger.close()
