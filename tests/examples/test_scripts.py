"""The examples that use the command line run as their first lines say, at a smaller size."""

import shutil
import subprocess

import pytest
import torch

from muown_train.runs.record import read_run
from tests.helpers.commands import put_programs_on_path
from tests.helpers.documents import read_blocks
from tests.helpers.paths import ROOT
from tests.helpers.runs import SMALL
from tests.helpers.text_files import word_tokenizer_json

EXAMPLES = ROOT / "examples"
OWN = EXAMPLES / "add_an_optimizer"
QWEN2 = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SIZES = (
    *("model=qwen2_0_5b", "model.vocab_size=257", "model.layers=2", "model.dim=32"),
    *("model.heads=4", "model.kv_heads=2", "model.mlp_hidden=48"),
)


def run_bash(*words):
    return subprocess.run(["bash", *map(str, words)], capture_output=True, text=True)


@pytest.mark.slow
def test_an_optimizer_of_your_own_trains(tmp_path, corpus, monkeypatch):
    put_programs_on_path(monkeypatch, tmp_path / "bin")
    shutil.copytree(OWN, tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    command = "python -m muown_train --config-dir my_configs optim=mine 'trust=[my_optimizers.SignDescent]'"
    assert f"    {command}\n" in (OWN / "my_optimizers.py").read_text()
    small = " ".join([*SMALL, f"data.train={corpus}", f"cache={corpus}/cache", "name=run"])
    done = run_bash("-c", f"{command} {small}")
    assert done.returncode == 0, done.stderr
    run = read_run("runs/run")
    assert run.state == "finished" and run.config["optim"]["_target_"] == "my_optimizers.SignDescent"
    _, losses = run.series("valid/loss")
    assert losses[-1] < losses[0] - 0.1


def test_the_page_shows_that_optimizer():
    blocks = read_blocks(ROOT / "docs" / "adding-an-optimizer.md")
    shown = {path: block.content for block in blocks for path in block.list_notes("file")}
    kept = {path.relative_to(OWN).as_posix(): path.read_text() for path in OWN.rglob("*.*") if path.suffix != ".pyc"}
    assert shown == kept


@pytest.mark.slow
@pytest.mark.timeout(600)  # six commands
def test_a_model_of_transformers_is_trained_on(tmp_path, corpus, monkeypatch):
    transformers = pytest.importorskip("transformers")
    put_programs_on_path(monkeypatch, tmp_path / "bin")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**QWEN2)).save_pretrained("theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text(word_tokenizer_json())
    small = [word for word in SMALL if not word.startswith(("data", "model"))]
    words = [EXAMPLES / "finetune_from_hf.sh", "theirs", f"{corpus}/*.txt", *SIZES, *small, "compile=false"]
    done = run_bash(*words)
    assert done.returncode == 0, done.stderr
    tokenizer = transformers.AutoTokenizer.from_pretrained("runs/finetuned-theirs/hf")
    ids = tokenizer((corpus / "000.txt").read_text(), return_tensors="pt").input_ids[:, :64]
    losses = []
    for folder in ("theirs", "runs/finetuned-theirs/hf"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    assert losses[1] < losses[0] - 0.5
    assert "had finished before" in run_bash(*words).stdout  # the same command again
    assert run_bash(words[0]).returncode == 2
    named = run_bash(*words, "name=mine")
    assert (
        named.returncode == 2
        and named.stderr == "name=mine: this script names the run itself, after the folder of the model\n"
    )


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.stem)
def test_bash_reads_it(path):
    assert run_bash("-n", path).stderr == ""
