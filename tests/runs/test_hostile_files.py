"""Files of runs that are damaged or a stranger's: every reader and command ends with a result or a sentence."""

import random
import shutil
import sys
import time
from pathlib import Path

import pytest

from muown_train.cli.commands import compare
from muown_train.cli.errors import report_errors
from muown_train.cli.main import main
from muown_train.cli.train import begin_start
from muown_train.experiments.compare import compare_runs
from muown_train.runs.hf.export import export_run
from muown_train.runs.saved_run import open_run
from muown_train.training.build import build_run
from tests.helpers.hostile import (
    vary_json,
    vary_lines,
    vary_tensors,
    vary_yaml,
    write_in_checkpoint,
    write_index,
)
from tests.helpers.runs import HERE, make_config, trained

CHECKPOINT = "run/checkpoints/step-00000012"
GIVEN = ("cache=cache", "give_up_after=3")
COMMANDS = {
    "sample": ["sample", "run", "a", "--tokens", "2"],
    "evaluate": ["evaluate", "run", "cache=cache"],
    "export": ["export", "run", "--out", "out/hf"],
    "average": ["average", "run", "--out", "out/average"],
    "analyze": ["analyze", "spectral", "run"],
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
            else:
                resume("run")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def resume(name: str) -> None:
    """Begin a start of a run, as training does, up to the first step."""
    config = make_config(Path("texts"), Path(), f"name={name}", *GIVEN)
    lock, refusal = begin_start(config)
    try:
        if refusal:
            raise refusal
        run = build_run(config, HERE, lock=lock)
        try:
            run.resume()
        finally:
            run.close()
    finally:
        if lock:
            lock.release()


# files, what varies them, what writes them, and the commands that read them
FILES = {
    "index": (f"{CHECKPOINT}/index.json", vary_json, Path.write_bytes, ("sample", "train", "average")),
    "signed index": (f"{CHECKPOINT}/index.json", vary_json, write_index, ("sample", "train", "export", "evaluate")),
    "state": (f"{CHECKPOINT}/rank-00000.json", vary_json, write_in_checkpoint, ("train", "sample")),
    "tensors": (f"{CHECKPOINT}/rank-00000.safetensors", vary_tensors, write_in_checkpoint, ("train", "sample")),
    "status": ("run/status.json", vary_json, Path.write_bytes, ("compare", "train")),
    "manifest": ("run/manifest.json", vary_json, Path.write_bytes, ("compare", "export")),
    "config": ("run/config.yaml", vary_yaml, Path.write_bytes, ("compare",)),
    "metrics": ("run/metrics.jsonl", vary_lines, Path.write_bytes, ("compare", "train", "export")),
    "starts": ("run/starts.jsonl", vary_lines, Path.write_bytes, ("train",)),
    "results": ("run/analysis/spectral.jsonl", vary_lines, Path.write_bytes, ("analyze",)),
    "tokenizer": ("run/tokenizer.json", vary_json, Path.write_bytes, ("sample",)),
    "their config": ("hf/config.json", vary_json, Path.write_bytes, ("import",)),
    "their origin": ("hf/muown_train.json", vary_json, Path.write_bytes, ("import",)),
    "their tokenizer": ("hf/tokenizer.json", vary_json, Path.write_bytes, ("import",)),
    "their weights": ("hf/model.safetensors", vary_tensors, Path.write_bytes, ("import",)),
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
        assert call("train") == call("analyze") == 0
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
        for part in ("run", "other", "hf", "out"):
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
