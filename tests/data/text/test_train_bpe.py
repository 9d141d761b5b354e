"""The tokenizer that is trained on one's own files: its size follows the model's vocabulary."""

import json

import pytest

from muown_train.cli.commands import prepare
from muown_train.config.resume_check import check_same_data
from muown_train.data import sources
from muown_train.data.cache import fingerprint, fingerprint_files
from muown_train.data.text.tokenizer import HubTokenizer
from muown_train.data.text.train_bpe import BpeRecipe, train_bpe


@pytest.fixture
def book(tmp_path):
    words = "".join(f"chapter{k} was number {k * 7919 % 1000} of the storm\n" for k in range(3000))
    (tmp_path / "book.txt").write_text(words)
    return tmp_path / "book.txt"


def load(book, vocab_size, **options):
    run = sources.RunInfo(16, 0, 500, book.parent / "cache", vocab_size, lambda line: None)
    return sources.files(str(book), run=run, **options)


def test_it_has_the_entries_of_the_model(book):
    for size in (257, 300, 1000):
        data = load(book, size)
        assert data.tokenizer.size == size and data.tokenizer.name == f"bpe-{size}" == data.metadata["tokenizer"]
    with pytest.raises(ValueError, match=r"tokenizer bpe-256 has 257 entries but model.vocab_size is 256"):
        load(book, 256)
    assert load(book, 10**12).metadata["tokenizer"] == f"bpe-{1 << 20}"  # more than any text fills


def test_a_model_of_4096_has_the_cache_of_earlier_versions(book):
    load(book, 4096)
    key = fingerprint(2, "bpe-4096", "text", fingerprint_files([book]), fingerprint_files([]))
    (folder,) = (book.parent / "cache").glob("*/")
    assert folder.name == f"files-{key}"
    index = json.loads((folder / "index.json").read_text())
    assert index.keys() == {"tokenizer", "train_counts", "train", "valid", "files"}
    assert index["train"].keys() == {"tokens", "documents", "text"}


def test_a_run_with_another_size_goes_on_with_the_tokenizer_of_its_folder(book, tmp_path):
    """Earlier versions trained 4096 entries for every model."""
    earlier = load(book, 400)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.json").write_bytes(earlier.tokenizer.raw)
    now = load(book, 500)
    with pytest.raises(ValueError) as error:
        check_same_data(tmp_path / "run", {"data": earlier.metadata}, now.metadata)
    own = f"data.tokenizer={tmp_path / 'run' / 'tokenizer.json'}"
    assert str(error.value).startswith(f"{tmp_path / 'run'} holds a run with another tokenizer (bpe-400 of 400 entries")
    assert str(error.value).endswith(f"go on with the run's own by {own}")
    again = load(book, 500, tokenizer=own.partition("=")[2])
    check_same_data(tmp_path / "run", {"data": earlier.metadata}, again.metadata)
    assert (again.train._tokens == earlier.train._tokens).all() and (again.valid == earlier.valid).all()


def test_another_end_of_text_is_trained_too():
    recipe = BpeRecipe(300, "<end>", special_tokens=True)
    tokenizer = recipe.load(recipe.train(lambda: iter(["some text " * 50])))
    assert tokenizer.end_of_text == 0 and tokenizer.decode([0]) == "<end>"
    assert tokenizer.encode_batch(["a<end>"])[0].tolist()[1:] == [0]
    assert recipe.options == {"end_of_text": "<end>", "special_tokens": True} and BpeRecipe().options == {}
    assert BpeRecipe().train(lambda: iter(["some text"])) == train_bpe(lambda: iter(["some text"]))


def run_command(monkeypatch, *words):
    monkeypatch.setattr(prepare.signal, "signal", lambda number, handler: None)  # Ctrl-C is the test runner's here
    monkeypatch.setattr("sys.argv", ["muown-train tokenizer", *words])  # errors are explained by the words there
    prepare.main_tokenizer(words)


def test_the_command_saves_the_tokenizer_that_training_would_make(book, tmp_path, monkeypatch, capsys):
    out = tmp_path / "made" / "tokenizer.json"
    run_command(monkeypatch, f"data.train={book}", f"out={out}", "vocab_size=300")
    assert capsys.readouterr().out == f"{out}: 300 entries; train with data.tokenizer={out}\n"
    assert out.read_bytes() == load(book, 300).tokenizer.raw
    assert HubTokenizer("made", out.read_bytes()).size == 300
    run_command(monkeypatch, f"data.train={book}", f"out={tmp_path / 'all.json'}", "vocab_size=1e6")
    assert "entries (the text has too few words for 1,000,000)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vocab_size=300"], "out is not set: give the file to write, such as out=tokenizer.json"),
        (["out=new.json"], "data.train is not set: give the files as a glob"),
        (["out=book.txt", "data.train=book.txt"], "out=book.txt exists: give another name, or remove it"),
        (
            ["out=new.json", "data.train=book.txt", "vocab_size=256"],
            "vocab_size=256 must be a whole number of at least",
        ),
        (["out=new.json", "data.train=book.txt", "vocab_size=1e9"], "vocab_size=1000000000 must be at most 1048576"),
        (["out=new.json", "data.train=book.txt", "vocab_size=many"], "vocab_size='many' must be a whole number"),
        (["out=new.json", "data.train=book.txt", "vocab=5"], "there is no key vocab"),
        (["out=new.json", "data.train=book.txt", "data.tokenizer=gpt2"], "data.tokenizer=gpt2: a tokenizer is trained"),
    ],
)
def test_bad_words_are_one_sentence(book, words, message, monkeypatch, capsys):
    monkeypatch.chdir(book.parent)
    with pytest.raises(SystemExit) as stopped:
        run_command(monkeypatch, *words)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and said.count("\n") == 1
    assert [path.name for path in book.parent.iterdir()] == ["book.txt"]
