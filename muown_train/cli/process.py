"""The process of a command: how it loads torch, and how it ends, also with unread output or threads of others."""

import atexit
import gc
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from muown_train.runtime.formatting import escape_controls

FAILED, WRONG, GAVE_UP, INTERRUPTED = 1, 2, 3, 130  # exit statuses
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # by which a command ends that was stopped by them
OUTPUT_CLOSED = 128 + signal.SIGPIPE  # the status that a shell gives a program that such a pipe has ended


def open_standard_streams() -> None:
    """Open what is closed of standard input, output and error, so that no file of a run takes its place."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def check_ranks() -> int:
    """Return the number of ranks that the environment describes, 1 without torchrun or what is like it.

    Raises:
        ValueError: a variable that describes ranks is no number, or does not fit the others.
    """
    size = _read_count("WORLD_SIZE", 1, 1)
    for name, least, default in (("LOCAL_WORLD_SIZE", 1, 1), ("LOCAL_RANK", 0, 0), ("RANK", 0, 0)):
        if (value := _read_count(name, least, default)) > size - 1 + least:
            raise ValueError(f"{name}={value} does not fit WORLD_SIZE={size}: torchrun sets both, and so that they fit")
    if size > 1 and (missing := {"RANK", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()):
        raise ValueError(f"WORLD_SIZE={size} needs {' and '.join(sorted(missing))} too: torchrun sets them all")
    if size > 1 and _read_count("MASTER_PORT", 0, 0) > 65535:
        raise ValueError(f"MASTER_PORT={os.environ['MASTER_PORT']} must be a port, 1 to 65535")
    return size


def _read_count(name: str, least: int, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
        raise ValueError(
            f"{name}={text!r} must be a whole number of at least {least}: torchrun sets it, and one process needs none"
        )
    return int(text)


def is_output_closed() -> bool:
    """Return whether standard output is a pipe that nobody reads any more, as in `… | head`."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # standard output is something else, such as a notebook
        return False
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def exit_with(sentence: str, status: int) -> NoReturn:
    """Print a sentence on standard error, after this process's rank if it has one, and exit."""
    rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    with suppress(OSError):  # nobody reads it, or the disk is full; the status tells too
        print(escape_controls(f"{rank}{sentence}"), file=sys.stderr, flush=True)
    sys.exit(status)


def run_quietly(main: Callable[[], int | None]) -> object:
    """Run a program's `main` and return its status as SystemExit has it, or OUTPUT_CLOSED where nobody reads it."""
    status: object = None
    try:
        try:
            status = main()
        except SystemExit as end:
            status = end.code
        sys.stdout.flush()
    except BrokenPipeError:
        if not is_output_closed():
            raise
        # Python writes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status or OUTPUT_CLOSED
    return status


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's `main` and end the process with its status."""
    sys.exit(run_quietly(main))  # type: ignore[arg-type]


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a command's `main` and end the process, by a signal where its status is 128 and one of ENDING_SIGNALS.

    A shell ends a loop at Ctrl-C only where the command in it has ended by SIGINT. A rank of several ends with the
    status, since torchrun shows that.

    The interpreter is not torn down under threads of libraries.

    Python ends a daemon thread that asks for the interpreter while it shuts down, and the C++ code of a library may
    not survive that: the process aborts with status 134. A thread of gloo that held the tensors of a collective did
    so (a module that torch imports late keeps the default group alive, and a traceback keeps what it passed through),
    and so did a thread that waits for W&B.
    """
    open_standard_streams()
    status = run_quietly(main) or 0
    if "RANK" not in os.environ and status in [128 + number for number in ENDING_SIGNALS]:
        end_process(status, signal.Signals(status - 128))
    if isinstance(status, int) and (os.environ.get("WORLD_SIZE", "1") != "1" or threading.active_count() > 1):
        end_process(status)
    sys.exit(status)  # type: ignore[arg-type]


def end_process(status: int, number: signal.Signals | None = None) -> NoReturn:
    """Do the first part of what Python does when it ends, and no more, as multiprocessing does for its processes.

    Args:
        number: a signal to end by. The first process of a container does not: there the status is what counts.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    if number:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(status)


@contextmanager
def speed_up_torch_import() -> Iterator[None]:
    """Make an import of torch inside this context fast, and exempt its objects from garbage collection afterwards.

    torch's modules make some 300,000 objects, next to none of which are garbage. No run may exist yet: objects of it
    that refer to one another would never be freed.
    """
    is_new = "torch" not in sys.modules
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        import torch._dynamo  # noqa: F401  # torch imports it with a process's first optimizer, compiled or not
    finally:
        if was_enabled:
            gc.enable()
    if is_new:
        gc.freeze()
