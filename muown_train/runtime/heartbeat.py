"""Tells that a rank is gone, also where the main thread is stuck in a collective that waits for it.

A thread of each rank keeps one connection to rank 0 and sends a line over it now and then. A process that ends closes
its connection, however it ends; a node that vanishes, or a process that is halted, falls silent. Rank 0 tells the
others, and each ends its process with the reason as its first words on stderr and exit status 1: the main thread may
not be able to. Before a rank leaves on purpose it says so: "bye" at a clean end, "failed" on its way out with an error
of its own, which the others then have some seconds to say as well.
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

LOST_AFTER = 60.0  # seconds of silence
FAILED_GRACE = 10.0  # seconds from a rank's "failed" to the end of the others
_ANSWER = 15.0  # seconds to connect, or until it is known who is lost once a collective has failed
_LONGEST = 1000  # bytes of a line
# what gloo and NCCL say when a peer went (not their time-outs: then a peer is late, not gone)
_BROKEN = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused"),
    *("remote process exited", "ncclRemoteError"),
)


def explained_loss(error: BaseException) -> str | None:
    """One sentence where a collective failed because another rank's process went; None for any other error."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _BROKEN):
        return f"another rank is lost: {str(error).splitlines()[0]}; the same command goes on from the last checkpoint"
    return None


class Meeting(NamedTuple):
    """Where the ranks meet, as rank 0 has told all."""

    host: str
    port: int
    token: str  # keeps strangers out


@dataclass
class _Line:
    """A connection; `rank` of the other side is None until it has said who it is."""

    rank: int | None
    unread: bytes = b""


def watch(rank: int, gather: Callable[[Any], list[Any]], lost_after: float = LOST_AFTER) -> "Liveness | None":
    """Connect the ranks; each calls it.

    Args:
        gather: collective; the object of every rank, in order of rank.

    Returns:
        The watch of this rank; None, and a warning, if one of them cannot reach rank 0.
    """
    end: socket.socket | None = None
    meeting = problem = None
    if rank == 0:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")  # of rank 0's node, by a name that all can resolve
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        end = socket.create_server(("", 0), family=family, backlog=1024)
        meeting = Meeting(host, end.getsockname()[1], secrets.token_hex(8))
    hosts, meetings = zip(*gather((socket.gethostname(), meeting)), strict=True)
    meeting = meetings[0]
    if rank > 0:
        try:
            end = socket.create_connection((meeting.host, meeting.port), timeout=_ANSWER)
            end.sendall(f"{meeting.token} {rank}\n".encode())
        except OSError as error:
            problem = f"rank {rank} on {hosts[rank]} cannot reach rank 0 at {meeting.host}:{meeting.port}: {error}"
    problem = next(filter(None, gather(problem)), None)
    if problem is None and end:
        return Liveness(rank, hosts, end, meeting.token, lost_after)
    if rank == 0:
        os.write(2, f"{problem}; if a rank is lost, only the time-out of a collective will tell\n".encode())
    if end:
        end.close()
    return None


class Liveness:
    """The watch of one rank over the others, as a context around all that the ranks do together; see `watch`.

    Args:
        rank, hosts: this rank, and the name of every rank's host.
        end: rank 0's listening socket, or another's connection to it.
        token: what a rank says first.
        lost_after: seconds of silence after which a rank is lost.
    """

    def __init__(
        self, rank: int, hosts: tuple[str, ...], end: socket.socket, token: str, lost_after: float = LOST_AFTER
    ) -> None:
        self.rank, self.hosts, self.lost_after = rank, hosts, lost_after
        self.update = 0  # how many are done, for the message; set by whoever trains
        self._end, self._token, self._every = end, token, min(lost_after / 10, 5.0)
        self._parting: str | None = None  # what this rank says as it leaves
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._lines: dict[socket.socket, _Line] = {}
        # time of the last sign of life of those that have not said goodbye; rank 0 watches all, the others rank 0
        self._heard = dict.fromkeys(range(1, len(hosts)) if rank == 0 else [0], time.monotonic())
        self._failed: dict[int, float] = {}  # when it said so
        end.setblocking(False)
        for source in (end, self._woken):
            self._selector.register(source, selectors.EVENT_READ)
        if rank > 0:
            self._lines[end] = _Line(rank=0)
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)

    def __enter__(self) -> "Liveness":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and explained_loss(error):
            self._thread.join(_ANSWER)  # it learns which one, says so and ends the process
        self.close(failed=error is not None)

    def close(self, failed: bool = False) -> None:
        """Leave; rank 0 leaves as the last, unless it failed."""
        self._parting = "failed" if failed else "bye"
        self._wake.send(b".")
        self._thread.join()
        deadline = time.monotonic() + 1
        for connection in self._lines:
            # words that are not read would make the system reset the connection, and so take back our last ones
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                while connection.recv(4096):
                    pass
        for source in (*self._lines, self._end, self._wake, self._woken):
            source.close()
        self._selector.close()

    # all that follows runs in the thread

    def _watch(self) -> None:
        beaten, looked = 0.0, time.monotonic()
        while True:
            for key, _ in self._selector.select(self._every):
                self._take(key.fileobj)
            if self._parting and self._may_leave():
                return self._send(self._parting)
            now = time.monotonic()
            if now - looked > self.lost_after / 2:  # this process was halted, as all may have been: nobody is late yet
                self._heard = dict.fromkeys(self._heard, now)
            looked = now
            if now - beaten >= self._every:
                beaten = now
                self._send("alive")
            # after all has been read that came while this process itself may have been halted
            for rank, heard in self._heard.items():
                if rank in self._failed:
                    if now - self._failed[rank] > FAILED_GRACE:
                        self._lost(rank, "it failed")
                elif now - heard > self.lost_after:
                    self._lost(rank, f"no sign of life for {self.lost_after:g} s")

    def _may_leave(self) -> bool:
        if self.rank > 0:
            return True
        # all said who they are before `watch` returned, but that may be unread; who is not known hears nothing
        known = {line.rank for line in self._lines.values()}
        return not self._heard or (self._parting == "failed" and known >= set(self._heard))

    def _take(self, source: Any) -> None:
        """Take up a call of the main thread, a new connection, or what has come over one."""
        if source is self._woken:
            self._woken.recv(16)
        elif source not in self._lines:
            with suppress(OSError):
                connection = self._end.accept()[0]
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ)
                self._lines[connection] = _Line(rank=None)
        else:
            self._read(source, self._lines[source])

    def _read(self, connection: socket.socket, line: _Line) -> None:
        try:
            received = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        *complete, line.unread = (line.unread + received).split(b"\n")
        for words in complete:
            self._hear(line, words.decode(errors="replace").split(" ", 2))
        if received and len(line.unread) < _LONGEST:
            return
        self._selector.unregister(connection)
        connection.close()
        if line.rank in self._heard and line.rank not in self._failed:
            self._lost(line.rank, "its process has ended")

    def _hear(self, line: _Line, words: list[str]) -> None:
        if line.rank is None:  # whoever does not know the token is not heard
            if words[0] == self._token:
                line.rank = int(words[1])
        elif words == ["bye"]:
            self._heard.pop(line.rank, None)
        elif words == ["failed"]:
            self._failed[line.rank] = time.monotonic()
        elif words[0] == "lost":
            self._lost(int(words[1]), words[2])
        if line.rank in self._heard:
            self._heard[line.rank] = time.monotonic()

    def _send(self, words: str) -> None:
        for connection, line in self._lines.items():
            if line.rank is not None:
                with suppress(OSError):  # its end is noticed where it is read, its silence by the clock
                    connection.send(f"{words}\n".encode())

    def _lost(self, rank: int, why: str) -> NoReturn:
        """Say which rank is lost, tell the others where this is rank 0, and end this process."""
        message = f"rank {rank} on {self.hosts[rank]} is lost: {why} (after update {self.update:,}); "
        os.write(2, f"{message}the same command goes on from the last checkpoint\n".encode())
        if self.rank == 0:
            self._send(f"lost {rank} {why}")
            time.sleep(0.5)  # so that they have read it before this end of the connection goes
        os._exit(1)
