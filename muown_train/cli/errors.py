"""One sentence on standard error, and an exit status, for every error that a user can cause."""

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from muown_train.cli.messages import explain_error, lacks_descriptors
from muown_train.cli.process import FAILED, GAVE_UP, INTERRUPTED, WRONG, exit_with, is_output_closed
from muown_train.runs.status import RepeatedFailure
from muown_train.runtime.formatting import fit_terminal

# these are faults of the machine, not of a setting: the same command may succeed later
_TEMPORARY = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
    *(errno.EACCES, errno.EMFILE, errno.ENFILE),
)


class CommandFailed(Exception):
    """A command failed for a reason that one sentence tells; the same command may succeed later."""


@contextmanager
def report_errors(settings: list[str] | None = None) -> Iterator[None]:
    """End the process with one sentence for an error that a user can cause; MUOWN_TRACEBACK=1 shows the traceback.

    Args:
        settings: the `key=value` words that were given; by default those of the command line.
    """
    if settings is None:
        settings = [word for word in sys.argv[1:] if not word.startswith("-")]
    try:
        yield
    except KeyboardInterrupt:
        exit_with("interrupted; the same command goes on from the last checkpoint, if there is one", INTERRUPTED)
    except RepeatedFailure as error:
        exit_with(str(error), GAVE_UP)
    except (ValueError, OSError, HydraException, OmegaConfBaseException, CommandFailed) as error:
        if os.environ.get("MUOWN_TRACEBACK") == "1" or (isinstance(error, BrokenPipeError) and is_output_closed()):
            raise
        is_temporary = isinstance(error, CommandFailed | ConnectionError)
        is_temporary |= lacks_descriptors() or (isinstance(error, OSError) and error.errno in _TEMPORARY)
        exit_with(f"error: {explain_error(error, settings)}", FAILED if is_temporary else WRONG)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't start new thread" not in str(error):
            raise
        lacking = "threads (`ulimit -u`, or the limit of a container)" if str(error) else "memory"
        exit_with(f"error: this machine gives the process no more {lacking}", FAILED)


def parse_count(least: int = 1, most: int = 10**6) -> Callable[[str], int]:
    """Return a `type` for argparse: a whole number from `least` to `most`."""

    def parse(word: str) -> int:
        if not re.fullmatch(r"\d{1,18}", word) or not least <= int(word) <= most:
            raise argparse.ArgumentTypeError(f"{word[:40]} must be a whole number from {least} to {most}")
        return int(word)

    return parse


class CommandParser(argparse.ArgumentParser):
    """A parser whose description keeps its paragraphs and columns, and whose errors are one sentence."""

    def __init__(self, description: str | None = None, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=fit_terminal(description) if description else None, **options)

    def error(self, message: str) -> NoReturn:
        exit_with(f"error: {message}; see --help", WRONG)

    def parse_steps(self, words: str | None) -> list[int] | None:
        """Return the steps of checkpoints that `--steps A,B` gives."""
        try:
            return None if words is None else [int(step) for step in words.split(",")]
        except ValueError:
            self.error(f"--steps {words} must be steps with commas between them, such as 100,200,300")
