"""Retries for a server that fails for a while: which errors may pass, and how long to wait before the next try.

tenacity retries a call. Here a generator goes on at the document where it failed, failures are counted since the last
document that came, and another thread can end a wait; tenacity would replace only the computation of the pause.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

SHORTEST, LONGEST = 1.0, 60.0  # seconds before the second try, and before any
JITTER = 0.25  # fraction by which a wait varies, so that not all clients come back to a server at once
LIMIT = 15  # tries after the first: about ten minutes of waiting
OBEYED = 300.0  # seconds, the longest Retry-After that is obeyed
HTTP_LIBRARIES = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp", "fsspec"}


class Interrupted(Exception):
    """The wait was given up because the reader that waits is being closed."""


class Retry:
    """Exponential back-off with jitter, at most `limit` times in a row; threads may share one."""

    def __init__(self, limit: int = LIMIT, shortest: float = SHORTEST, longest: float = LONGEST) -> None:
        self.limit = limit
        self._shortest, self._longest = shortest, longest
        self._random = random.Random()  # an own generator, since the global one must not advance
        self._stop = threading.Event()

    def __reduce__(self) -> tuple[Any, ...]:
        return Retry, (self.limit, self._shortest, self._longest)

    @property
    def minutes(self) -> float:
        """The average time of waiting before giving up."""
        return sum(map(self._compute_pause, range(1, self.limit + 1))) / 60

    def start_session(self) -> threading.Event:
        """Return the session that a reader passes to `wait`, so that an interrupt ends its later waits too."""
        return self._stop

    def wait(self, failures: int, error: BaseException, session: threading.Event | None = None) -> None:
        """Wait after the `failures`-th failure in a row; raises Interrupted on `interrupt`."""
        jitter = 1 + self._random.uniform(-JITTER, JITTER)
        stop = self._stop if session is None else session
        if stop.wait(max(self._compute_pause(failures) * jitter, min(_read_retry_after(error), OBEYED))):
            raise Interrupted

    def interrupt(self) -> None:
        """End all waits of the present sessions, those under way and later ones."""
        stop, self._stop = self._stop, threading.Event()
        stop.set()

    def _compute_pause(self, failures: int) -> float:
        return min(self._longest, self._shortest * 2.0 ** min(failures - 1, 30))


def is_transient(error: BaseException) -> bool:
    """Return whether an error may pass by itself.

    Status 429 or 5xx, cut and refused connections and timeouts may; any other answer and a broken file do not.
    """
    statuses = [status for cause in _list_causes(error) if (status := _read_status(cause)) is not None]
    if statuses:
        return statuses[0] == 429 or statuses[0] >= 500
    return any(
        isinstance(cause, ConnectionError | TimeoutError | socket.gaierror | ssl.SSLError)
        or type(cause).__module__.partition(".")[0] in HTTP_LIBRARIES
        for cause in _list_causes(error)
    )


def describe_cause(error: BaseException) -> str:
    """Return the first cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _read_status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _read_retry_after(error: BaseException) -> float:
    for cause in _list_causes(error):
        headers = getattr(getattr(cause, "response", None), "headers", None) or {}
        value = str(headers.get("retry-after") or headers.get("Retry-After") or "")
        if value.isdigit():
            return float(value)
    return 0.0
