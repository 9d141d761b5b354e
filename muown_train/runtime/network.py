"""What ranks send over: the network that NCCL has chosen, as its log tells, and why ranks do not reach one another.

NCCL falls back to TCP without a word where the plugin of a faster network is missing, and steps then take several times
as long. It names its choice in its log alone, which rank 0 has it write to a file.
"""

import os
import re
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_own_log: Path | None = None  # the file that `log_nccl` has made


class NcclNetwork(NamedTuple):
    """The name that NCCL gives to the network between nodes, such as IB or Socket, and the number of nodes."""

    name: str
    nodes: int | None  # None: NCCL before 2.21 does not tell it

    @property
    def is_slow(self) -> bool:
        """True where several nodes send over TCP."""
        return self.name == "Socket" and (self.nodes or 1) > 1


def log_nccl() -> None:
    """Have NCCL write what it chooses to a file, unless the user has said what it is to write.

    NCCL reads these variables when it is first used.
    """
    global _own_log
    if os.environ.keys() & {"NCCL_DEBUG", "NCCL_DEBUG_FILE"}:
        return
    with suppress(OSError):  # without a folder for temporary files nothing is told
        descriptor, path = tempfile.mkstemp(prefix="nccl-", suffix=".log")
        os.close(descriptor)
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT", NCCL_DEBUG_FILE=path)
        _own_log = Path(path)


def read_nccl_network() -> NcclNetwork | None:
    """Return the network that NCCL has chosen, once ranks have met over it; None where no file of its log tells.

    The file that `log_nccl` has made is removed.
    """
    path = os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
    try:
        text = Path(path).read_text(errors="replace") if path else ""
    except OSError:
        return None
    remove_nccl_log()
    return parse_nccl_log(text)


def remove_nccl_log() -> None:
    """Remove the file that `log_nccl` has made, if it is there."""
    if _own_log:
        with suppress(OSError):
            _own_log.unlink()


def parse_nccl_log(text: str) -> NcclNetwork | None:
    """Return the network that a log of NCCL with NCCL_DEBUG=INFO names last; None if it names none."""
    names = re.findall(r"NCCL INFO Using network (.+?)\s*$", text, re.MULTILINE)
    nodes = re.findall(r"NCCL INFO comm .* nNodes (\d+) ", text)
    return NcclNetwork(names[-1], max(map(int, nodes), default=None)) if names else None


def translate_error(error: BaseException) -> Exception | None:
    """Return an error in one sentence where ranks have met, but cannot send to one another; None for other errors."""
    reason = next(iter(str(error).splitlines()), "")
    if "Duplicate GPU detected" in str(error):
        return ValueError("two ranks have the same GPU: start one rank for each GPU that a node shows")
    if "Unable to find address for" in reason:
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        return ValueError(f"GLOO_SOCKET_IFNAME={name} must be a network interface with an address, see `ip addr`")
    if "connectFullMesh" in reason:
        return ConnectionError(
            f"the ranks cannot reach one another over gloo ({reason}): if the names of hosts, such as "
            f"{socket.gethostname()} here, stand for no address that other nodes reach, set GLOO_SOCKET_IFNAME to the "
            "network interface between nodes, such as eth0 or hsn0 (`ip addr` lists them)"
        )
    return None
