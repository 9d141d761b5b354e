"""Write token shards that training reads at full speed: `muown-train prepare data=fineweb_edu out=DIR`.

    data, data.KEY   a data configuration and its settings, as for training: fineweb_edu, files
    out              folder of the shards; train on them with `data=shards data.path=DIR`
    tokens           number of tokens to train on (default: all)
    valid_tokens     number of tokens that are held out first (4M)
    shard_tokens     number of tokens in each shard (100M)

The same command goes on after any interruption and ends with the same bytes. Nothing is kept outside `out` but what
the hub's own client keeps (HF_HOME).
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

OWN_KEYS = ("out", "tokens", "valid_tokens", "shard_tokens")


def main(words: Sequence[str]) -> None:
    """Run `muown-train prepare` with the words that follow its name."""
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return
    signal.signal(signal.SIGINT, _interrupt)
    from omegaconf import OmegaConf

    from muown_train.cli.errors import report_errors
    from muown_train.config.compose import compose_config
    from muown_train.config.instantiate import bind_target
    from muown_train.config.overrides import split_settings
    from muown_train.data.sources import FROM_RUN

    with report_errors():
        own, data = split_settings(words, OWN_KEYS)
        out = own.pop("out", None)
        if not isinstance(out, str) or not out:
            raise ValueError("out is not set: give the folder of the shards, such as out=shards")
        if not any(word.startswith("data=") for word in data):
            raise ValueError("data is not set: give data=fineweb_edu, or data=files with data.train=GLOB")
        config = OmegaConf.to_container(compose_config(data).data, resolve=True)
        target = bind_target(config, "data", given=FROM_RUN)  # type: ignore[arg-type]
        from muown_train.data.shards.prepare import prepare_shards

        prepare_shards(Path(out).expanduser(), target.func.__name__, target.keywords, **own)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the process at once, by the signal as `run_command` does, so that a shell's loop ends with it.

    An exception would be lost, or shown as a traceback, while a library is imported.
    """
    restored = "\r\x1b[2K\x1b[?25h" if sys.stderr.isatty() else ""  # removes the progress line, shows the cursor again
    os.write(2, f"{restored}interrupted; the same command goes on after the last complete shard\n".encode())
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)  # files on the disk are as good as after any other end
    os._exit(128 + number)  # the first process of a container outlives the signal
