"""Write token shards that training reads at full speed: `python scripts/prepare_data.py data=fineweb_edu out=DIR`.

    data, data.KEY   a data configuration and its settings, as for training: fineweb_edu, files
    out              folder of the shards; train on them with `data=shards data.path=DIR`
    tokens           to train on; all there are by default
    valid_tokens     held out first (4M)
    shard_tokens     in each shard (100M)

Whatever interrupts it, the same command goes on and ends with the same bytes.
"""

import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from muown_train.__main__ import explained
from muown_train.config import CONFIG_DIR, check_overrides, nearest, register_resolvers
from muown_train.factory import factory, is_number

FROM_RUN = ["seq_len", "seed", "valid_tokens", "cache", "vocab_size", "progress"]  # arguments of every data target
DEFAULTS = {"out": None, "tokens": None, "valid_tokens": 4_000_000, "shard_tokens": 100_000_000}


def settings(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Our own keys, checked, and the overrides that choose the data."""
    check_overrides(words)
    own, data = dict(DEFAULTS), []
    for override in OverridesParser.create().parse_overrides(words):
        key = override.key_or_group
        if key.split(".")[0] == "data":
            data.append(override.input_line)
        elif key in DEFAULTS:
            own[key] = override.value()
        else:
            raise ValueError(f"there is no key {key}{nearest(key, ['data', *DEFAULTS])}; see --help")
    if not isinstance(own["out"], str) or not own["out"]:
        raise ValueError("out is not set: give the folder of the shards, such as out=shards")
    if not any(word.startswith("data=") for word in data):
        raise ValueError("data is not set: give data=fineweb_edu, or data=files with data.train=GLOB")
    for key in ("tokens", "valid_tokens", "shard_tokens"):
        value = own[key]
        if value is None and key == "tokens":
            continue
        if not is_number(value) or value != int(value) or not 1 <= value < 2**63:
            raise ValueError(f"{key}={value} must be a whole number, 1 or more")
        own[key] = int(value)  # 5e9 is a float
    return own, data


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return
    with explained():
        own, data = settings(words)
        register_resolvers()
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            config = OmegaConf.to_container(compose("train", data).data, resolve=True)
        target = factory(config, "data", given=FROM_RUN)  # type: ignore[arg-type]
        try:
            from muown_train.data.prepare import prepare

            prepare(Path(own.pop("out")).expanduser(), target.func.__name__, target.keywords, **own)
        except KeyboardInterrupt:
            sys.exit("interrupted; the same command goes on after the last complete shard")


if __name__ == "__main__":
    main()
