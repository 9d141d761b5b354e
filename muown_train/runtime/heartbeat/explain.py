"""Errors of ranks in words: of collectives that failed because another rank has gone, and of this rank for others."""

from muown_train.runtime.formatting import escape_controls
from muown_train.runtime.redaction import redact

RESUME = "the same command goes on from the last checkpoint"
_LONGEST_ERROR = 1000  # letters of an error that are passed on: a compiler's error may have megabytes
# words of gloo, NCCL and the process group's store for a peer that has gone, and for one that does not come
_BROKEN = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused"),
    *("remote process exited", "ncclRemoteError", "Connection was likely closed", "caused pair closure"),
)
_TIMED_OUT = ("Timed out waiting", "wait timeout", "Socket Timeout")


def explain_lost_rank(error: BaseException) -> str | None:
    """Return one sentence if a collective failed because a rank has gone or did not come; None for other errors."""
    if isinstance(error, RuntimeError) and (lines := str(error).splitlines()):
        if any(words in str(error) for words in _BROKEN):
            return f"another rank is lost: {lines[0]}; {RESUME}"
        if any(words in str(error) for words in _TIMED_OUT):
            return f"the ranks have waited for one another for too long, for which is not known: {lines[0]}; {RESUME}"
    return None


def describe_error(error: BaseException) -> str:
    """Return an error as one line of bounded length, without secrets and control characters."""
    text = " ".join(str(error)[: 10 * _LONGEST_ERROR].split())
    is_sentence = isinstance(error, ValueError | OSError | RuntimeError | SystemExit)
    if not text or not (is_sentence or type(error).__module__.startswith("muown_train")):
        text = ": ".join(filter(None, (type(error).__name__, text)))
    return escape_controls(redact(text))[:_LONGEST_ERROR]
