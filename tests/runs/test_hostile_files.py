"""Files of runs that are damaged or a stranger's: every reader and command ends with a result or a sentence."""

import random
import shutil
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from muown_train.cli.commands import compare
from muown_train.cli.errors import report_errors
from muown_train.cli.main import main
from muown_train.cli.train import begin_start
from muown_train.config.compose import load_config
from muown_train.experiments.compare import compare_runs
from muown_train.runs.hf.export import export_run
from muown_train.runs.saved_run import open_run
from muown_train.training.build import build_run
from muown_train.training.continuation import continue_from_checkpoint
from tests.helpers.hostile import (
    vary_json,
    vary_lines,
    vary_tensors,
    vary_yaml,
    write_in_checkpoint,
    write_index,
)
from tests.helpers.runs import HERE, SMALL, trained

CHECKPOINT = "run/checkpoints/step-00000012"
GIVEN = ("cache=cache", "give_up_after=3")
# settings that the checkpoint decides which a run goes on from
DECIDED_THERE = (
    "data",
    "data.train",
    "model.layers",
    "model.dim",
    "model.heads",
    "seq_len",
    "batch_tokens",
    "precision",
)
COMMANDS = {
    "sample": ["sample", "run", "a", "--tokens", "2"],
    "evaluate": ["evaluate", "run", "cache=cache"],
    "export": ["export", "run", "--out", "out/hf"],
    "average": ["average", "run", "--out", "out/average"],
    "analyze": ["analyze", "spectral", "run"],
    "ranks": ["analyze", "effective_rank", "run", "--out", "out/analysis"],
    "import": ["import", "hf", "--out", "out/run"],
}


def call(name: str) -> int:
    """Run a command in this process and return its exit status; what it does not explain would be a traceback."""
    try:
        with pytest.MonkeyPatch.context() as patch, report_errors([]):
            if name in COMMANDS:
                patch.setattr(sys, "argv", ["muown-train", *COMMANDS[name]])
                main()
            elif name == "compare":
                runs = compare.read_runs(compare.find_paths(["run", "other"]))
                compare.print_comparison(compare_runs(runs), runs, Path("out"))
            elif name == "train":
                resume("name=run")
            elif name == "go on":
                resume("name=new", "schedule=decay_from", "checkpoint=run", "tokens=6000", without=DECIDED_THERE)
            else:
                resume("name=new", "init_from=run" if name == "start" else "init_from=hf")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def resume(*words: str, without: Collection[str] = ()) -> None:
    """Begin a start of a run, as training does, up to the first step."""
    given = [
        word
        for word in (*SMALL, *GIVEN, "out=.", "data.train=texts/*.txt", *words)
        if word.split("=")[0] not in without
    ]
    config = load_config(given)
    lock, refusal = begin_start(config)
    try:
        if refusal:
            raise refusal
        config, source = continue_from_checkpoint(config, given)
        run = build_run(config, HERE, source, lock)
        try:
            run.resume()
        finally:
            run.close()
    finally:
        if lock:
            lock.release()


OF_INDEX = ("sample", "train", "export", "evaluate", "ranks", "go on", "start")
# files, what varies them, what writes them, and the commands that read them
FILES = {
    "index": (f"{CHECKPOINT}/index.json", vary_json, Path.write_bytes, ("sample", "train", "average")),
    "signed index": (
        f"{CHECKPOINT}/index.json",
        vary_json,
        write_index,
        OF_INDEX,
    ),
    "state": (f"{CHECKPOINT}/rank-00000.json", vary_json, write_in_checkpoint, ("train", "sample", "go on")),
    "tensors": (
        f"{CHECKPOINT}/rank-00000.safetensors",
        vary_tensors,
        write_in_checkpoint,
        ("train", "sample", "start"),
    ),
    "status": ("run/status.json", vary_json, Path.write_bytes, ("compare", "train")),
    "manifest": ("run/manifest.json", vary_json, Path.write_bytes, ("compare", "export")),
    "config": ("run/config.yaml", vary_yaml, Path.write_bytes, ("compare",)),
    "metrics": ("run/metrics.jsonl", vary_lines, Path.write_bytes, ("compare", "train", "export")),
    "starts": ("run/starts.jsonl", vary_lines, Path.write_bytes, ("train",)),
    "results": ("run/analysis/spectral.jsonl", vary_lines, Path.write_bytes, ("analyze",)),
    "tokenizer": ("run/tokenizer.json", vary_json, Path.write_bytes, ("sample",)),
    "their config": ("hf/config.json", vary_json, Path.write_bytes, ("import", "start there")),
    "their origin": ("hf/muown_train.json", vary_json, Path.write_bytes, ("import", "start there")),
    "their tokenizer": ("hf/tokenizer.json", vary_json, Path.write_bytes, ("import", "start there")),
    "their weights": ("hf/model.safetensors", vary_tensors, Path.write_bytes, ("import", "start there")),
}


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A folder with two runs, an export, and results of the first run."""
    folder = tmp_path_factory.mktemp("stored")
    shutil.copytree(corpus, folder / "texts", ignore=shutil.ignore_patterns("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("run", "other"):
            trained(Path("texts"), Path(), f"name={name}", *GIVEN)
        export_run(open_run("run"), Path("hf"))
        for name in (*COMMANDS, "compare", "train", "go on", "start", "start there"):
            assert call(name) == 0, name
            shutil.rmtree("new", ignore_errors=True)
        shutil.rmtree("out")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_no_content_of_a_file_ends_in_a_traceback(folder, tmp_path, monkeypatch, capsys, name, count=10):
    place, vary, write, commands = FILES[name]
    content, tried = (folder / place).read_bytes(), 0
    (tmp_path / "cache").symlink_to(folder / "cache")
    (tmp_path / "texts").symlink_to(folder / "texts")
    monkeypatch.chdir(tmp_path)
    failed = []
    draw = random.Random(name)
    variants = list(vary(content, draw, count))
    for label, varied in draw.sample(variants, min(len(variants), 2 * count)):
        which = draw.choice(commands)
        for part in ("run", "other", "hf", "out", "new"):
            shutil.rmtree(part, ignore_errors=True)
        for part in ("run", "other", "hf"):
            shutil.copytree(folder / part, part)
        write(Path(place), varied)
        capsys.readouterr()
        began, status = time.process_time(), None
        try:
            status = call(which)
        except BaseException as error:
            failed.append((which, label, repr(error)[:300]))
        tried += 1
        said = capsys.readouterr()
        if time.process_time() - began > 10:
            failed.append((which, label, f"took {time.process_time() - began:.0f} s"))
        if "Traceback" in said.err or "\x1b" in said.err + said.out:
            failed.append((which, label, said.err[-300:]))
        elif status and len(said.err.strip().splitlines()[-1]) > 1500:
            failed.append((which, label, f"a sentence of {len(said.err)} letters: {said.err[:200]}"))
    with capsys.disabled():
        print(f"\n{name}: {tried} tried, {tried - len(failed)} held")
    assert failed == []
