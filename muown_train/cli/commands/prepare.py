"""Write token shards that training reads at full speed: `muown-train prepare data=fineweb_edu out=DIR`.

`muown-train prepare --check DIR` reads the shards in DIR through and compares them with their checksums.

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
from typing import TYPE_CHECKING, Any

from muown_train.runtime.formatting import fit_terminal

if TYPE_CHECKING:
    from functools import partial

OWN_KEYS = ("out", "tokens", "valid_tokens", "shard_tokens")
TOKENIZER_HELP = """Train a tokenizer on text files: `muown-train tokenizer data.train=GLOB out=FILE vocab_size=N`.

    data.KEY     the settings of data=files; what training would hold out is left out here too
    out          the tokenizer.json to write; train with it by data.tokenizer=FILE
    vocab_size   the number of its entries (4096), bytes and end-of-text included

It is a byte-level BPE, the same that data=files without data.tokenizer trains for a model of that vocab_size."""


def main(words: Sequence[str]) -> None:
    """Run `muown-train prepare` with the words that follow its name."""
    if not words or words[0] in ("-h", "--help"):
        print(fit_terminal(__doc__))
        return
    _end_on_interrupt("the same command goes on after the last complete shard")
    from muown_train.cli.errors import report_errors

    with report_errors():
        if words[0] == "--check":
            if len(words) != 2:
                raise ValueError("--check takes one folder of shards, such as prepare --check shards")
            from muown_train.data.shards.dataset import check_shards

            print(check_shards(Path(words[1]).expanduser()))
            return
        if not any(word.startswith("data=") for word in words):
            raise ValueError("data is not set: give data=fineweb_edu, or data=files with data.train=GLOB")
        out, own, target = _read_words(words, OWN_KEYS, "the folder of the shards, such as out=shards")
        from muown_train.data.shards.prepare import prepare_shards

        prepare_shards(out, target.func.__name__, target.keywords, **own)


def main_tokenizer(words: Sequence[str]) -> None:
    """Run `muown-train tokenizer` with the words that follow its name."""
    if not words or words[0] in ("-h", "--help"):
        print(fit_terminal(TOKENIZER_HELP))
        return
    _end_on_interrupt("nothing is written")
    from muown_train.cli.errors import report_errors

    with report_errors():
        hint = "the file to write, such as out=tokenizer.json"
        out, own, target = _read_words(["data=files", *words], ("out", "vocab_size"), hint)
        if out.exists():
            raise ValueError(f"out={out} exists: give another name, or remove it")
        from muown_train.config.checks import check_int
        from muown_train.data.sources import train_tokenizer
        from muown_train.data.text.tokenizer import HubTokenizer
        from muown_train.data.text.train_bpe import LEAST, MOST, SIZE
        from muown_train.runtime.atomic_files import write_atomic

        size = check_int("vocab_size", own.get("vocab_size", SIZE), LEAST)
        if size > MOST:
            raise ValueError(f"vocab_size={size} must be at most {MOST}")
        raw = train_tokenizer(size, **target.keywords)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, raw)
        made = HubTokenizer(str(out), raw, target.keywords.get("end_of_text")).size
        fewer = f" (the text has too few words for {size:,})" if made < size else ""
        print(f"{out}: {made:,} entries{fewer}; train with data.tokenizer={out}")


def _read_words(words: Sequence[str], keys: Sequence[str], hint: str) -> tuple[Path, dict[str, Any], "partial[Any]"]:
    """Return the path `out`, the settings among the other keys, and the data function with its settings.

    Args:
        hint: says what `out` is to be, if it is not set.
    """
    from omegaconf import OmegaConf

    from muown_train.config.compose import compose_config
    from muown_train.config.instantiate import bind_target
    from muown_train.config.overrides import split_settings
    from muown_train.data.sources import FROM_RUN

    own, data = split_settings(words, keys)
    out = own.pop("out", None)
    if not isinstance(out, str) or not out:
        raise ValueError(f"out is not set: give {hint}")
    config = OmegaConf.to_container(compose_config(data).data, resolve=True)
    return Path(out).expanduser(), own, bind_target(config, "data", given=FROM_RUN)  # type: ignore[arg-type]


def _end_on_interrupt(consequence: str) -> None:
    """Let Ctrl-C end the process at once, after a sentence that says what it means for the work."""
    signal.signal(signal.SIGINT, lambda number, frame: _interrupt(number, consequence))


def _interrupt(number: int, consequence: str) -> None:
    """End the process at once, by the signal as `run_command` does, so that a shell's loop ends with it.

    An exception would be lost, or shown as a traceback, while a library is imported.
    """
    restored = "\r\x1b[2K\x1b[?25h" if sys.stderr.isatty() else ""  # removes the progress line, shows the cursor again
    os.write(2, f"{restored}interrupted; {consequence}\n".encode())
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)  # files on the disk are as good as after any other end
    os._exit(128 + number)  # the first process of a container outlives the signal
