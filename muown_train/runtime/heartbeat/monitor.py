"""Heartbeats between ranks: when one is lost, fails or hangs, the others end with its name instead of waiting for it.

A thread of each rank keeps one connection to rank 0 and sends a line over it now and then. A process that ends closes
its connection, however it ends; a node that vanishes, or a process that is halted, falls silent. A rank that leaves on
purpose says so first: "bye" at a clean end, or "failed" with its error, after which the others have some seconds to
report errors of theirs. A rank that hangs stays alive, but launches no more collectives, which the others do: each line
carries their number. Rank 0 tells the others. Each of them then says the reason as its first words on stderr and ends
its process with exit status 1, also where its main thread is stuck.

These connections are our own, and not keys in the process group's TCPStore, for three reasons (tried with torch 2.13).
The store tells nobody that another client's connection has closed, so that a rank that is killed would be found only
by its silence, after a minute. When rank 0, which hosts the store, is halted, a client's call waits without a time-out.
And when rank 0 ends, the store's clients print stack traces before anything that explains them.
"""

import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from muown_train.runtime.formatting import escape_controls
from muown_train.runtime.heartbeat.explain import RESUME, describe_error, explain_lost_rank

LOST_AFTER = 60.0  # seconds of silence after which a rank is lost
LATE_AFTER = 1800.0  # seconds that ranks wait for one that is alive; it may compile, evaluate, or wait for data
FAILED_GRACE = 10.0  # seconds from a rank's "failed" to the end of the others
ANSWER_TIMEOUT = 15.0  # seconds to connect, or to learn which rank is lost once a collective has failed
UNWATCHED = "if a rank is lost, only the time-out of a collective will tell"
_LEAVE_WITHIN = 30.0  # seconds that the main thread has to end what it has begun, once it knows which rank is lost
_LONGEST_LINE = 16_000  # bytes
_PACKAGE = Path(__file__).parents[2]


class Beat(NamedTuple):
    """What a rank says of itself: steps done, collectives launched, and the place of its main thread in the code."""

    step: int = 0
    collectives: int = 0
    place: str = ""


_NO_BEAT = Beat()


@dataclass
class _Peer:
    """Another rank, and what it has said."""

    rank: int
    unread: bytes = b""
    beat: Beat = _NO_BEAT


class HeartbeatMonitor:
    """The watch of one rank over the others, as a context around all that the ranks do together.

    Args:
        rank, hosts: this rank, and the name of every rank's host.
        connections: by rank, those of rank 0 to all others, or the one of another rank to rank 0.
        lost_after: seconds of silence after which a rank is lost.
        late_after: seconds that others may wait for a rank that has launched fewer collectives.
        count_collectives: returns how many collectives this rank has launched; the thread calls it.

    Raises:
        OSError: no descriptors are left.
    """

    def __init__(
        self,
        rank: int,
        hosts: list[str],
        connections: dict[int, socket.socket],
        lost_after: float = LOST_AFTER,
        late_after: float = LATE_AFTER,
        count_collectives: Callable[[], int] = lambda: 0,
    ) -> None:
        self.rank, self.hosts, self.lost_after, self.late_after = rank, hosts, lost_after, late_after
        self.step = 0  # the last step that is done, for the message; World.record_step sets it
        self.verdict: str | None = None  # why this process ends because of another rank
        self.on_verdict: Callable[[str], None] | None = None  # keeps the verdict; the thread calls it
        self._count_collectives, self._interval = count_collectives, min(lost_after / 10, 5.0)
        self._watched_thread = threading.get_ident()
        self._last_word: str | None = None  # set when this rank leaves: "bye", or "failed" and its error
        self._is_asked = False  # whether the main thread waits for the verdict
        self._has_answered = threading.Event()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._peers = {connection: _Peer(peer) for peer, connection in connections.items()}
        # when each rank that has not said goodbye was last heard; rank 0 watches all others, and they watch rank 0
        self._last_heard = dict.fromkeys(connections, time.monotonic())
        self._failed: dict[int, tuple[float, str]] = {}  # when a rank said that it failed, and its error
        self._behind: dict[tuple[int, int], float] = {}  # since when a rank at a number of collectives is behind others
        for source in (*self._peers, self._wake_receiver):
            source.setblocking(False)
            self._selector.register(source, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._watch_safely, name="heartbeat", daemon=True)

    def __enter__(self) -> "HeartbeatMonitor":
        try:
            self._thread.start()
        except RuntimeError as error:  # the machine gives the process no more threads
            self._give_up(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.explain(error)
        if self.verdict:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # nobody reads it any more
                    stream.flush()
            self._end_process()
        is_clean = error is None or (isinstance(error, SystemExit) and not error.code)
        self.close(None if is_clean else error)

    def explain(self, error: BaseException) -> str | None:
        """Return which rank made a collective fail with this error, and why; None for other errors.

        Rank 0 may have to tell, for which there are some seconds. Then the main thread ends what it has begun, and
        leaves the context, which ends the process.
        """
        explanation = explain_lost_rank(error)
        if explanation and self._thread.is_alive():
            self._is_asked = True
            self._wake()
            self._has_answered.wait(ANSWER_TIMEOUT)
        return explanation and (self.verdict or explanation)

    def close(self, error: BaseException | None = None) -> None:
        """Say goodbye, or the error that ends this rank, and leave; rank 0 is the last to leave, unless it failed."""
        self._last_word = f"failed {describe_error(error)}" if error else "bye"
        if self._thread.is_alive():
            self._wake()
            self._thread.join()
        deadline = time.monotonic() + 1
        for connection in self._peers:
            # unread input would make the system reset the connection and discard our last words, so it is read
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                while (left := deadline - time.monotonic()) > 0:
                    connection.settimeout(left)
                    if not connection.recv(4096):
                        break
        self._selector.close()
        for source in (*self._peers, self._wake_sender, self._wake_receiver):
            source.close()

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_sender.send(b".")

    # all methods below run in the thread

    def _watch_safely(self) -> None:
        try:
            self._watch()
        except Exception as error:  # of the heartbeat itself, which must not end a run
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Leave the watch, so that no other rank waits for a sign of life."""
        self._send("bye")
        say(f"rank {self.rank} sends no more heartbeats ({describe_error(error)}); {UNWATCHED}")

    def _watch(self) -> None:
        last_beat, last_look = 0.0, time.monotonic()
        while True:
            for key, _ in self._selector.select(self._interval):
                if key.fileobj is self._wake_receiver:
                    self._wake_receiver.recv(16)
                else:
                    self._read(key.fileobj)
            if self._last_word and (self.rank > 0 or not self._last_heard or self._last_word != "bye"):
                return self._send(self._last_word)
            now = time.monotonic()
            if now - last_look > self.lost_after / 2:  # this process was halted; so may others, and none counts as late
                self._last_heard = dict.fromkeys(self._last_heard, now)
                self._behind.clear()
            last_look = now
            if now - last_beat >= self._interval:
                last_beat = now
                beat = self._look_at_main_thread()
                self._send(f"alive {beat.step} {beat.collectives} {beat.place}")
                if self.rank == 0 and not self._last_word:
                    self._find_late(beat, now)
            self._find_lost(now)

    def _find_lost(self, now: float) -> None:
        """End the process if a rank has failed or is silent, after all that has arrived while this one was halted."""
        for rank, heard in self._last_heard.items():
            if rank in self._failed:
                since, error = self._failed[rank]
                if self._is_asked or now - since > FAILED_GRACE:
                    self._decide(rank, f"failed: {error}")
            elif now - heard > self.lost_after:
                self._decide(rank, f"is lost: no sign of life for {self.lost_after:g} s")

    def _find_late(self, own: Beat, now: float) -> None:
        """End the process if a rank has launched no collective for too long, while another one has launched more."""
        present = self._last_heard.keys() - self._failed.keys()
        beats = {peer.rank: peer.beat for peer in self._peers.values() if peer.rank in present} | {0: own}
        most = max(beat.collectives for beat in beats.values())
        behind = {(rank, beat.collectives) for rank, beat in beats.items() if beat.collectives < most}
        self._behind = {key: self._behind.get(key, now) for key in behind}
        waited = now - min(self._behind.values(), default=now)
        if waited > self.late_after:
            rank, _ = min(self._behind, key=lambda key: key[1])  # those who wait in a collective with it have more
            place = f"; it is in {beats[rank].place}" if beats[rank].place else ""
            self._decide(rank, f"is late: the others have waited {waited:,.0f} s for it{place}", beats[rank].step)

    def _look_at_main_thread(self) -> Beat:
        """Return what this rank says of itself; its place is the innermost function of this package."""
        frame = sys._current_frames().get(self._watched_thread)
        while frame and not frame.f_code.co_filename.startswith(f"{_PACKAGE}{os.sep}"):
            frame = frame.f_back
        place = ""
        if frame:
            file = Path(frame.f_code.co_filename).relative_to(_PACKAGE).as_posix()
            place = f"{frame.f_code.co_name} ({file}, line {frame.f_lineno})"
        return Beat(self.step, self._count_collectives(), place)

    def _read(self, connection: Any) -> None:
        """Handle what another rank has said."""
        peer, received = self._peers[connection], receive(connection)
        if received is None:
            return
        *lines, peer.unread = (peer.unread + received).split(b"\n")
        for line in lines:
            self._handle_line(peer, line.decode(errors="replace"))
        if received and len(peer.unread) < _LONGEST_LINE:
            return
        self._selector.unregister(connection)
        if peer.rank in self._last_heard and peer.rank not in self._failed:
            self._decide(peer.rank, "is lost: its process has ended")

    def _handle_line(self, peer: _Peer, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "alive":
            step, collectives, place = rest.split(" ", 2)
            peer.beat = Beat(int(step), int(collectives), place)
        elif word == "bye":
            self._last_heard.pop(peer.rank, None)
        elif word == "failed":
            self._failed[peer.rank] = time.monotonic(), rest
        elif word == "lost":
            self._end(rest)
        if peer.rank in self._last_heard:
            self._last_heard[peer.rank] = time.monotonic()

    def _send(self, words: str) -> None:
        for connection in self._peers:
            with suppress(OSError):  # a connection that has ended is noticed on reading, a silent one by the clock
                connection.send(f"{words}\n".encode())

    def _decide(self, rank: int, what: str, step: int | None = None) -> NoReturn:
        """End this process because of a rank, and the others too if this is rank 0."""
        hint = "" if "the same command" in what else f"; {RESUME}"
        after = self.step if step is None else step
        sentence = f"rank {rank} on {self.hosts[rank]} {what} (after step {after:,}){hint}"
        if self.rank == 0:
            self._send(f"lost {sentence}")
        self._end(sentence)

    def _end(self, sentence: str) -> NoReturn:
        """Say and keep why this process ends; let the main thread end it if that has come so far, or end it."""
        say(sentence)
        self.verdict = sentence
        if self.on_verdict:
            with suppress(RuntimeError):  # there may be no more threads; the disk may not answer
                keeper = threading.Thread(target=self._keep_verdict, daemon=True)
                keeper.start()
                keeper.join(ANSWER_TIMEOUT)
        self._has_answered.set()
        if self._is_asked:
            time.sleep(_LEAVE_WITHIN)
        self._end_process()

    def _keep_verdict(self) -> None:
        with suppress(Exception):
            if self.on_verdict and self.verdict:
                self.on_verdict(self.verdict)

    def _end_process(self) -> NoReturn:
        if self.rank == 0:
            time.sleep(0.5)  # the others read the message before this end of the connection closes
        os._exit(1)


def receive(connection: socket.socket) -> bytes | None:
    """Return what has arrived on a connection; b"" if it has ended, None if it is silent."""
    try:
        return connection.recv(4096)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def say(sentence: str) -> None:
    """Write a sentence to stderr, past the buffers that another thread may hold."""
    with suppress(OSError):
        os.write(2, f"{escape_controls(sentence)}\n".encode())
