"""A server that fails for a while: which errors pass by themselves, and how long to wait before the next try."""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

SHORTEST, LONGEST = 1.0, 60.0  # seconds before the second try, and before any
JITTER = 0.25  # of a wait, up or down, so that the clients of a server that comes back do not come all at once
LIMIT = 15  # tries after the first: about ten minutes of waiting
OBEYED = 300.0  # seconds of a Retry-After that are believed
HTTP_LIBRARIES = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp", "fsspec"}


class Interrupted(Exception):
    """The waiting was given up, since what waited is being closed."""


class Retry:
    """Exponential back-off with jitter, `limit` times in a row; threads may share one."""

    def __init__(self, limit: int = LIMIT, shortest: float = SHORTEST, longest: float = LONGEST) -> None:
        self.limit = limit
        self._shortest, self._longest = shortest, longest
        self._random = random.Random()  # its own: the state of the global one is not ours to advance
        self._stop = threading.Event()

    def __reduce__(self) -> tuple[Any, ...]:
        return Retry, (self.limit, self._shortest, self._longest)

    @property
    def minutes(self) -> float:
        """Of waiting before giving up, on average."""
        return sum(map(self._pause, range(1, self.limit + 1))) / 60

    def session(self) -> threading.Event:
        """For `wait`: a reader keeps what it got at its beginning, so that an interrupt ends its later waits too."""
        return self._stop

    def wait(self, failures: int, error: BaseException, session: threading.Event | None = None) -> None:
        """Waits after the `failures`-th failure in a row; raises Interrupted on `interrupt`."""
        jitter = 1 + self._random.uniform(-JITTER, JITTER)
        stop = self._stop if session is None else session
        if stop.wait(max(self._pause(failures) * jitter, min(_retry_after(error), OBEYED))):
            raise Interrupted

    def interrupt(self) -> None:
        """Ends the waits under way, and those to come of the sessions that there are."""
        stop, self._stop = self._stop, threading.Event()
        stop.set()

    def _pause(self, failures: int) -> float:
        return min(self._longest, self._shortest * 2.0 ** min(failures - 1, 30))


def transient(error: BaseException) -> bool:
    """Whether it may pass: 429, 5xx, cut and refused connections, timeouts; no other answer, no broken file."""
    statuses = [status for cause in _causes(error) if (status := _status(cause)) is not None]
    if statuses:
        return statuses[0] == 429 or statuses[0] >= 500
    return any(
        isinstance(cause, ConnectionError | TimeoutError | socket.gaierror | ssl.SSLError)
        or type(cause).__module__.partition(".")[0] in HTTP_LIBRARIES
        for cause in _causes(error)
    )


def reason(error: BaseException) -> str:
    """The first cause in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _retry_after(error: BaseException) -> float:
    for cause in _causes(error):
        headers = getattr(getattr(cause, "response", None), "headers", None) or {}
        value = str(headers.get("retry-after") or headers.get("Retry-After") or "")
        if value.isdigit():
            return float(value)
    return 0.0
