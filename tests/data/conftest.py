"""Data that several modules prepare."""

import json
import random

import pytest

from tests.helpers.text_files import word_tokenizer_json


@pytest.fixture
def source(tmp_path):
    """Three files of texts of all lengths, one longer than two shards, and an empty one, which is no document."""
    words = random.Random(0)
    texts = [f"{k} " + "word " * words.randint(0, 12) for k in range(90)]
    texts[40], texts[55], texts[89] = "", "long " * 180, "é漢\x00end"
    for number, begin in enumerate(range(0, 90, 30)):
        lines = [json.dumps({"text": text}) for text in texts[begin : begin + 30]]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    (tmp_path / "tokenizer.json").write_text(word_tokenizer_json())
    return list(filter(None, texts)), {
        "train": str(tmp_path / "*.jsonl"),
        "tokenizer": str(tmp_path / "tokenizer.json"),
    }
