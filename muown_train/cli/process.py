"""Standard output that nobody reads to its end, as in `… | head`: a program ends quietly then, as others do."""

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

UNREAD = 128 + signal.SIGPIPE  # the status that a shell gives programs that such a pipe has ended


def unread() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # something else stands for it, such as a notebook
        return False
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def status_of(main: Callable[[], int | None]) -> object:
    """Run a program's `main`: its status, as SystemExit has it, or UNREAD."""
    status: object = None
    try:
        try:
            status = main()
        except SystemExit as end:
            status = end.code
        sys.stdout.flush()
    except BrokenPipeError:
        if not unread():
            raise
        # Python writes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status or UNREAD
    return status


def script(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's `main` and end with its status."""
    sys.exit(status_of(main))  # type: ignore[arg-type]
