"""Heartbeats between ranks: when one is lost, the others end with its name instead of waiting in a collective.

A thread of each rank keeps one connection to rank 0 and sends a line over it now and then. A process that ends closes
its connection, however it ends; a node that vanishes, or a process that is halted, falls silent. Rank 0 tells the
others. Each of them then ends its process with exit status 1 and the reason as its first words on stderr, since its
main thread may be stuck. A rank that leaves on purpose says so first: "bye" at a clean end, or "failed" on its way out
with an error of its own, after which the others have some seconds to report errors of theirs.

These connections are our own, and not keys in the process group's TCPStore, for three reasons (tried with torch 2.13).
The store tells nobody that another client's connection has closed, so that a rank that is killed would be found only
by its silence, after a minute. When rank 0, which hosts the store, is halted, a client's call waits without a time-out.
And when rank 0 ends, the store's clients print stack traces before anything that explains them.

If all ranks are on one host, rank 0 listens on its loopback interface alone; otherwise on all interfaces, where whoever
does not know the token, which ranks get through the process group, is not heard.
"""

import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

LOST_AFTER = 60.0  # seconds of silence after which a rank is lost
FAILED_GRACE = 10.0  # seconds from a rank's "failed" to the end of the others
_ANSWER_TIMEOUT = 15.0  # seconds to connect, or to learn which rank is lost once a collective has failed
_LONGEST_LINE = 1000  # bytes
_RESUME = "the same command goes on from the last checkpoint"
# words of gloo and NCCL for a peer that has gone (their time-outs are left out: then a peer is late, not gone)
_BROKEN = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused"),
    *("remote process exited", "ncclRemoteError"),
)


def explain_lost_rank(error: BaseException) -> str | None:
    """Return one sentence if a collective failed because another rank's process has gone; None for other errors."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _BROKEN):
        return f"another rank is lost: {str(error).splitlines()[0]}; {_RESUME}"
    return None


class Endpoint(NamedTuple):
    """The address where rank 0 listens, and the token that a rank says first."""

    host: str
    port: int
    token: str


@dataclass
class _Peer:
    """The other side of a connection; `rank` is None until it has said who it is."""

    rank: int | None
    unread: bytes = b""


def connect_heartbeat(
    rank: int, gather: Callable[[Any], list[Any]], lost_after: float = LOST_AFTER
) -> "HeartbeatMonitor | None":
    """Connect all ranks to rank 0; a collective call.

    Args:
        gather: a collective that returns the object of every rank, in order of rank.

    Returns:
        The monitor of this rank; None, after a warning, if a rank cannot reach rank 0.
    """
    hosts: list[str] = gather(socket.gethostname())
    connection: socket.socket | None = None
    endpoint = problem = None
    if rank == 0:
        alone = len(set(hosts)) == 1
        # MASTER_ADDR is rank 0's node, by a name that all nodes can resolve
        host = "127.0.0.1" if alone else os.environ.get("MASTER_ADDR", "127.0.0.1")
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        connection = socket.create_server((host if alone else "", 0), family=family, backlog=1024)
        endpoint = Endpoint(host, connection.getsockname()[1], secrets.token_hex(8))
    endpoint = gather(endpoint)[0]
    if rank > 0:
        try:
            connection = socket.create_connection((endpoint.host, endpoint.port), timeout=_ANSWER_TIMEOUT)
            connection.sendall(f"{endpoint.token} {rank}\n".encode())
        except OSError as error:
            problem = f"rank {rank} on {hosts[rank]} cannot reach rank 0 at {endpoint.host}:{endpoint.port}: {error}"
    problem = next(filter(None, gather(problem)), None)
    if problem is None and connection:
        return HeartbeatMonitor(rank, hosts, connection, endpoint.token, lost_after)
    if rank == 0:
        os.write(2, f"{problem}; if a rank is lost, only the time-out of a collective will tell\n".encode())
    if connection:
        connection.close()
    return None


class HeartbeatMonitor:
    """The watch of one rank over the others, as a context around all that the ranks do together.

    Args:
        rank, hosts: this rank, and the name of every rank's host.
        connection: the listening socket of rank 0, or another rank's connection to it.
        token: what a rank says first.
        lost_after: seconds of silence after which a rank is lost.
    """

    def __init__(
        self, rank: int, hosts: list[str], connection: socket.socket, token: str, lost_after: float = LOST_AFTER
    ) -> None:
        self.rank, self.hosts, self.lost_after = rank, hosts, lost_after
        self.step = 0  # the last step that is done, for the message; World.record_step sets it
        self._connection, self._token, self._interval = connection, token, min(lost_after / 10, 5.0)
        self._last_word: str | None = None  # set when this rank leaves: "bye" or "failed"
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, _Peer] = {}
        # when each rank that has not said goodbye was last heard; rank 0 watches all others, and they watch rank 0
        self._last_heard = dict.fromkeys(range(1, len(hosts)) if rank == 0 else [0], time.monotonic())
        self._failed_at: dict[int, float] = {}  # when a rank said that it failed
        connection.setblocking(False)
        for source in (connection, self._wake_receiver):
            self._selector.register(source, selectors.EVENT_READ)
        if rank > 0:
            self._peers[connection] = _Peer(rank=0)
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> "HeartbeatMonitor":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and explain_lost_rank(error):
            self._thread.join(_ANSWER_TIMEOUT)  # the thread learns which rank is lost, says so and ends the process
        self.close(failed=error is not None)

    def close(self, failed: bool = False) -> None:
        """Say goodbye and leave; rank 0 is the last to leave, unless it failed."""
        self._last_word = "failed" if failed else "bye"
        self._wake_sender.send(b".")
        self._thread.join()
        deadline = time.monotonic() + 1
        for connection in self._peers:
            # unread input would make the system reset the connection and discard our last words, so it is read
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                while connection.recv(4096):
                    pass
        for source in (*self._peers, self._connection, self._wake_sender, self._wake_receiver):
            source.close()
        self._selector.close()

    # all methods below run in the thread

    def _watch(self) -> None:
        last_beat, last_look = 0.0, time.monotonic()
        while True:
            for key, _ in self._selector.select(self._interval):
                self._receive(key.fileobj)
            if self._last_word and self._may_leave():
                return self._send(self._last_word)
            now = time.monotonic()
            if now - last_look > self.lost_after / 2:  # this process was halted; so may others, and none counts as late
                self._last_heard = dict.fromkeys(self._last_heard, now)
            last_look = now
            if now - last_beat >= self._interval:
                last_beat = now
                self._send("alive")
            # silence is judged here, after reading all that arrived while this process itself may have been halted
            for rank, heard in self._last_heard.items():
                if rank in self._failed_at:
                    if now - self._failed_at[rank] > FAILED_GRACE:
                        self._end_process(rank, "it failed")
                elif now - heard > self.lost_after:
                    self._end_process(rank, f"no sign of life for {self.lost_after:g} s")

    def _may_leave(self) -> bool:
        if self.rank > 0:
            return True
        # every rank sent its name before the monitor was made, but it may be unread; a peer without name hears nothing
        known = {peer.rank for peer in self._peers.values()}
        return not self._last_heard or (self._last_word == "failed" and known >= set(self._last_heard))

    def _receive(self, source: Any) -> None:
        """Handle a call of the main thread, a new connection, or input of a connection."""
        if source is self._wake_receiver:
            self._wake_receiver.recv(16)
        elif source in self._peers:
            self._read(source, self._peers[source])
        else:
            with suppress(OSError):
                connection = self._connection.accept()[0]
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ)
                self._peers[connection] = _Peer(rank=None)

    def _read(self, connection: socket.socket, peer: _Peer) -> None:
        try:
            received = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        *lines, peer.unread = (peer.unread + received).split(b"\n")
        for line in lines:
            self._handle_line(peer, line.decode(errors="replace").split(" ", 2))
        if received and len(peer.unread) < _LONGEST_LINE:
            return
        self._selector.unregister(connection)
        connection.close()
        if peer.rank in self._last_heard and peer.rank not in self._failed_at:
            self._end_process(peer.rank, "its process has ended")

    def _handle_line(self, peer: _Peer, words: list[str]) -> None:
        if peer.rank is None:
            if words[0] == self._token:  # a stranger, who does not know it, is ignored
                peer.rank = int(words[1])
        elif words == ["bye"]:
            self._last_heard.pop(peer.rank, None)
        elif words == ["failed"]:
            self._failed_at[peer.rank] = time.monotonic()
        elif words[0] == "lost":
            self._end_process(int(words[1]), words[2])
        if peer.rank in self._last_heard:
            self._last_heard[peer.rank] = time.monotonic()

    def _send(self, words: str) -> None:
        for connection, peer in self._peers.items():
            if peer.rank is not None:
                with suppress(OSError):  # a connection that has ended is noticed on reading, a silent one by the clock
                    connection.send(f"{words}\n".encode())

    def _end_process(self, lost_rank: int, why: str) -> NoReturn:
        """Say which rank is lost, tell the others if this is rank 0, and end this process."""
        message = f"rank {lost_rank} on {self.hosts[lost_rank]} is lost: {why} (after step {self.step:,}); {_RESUME}\n"
        os.write(2, message.encode())
        if self.rank == 0:
            self._send(f"lost {lost_rank} {why}")
            time.sleep(0.5)  # the others read the message before this end of the connection closes
        os._exit(1)
