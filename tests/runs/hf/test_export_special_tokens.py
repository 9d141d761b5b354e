"""Exports take special tokens that a text spells as the run's data did: for text, or for the tokens."""

import json

import pytest

from muown_train.config.compose import load_config
from muown_train.data.text.tokenizer import select_options
from muown_train.models.language_model import build_model
from muown_train.runs.hf.export import export_run
from muown_train.runs.hf.import_hf import import_folder
from muown_train.runs.saved_run import open_run, write_run
from muown_train.runs.state import ModelState
from tests.helpers.text_files import CHAT, chat_tokenizer

TEXTS = [
    CHAT,
    "plain text",
    "<|im_start|>",
    "a<|im_end|> <|endoftext|>\n",
    "<|im_start| >",
    "<|im_start|><|im_start|>x",
]


def write(folder, **options):
    """Write a run whose data had these options of the tokenizer."""
    words = ["model.layers=1", "model.dim=32", "model.heads=2", "model.vocab_size=260", "seq_len=32"]
    config = load_config([*words, "batch_tokens=128"])
    weights = ModelState(build_model(config.model, config.seq_len)).state_dict()
    write_run(folder, weights, config.to_dict(), 1, {"tokenizer": "chat", **options}, chat_tokenizer(), {})
    return open_run(folder)


@pytest.mark.parametrize("options", [{}, {"special_tokens": True}])
def test_the_configuration_says_it(tmp_path, options):
    export_run(write(tmp_path / "run", **options), tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert written["split_special_tokens"] is not bool(options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"special_tokens": True},
        {"end_of_text": "<|im_end|>"},
        {"end_of_text": "<|im_end|>", "special_tokens": True},
    ],
)
def test_ids_are_those_of_the_data(tmp_path, options):
    transformers = pytest.importorskip("transformers")
    run = write(tmp_path / "run", **options)
    export_run(run, tmp_path / "hf")
    ours = run.load_tokenizer()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    for text, ids in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        assert theirs(text).input_ids == ids.tolist() == theirs.encode(text)
        assert (max(ids) > 255) == ("special_tokens" in options and ("|>" in text))
    assert theirs.eos_token_id == theirs.bos_token_id == ours.end_of_text
    theirs.save_pretrained(tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again", local_files_only=True)
    assert again(CHAT).input_ids == theirs(CHAT).input_ids
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == ours.end_of_text

    import_folder(tmp_path / "hf", tmp_path / "back")
    back = open_run(tmp_path / "back")
    assert select_options(back.data) == options == back.load_tokenizer().options
    assert back.load_tokenizer().encode_batch([CHAT])[0].tolist() == ours.encode_batch([CHAT])[0].tolist()
