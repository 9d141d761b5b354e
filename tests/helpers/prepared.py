"""Folders of shards: prepared by a call and read back."""

import numpy as np

from muown_train.data.shards import prepare
from muown_train.data.token_file import read_tokens
from tests.helpers.text_files import word_tokenizer_json

END = 256  # end of text of the byte tokenizer
LIMITS = {"valid_tokens": 200, "shard_tokens": 333}


def run(folder, settings, **limits):
    prepare.prepare_shards(folder, "files", settings, **{**LIMITS, **limits})


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def tokens_of(folder, split):
    return [read_tokens(path) for path in sorted(folder.glob(f"{split}_*.bin"))]


def decode(ids):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(word_tokenizer_json()).decode(ids, skip_special_tokens=False)


def documents_in(parts):
    ids = np.concatenate(parts)
    assert ids[-1] == END
    return [decode(part[part != END].tolist()) for part in np.split(ids, np.flatnonzero(ids == END) + 1)[:-1]]
