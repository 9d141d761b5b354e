"""Exports as transformers reads them: the same logits, ids and greedy samples."""

import errno
import json
import math
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from muown_train.cli.commands.hf import main_export
from muown_train.data.text.tokenizer import read_tokenizer
from muown_train.models.generate import generate
from muown_train.runs.hf.export import export_run
from muown_train.runs.hf.folder import read_transformers_folder
from muown_train.runs.hf.import_hf import import_folder
from muown_train.runs.saved_run import open_run, write_run
from muown_train.runs.status import Outcome, write_status
from tests.helpers.runs import trained
from tests.helpers.text_files import find_tokenizer

transformers = pytest.importorskip("transformers")
TEXTS = (
    "The kaban of lodor has 7 mifils.",
    "def f(x):\n    return {'a': [x, 1_000.5e-3]}\r\n\t\t# tabs   and   spaces \n\n\n",
    "Äöü ß — “quotes” … ﬁ ligature, e\u0301 combining, \u00a0 no-break\u200b",
    "日本語のテキスト、한국어 텍스트, русский текст, العربية, हिन्दी, ไทย",
    "👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0001f9ff",
    " leading space",
    "12345678901234567890",
    "don't WE'LL they've\u2019s",
    "\x00\x01\x7f",
    "",
)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    run = trained(corpus, out, "optim.lr=0.02")
    assert run.data.tokenizer.size < 4096  # so that there is something to cut
    return run.folder


@pytest.fixture(scope="module")
def exported(run):
    export_run(open_run(run), run / "hf")
    return run / "hf"


def test_logits_are_those_of_the_run(run, exported):
    saved = open_run(run)
    size = saved.load_tokenizer().size
    ids = torch.randint(size, (3, 32), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    with torch.no_grad():
        ours, logits = saved.load_model()(ids), theirs(ids).logits
    assert logits.shape == (3, 32, size) and logits.dtype == torch.float32
    assert ours.abs().max() > 1
    torch.testing.assert_close(logits, ours[..., :size], atol=1e-5, rtol=1e-5)
    assert theirs.config.max_position_embeddings == 32 and theirs.lm_head.weight is theirs.model.embed_tokens.weight


def test_greedy_samples_are_ours(run, tmp_path):
    before, generator = open_run(run), torch.Generator().manual_seed(0)
    # a model trained so little repeats itself, one of random matrices does not
    varied = {
        name: 0.5 * torch.randn(w.shape, generator=generator) if w.ndim == 2 else w
        for name, w in before.load_weights().items()
    }
    varied["embedding.weight"][before.load_tokenizer().size :] = 0  # never the most likely
    write_run(tmp_path / "varied", varied, before.config.to_dict(), 1, before.data, before.load_tokenizer().raw, {})
    saved = open_run(tmp_path / "varied")
    export_run(saved, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    model, tokenizer = saved.load_model(), saved.load_tokenizer()
    for prompt in ("The", "The kaban of", "has 7"):
        ids = tokenizer.encode_batch([prompt])[0].tolist()
        ours = generate(model, ids, 20, 32, temperature=0)
        options = dict(max_new_tokens=20, do_sample=False, eos_token_id=None)
        new = theirs.generate(torch.tensor([ids]), **options)[0, len(ids) :]
        assert new.tolist() == ours and len(set(ours)) > 5


def assert_same_ids(folder: Path, tokenizer) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(list(TEXTS)), strict=True):
        assert theirs(text).input_ids == ids.tolist(), text
        assert theirs.decode(ids.tolist()) == tokenizer.decode(ids.tolist())
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.end_of_text
    assert len(theirs) == tokenizer.size
    assert set(theirs("a")) == {"input_ids", "attention_mask"}  # what `generate` takes


def test_ids_are_those_of_the_run(run, exported):
    assert_same_ids(exported, open_run(run).load_tokenizer())
    assert transformers.AutoTokenizer.from_pretrained(exported).model_max_length == 32


def with_tokenizer(run: Path, out: Path, raw: bytes, size: int) -> Path:
    """The run with another tokenizer and an embedding for it."""
    saved = open_run(run)
    config = {**saved.config.to_dict(), "model": {**saved.config.model, "vocab_size": size}}
    weights = saved.load_weights() | {"embedding.weight": torch.randn(size, 32)}
    write_run(out, weights, config, 1, {}, raw, {})
    export_run(open_run(out), out / "hf")
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, size",
    [("gpt_neox_20b_tokenizer.json", 50280), ("qwen2_tokenizer.json", 151936), ("gpt2.tiktoken", 50304)],
)
def test_ids_of_known_tokenizers(run, tmp_path, name, size):
    path = find_tokenizer(name, tmp_path)
    folder = with_tokenizer(run, tmp_path / "other", read_tokenizer(str(path)), size)
    assert_same_ids(folder / "hf", open_run(folder).load_tokenizer())


def test_a_tokenizer_that_adds_tokens_adds_none(run, tmp_path):
    template = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    template["special_tokens"] = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    first, text = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    template |= {"single": [first, text], "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}]}
    raw = json.dumps(json.loads(open_run(run).load_tokenizer().raw) | {"post_processor": template}).encode()
    folder = with_tokenizer(run, tmp_path / "other", raw, 4096)
    assert_same_ids(folder / "hf", open_run(folder).load_tokenizer())
    assert read_transformers_folder(folder / "hf").tokenizer_hash == open_run(folder).load_tokenizer().fingerprint


def test_export_and_import_give_the_same_bits(run, exported, tmp_path):
    import_folder(exported, tmp_path / "back")
    before, after = open_run(run), open_run(tmp_path / "back")
    size = before.load_tokenizer().size
    weights = before.load_weights()
    weights["embedding.weight"] = weights["embedding.weight"][:size]
    found = after.load_weights()
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    assert after.step == before.step == 12 and after.load_tokenizer().fingerprint == before.load_tokenizer().fingerprint
    ids = torch.randint(size, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(after.load_model()(ids), before.load_model()(ids)[..., :size], atol=1e-6, rtol=1e-6)


def test_bfloat16(run, tmp_path):
    facts = export_run(open_run(run), tmp_path / "hf", torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert model.dtype == torch.bfloat16 and facts["bytes"] == 2 * sum(p.numel() for p in model.parameters())
    assert model.num_parameters() == facts["parameters"]


def test_the_card_tells_of_the_run(run, exported):
    card = (exported / "README.md").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = [line["valid/loss"] for line in lines if "valid/loss" in line][-1]
    assert f"{loss:.4f}" in card and "3,072 tokens: 12 of 12 steps of 256" in card
    assert "Muown, lr 0.02, weight decay 0 (matrix)" in card and "AdamW, lr 0.02" in card
    example = card.partition("```python\n")[2].partition("```")[0].replace('"."', repr(str(exported)))
    exec(example, {})


def shown(folder: Path) -> list[str]:
    """Names in a folder, without hidden ones such as that of a lock."""
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")


def test_an_earlier_export_is_replaced_and_nothing_else_is(run, tmp_path):
    saved, out = open_run(run), tmp_path / "hf"
    export_run(open_run(run, step=8), out)
    names = shown(out)
    export_run(saved, out)
    assert read_transformers_folder(out).origin["step"] == 12 and shown(out) == names and shown(tmp_path) == ["hf"]
    (out / "notes.txt").write_text("by hand")
    with pytest.raises(
        ValueError, match=r"hf holds notes.txt besides an earlier export: move it, or give another --ou"
    ):
        export_run(open_run(run, step=8), out)
    assert (out / "notes.txt").read_text() == "by hand" and read_transformers_folder(out).origin["step"] == 12
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="mine exists and is no earlier export"):
        export_run(saved, mine)
    assert (mine / "thesis.tex").read_text() == "years of work"


def test_a_run_that_has_not_finished_is_said_to_be_so(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("hf"))
    main_export([str(tmp_path / "run"), "--out", str(tmp_path / "hf")])
    assert capsys.readouterr().out.startswith(f"{tmp_path}/run after step 12 -> ")
    write_status(tmp_path / "run", Outcome("stopped", "SIGTERM"), 12, 20)
    main_export([str(tmp_path / "run"), "--out", str(tmp_path / "hf")])
    assert capsys.readouterr().out.startswith(f"{tmp_path}/run after step 12 (the run has not finished: stopped) -> ")


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """No file can be longer than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_export_that_fails_leaves_the_one_before(run, tmp_path):
    saved, out = open_run(run), tmp_path / "hf"
    export_run(open_run(run, step=8), out)
    with small_disk(200_000), pytest.raises(OSError, match=r"File too large: .*model.safetensors") as raised:
        export_run(saved, out)
    assert raised.value.errno == errno.EFBIG
    assert read_transformers_folder(out).origin["step"] == 8 and shown(tmp_path) == ["hf"]


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_an_export_that_is_killed_leaves_one_that_is_whole(run, tmp_path, renames):
    out = tmp_path / "hf"
    export_run(open_run(run, step=8), out)
    pid = os.fork()
    if pid == 0:
        done, rename = [], Path.rename

        def killed(path: Path, *args) -> object:
            if len(done) == renames:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(rename(path, *args))
            return done[-1]

        Path.rename = killed
        shutil.rmtree = lambda *args, **kwargs: killed(tmp_path) if len(done) == 2 else None
        export_run(open_run(run), out)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert out.exists() == (renames != 1)
    with pytest.raises(ValueError, match="random data have no tokenizer"):  # the next one fails
        export_run(replace(open_run(run), folder=tmp_path), out)
    assert read_transformers_folder(out).origin["step"] == (12 if renames == 2 else 8)
    export_run(open_run(run), out)
    assert read_transformers_folder(out).origin["step"] == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hf.lock", "hf"]


def test_two_exports_at_once_to_one_folder(run, tmp_path):
    with FileLock(tmp_path / ".hf.lock"), pytest.raises(ValueError, match="hf is being written by another process"):
        export_run(open_run(run), tmp_path / "hf")
    export_run(open_run(run), tmp_path / "hf")


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda w: w.pop("norm.weight"), "parameters: norm.weight missing from the checkpoint"),
        (lambda w: w.clear(), "missing from the checkpoint"),
        (lambda w: w.update(more=torch.zeros(2)), "parameters: more only in the checkpoint"),
        (lambda w: w.update({"norm.weight": torch.ones(31)}), r"norm.weight has shape \(31,\)"),
        (lambda w: w["norm.weight"].fill_(math.inf), "model.norm.weight holds numbers that are not finite"),
    ],
)
def test_weights_that_do_not_fit_are_not_exported(run, tmp_path, change, says):
    saved = open_run(run)
    weights = saved.load_weights()
    change(weights)
    write_run(tmp_path / "other", weights, saved.config.to_dict(), 1, saved.data, saved.load_tokenizer().raw, {})
    with pytest.raises(ValueError, match=f"step-00000001: .*{says}"):
        export_run(open_run(tmp_path / "other"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    "loss, says",
    [("1234.5", "1234.5000 on"), ('"NaN"', None), ('"nan"', None), ("null", None), ("2.0", "2.0000 (perplexity 7.39)")],
)
def test_the_card_of_a_run_with_any_loss(run, tmp_path, loss, says):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("hf"))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 12, "valid/loss": {loss}}}\n')
    export_run(open_run(tmp_path / "run"), tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    assert (says in card) if says else ("validation loss" not in card)


@pytest.mark.parametrize("manifest", ['{"settings": 1}', '{"settings": {"steps": null}}', '{"groups": [1]}', "[1]"])
def test_a_strangers_manifest_is_one_sentence(run, tmp_path, manifest):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("hf"))
    (tmp_path / "run" / "manifest.json").write_text(manifest)
    with pytest.raises(ValueError, match=r"run: manifest.json or metrics.jsonl holds what no run writes"):
        export_run(open_run(tmp_path / "run"), tmp_path / "hf")


def test_what_cannot_be_exported_is_said(run, tmp_path, corpus):
    saved = open_run(run)
    other = {**saved.config.to_dict(), "model": {"_target_": "muown_train.models.speedrun.Speedrun"}}
    write_run(tmp_path / "other", saved.load_weights(), other, 1, saved.data, None, {})
    with pytest.raises(ValueError, match="transformers has no model like Speedrun: only GPT and Qwen2"):
        export_run(open_run(tmp_path / "other"), tmp_path / "hf")
    write_run(tmp_path / "random", saved.load_weights(), saved.config.to_dict(), 1, saved.data, None, {})
    with pytest.raises(ValueError, match="random data have no tokenizer"):
        export_run(open_run(tmp_path / "random"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
