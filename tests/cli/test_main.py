"""The command line: what a user types, what they get, and one sentence for what cannot be."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from muown_train.cli.main import COMMANDS, main
from muown_train.config.compose import CONFIG_DIR, load_config
from muown_train.config.resume_check import check_same_run
from muown_train.config.run_name import check_run_name, default_run_name, list_naming_overrides, make_folder_name
from tests.helpers.runs import SMALL, built, configured, metrics

COMMAND = [sys.executable, "-m", "muown_train"]


def small(corpus: Path, out: Path, *overrides: str) -> list[str]:
    return [*SMALL, f"data.train={corpus}/*.txt", f"out={out}", f"cache={corpus}/cache", *overrides]


def call(monkeypatch, *arguments: str) -> tuple[object, str]:
    """Run main() here; its exit status (None if it came to its end), and what it said on standard error."""
    monkeypatch.setattr(sys, "argv", ["muown_train", *arguments])
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            main()
    except SystemExit as stop:
        return stop.code, said.getvalue()
    return None, said.getvalue()


def test_a_run_leaves_everything_in_one_folder_and_says_so(corpus, tmp_path, monkeypatch, capsys):
    arguments = small(corpus, tmp_path, "name=first", "sample_tokens=5")
    assert call(monkeypatch, *arguments)[0] is None
    out = capsys.readouterr().out
    files = {
        "checkpoints",
        "config.yaml",
        "loss.png",
        "manifest.json",
        "metrics.jsonl",
        "status.json",
        "tokenizer.json",
    }
    assert {path.name for path in (tmp_path / "first").iterdir() if path.name[0] != "."} == files
    assert re.search(r"validation loss [\d.]+, perplexity [\d.]+ \(a unigram model of the same text: [\d.]+\)", out)
    assert "12 steps, 3,072 tokens" in out and "--- sample ---" in out and "first: checkpoints" in out
    before = (tmp_path / "first" / "metrics.jsonl").read_text()
    assert call(monkeypatch, *arguments) == (None, "")  # again: nothing is trained twice
    assert "finished before" in capsys.readouterr().out
    assert (tmp_path / "first" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    "overrides, parts",
    [
        (["optim.lrr=1"], ["no key optim.lrr", "did you mean optim.lr?"]),
        (["toknes=5"], ["no key toknes", "did you mean tokens?"]),
        (["+toknes=5"], ["no key toknes", "did you mean tokens?"]),
        (["+optim.lrr=1"], ["optim.lrr is no setting of Muown", "did you mean lr?"]),
        (["+optim.rest.vector.lrr=1"], ["optim.rest.vector.lrr is no setting of AdamW"]),
        (["optim.rest.vector={lrr: 1}"], ["a key of optim.rest.vector", "optim.rest.vector.lr,"]),
        (["+model.depth=3"], ["model.depth is no setting of GPT"]),
        (["model=500"], ["no model=500", "did you mean 500m?", "tiny"]),
        (["optim=muonn"], ["no optim=muonn", "did you mean muon?"]),
        (["optimm=muon"], ["no key optimm (did you mean optim?)"]),
        (["optim/rst=adamw"], ["no group optim/rst (did you mean optim/rest?)"]),
        (["optim.rest.embeding.lr=1"], ["did you mean optim.rest.embedding.lr?"]),
        (["data.trian=a"], ["no key data.trian", "did you mean data.train?"]),
        (["schedule=cosine", "schedule.cooldown=0.1"], ["no key schedule.cooldown", "schedule=wsd has it"]),
        (["model.layer=3"], ["did you mean model.layers?"]),
        (["lr=1"], ["no key lr; here it is optim.lr="]),
        (["epochs=3"], ["no key epochs; here it is tokens=", "one pass over the data"]),
        (["+max_steps=3"], ["no key max_steps; here it is tokens= or tokens_per_parameter="]),
        (["+optim.learning_rate=3"], ["no key optim.learning_rate; here it is optim.lr="]),
        (["optim.rest.learning_rate=3"], ["no key optim.rest.learning_rate"]),
        (["walrus=3"], ["no key walrus; --help shows"]),
        (["OPTIM.LR=1"], ["did you mean optim.lr?"]),
        (["precision=bf16"], ["precision='bf16'", "did you mean bfloat16?"]),
        (["optim.magnitude=adm"], ["optim.magnitude must be one of 'adam', 'signum'", "got 'adm'"]),
        (["on_save_error=contine"], ["on_save_error='contine'", "did you mean continue?"]),
        (["tracking=wandb", "tracking.mode=ofline"], ["tracking.mode='ofline'", "did you mean offline?"]),
        (["tracking=[tensorboard,wandb]", "tracking.mode=ofline"], ["tracking.mode='ofline'", "did you mean offline?"]),
        (["tracking=[wandb,tensorbord]"], ["no tracking=tensorbord", "did you mean tensorboard?"]),
        (["tracking=[wandb,none]"], ["tracking=[wandb,none] must be a list of names tensorboard, wandb"]),
        (["tracking=tensorboard", "+tracking.projct=a"], ["tracking.projct is no setting of tracking.tensorboard"]),
        (["optim=adamw", "optim.lr=-1"], ["optim.lr: Invalid learning rate: -1"]),
        (["optim/rest=adamw", "optim.rest.betas=[0.9,2]"], ["optim.rest.betas: Invalid beta"]),
        (["optim=soap", "optim.betas=[0.9,2]"], ["optim.betas must be"]),
        (["optim.rest.vector.lr=-1"], ["optim.rest.vector.lr: Invalid learning rate: -1"]),
        (["optim/rest=lion", "optim.rest.embedding.lr=-1"], ["optim.rest.embedding.lr must be"]),
        (["seed"], ["'seed'", "key=value"]),
        (["optim.lr=["], ["'optim.lr=['", "key=value"]),
        (["optim.lr=-1"], ["optim.lr must be", "-1"]),
        (["optim.lr=fast"], ["lr", "'fast'"]),
        (["optim.rest.lr=-1"], ["optim.rest.lr: ", "learning rate", "-1"]),
        (["optim.momentum=1.5"], ["momentum", "1.5"]),
        (["optim.magnitude=sgd"], ["magnitude", "'sgd'", "signum"]),
        (["schedule.warmup=20"], ["schedule.warmup=20"]),
        (["seq_len=0"], ["seq_len=0"]),
        (["micro_batch=x"], ["micro_batch='x'"]),
        (["batch_tokens=1000"], ["batch_tokens=1000", "multiple of 64", "960 or 1024"]),
        (["tokens=10"], ["10 tokens"]),
        (["tokens_per_parameter=20"], ["tokens=", "set one of them"]),
        (["precision=float8"], ["precision='float8'", "bfloat16"]),
        (["compile=2"], ["compile=2"]),
        (["reduce_dtype=float16"], ["reduce_dtype='float16'", "bfloat16, float32 or null"]),
        (["model.activation_checkpointing=3"], ["model.activation_checkpointing=3", "0 to 2"]),
        (["name=../../x"], ["name='../../x'"]),
        (["model.heads=5"], ["model.heads=5"]),
        (["model.vocab_size=100"], ["257", "model.vocab_size", "100"]),
        (["data.train=/no/such/*.txt"], ["/no/such/*.txt"]),
        (["data.tokenizer=/no/such/tokenizer.json"], ["/no/such/tokenizer.json"]),
        (["out=/proc/runs"], ["/proc/runs"]),
        (["cache=/proc/cache", "data.text=other"], ["/proc/cache"]),
        (["+model=5"], ["no +model=5", "500m"]),
        (["optim/rest=5"], ["no optim/rest=5", "adamw"]),
        (["optim=null"], ["no optim=null", "muown"]),
        (["experiment=foo"], ["no experiment=foo"]),
        (["model={a: 1}"], ["no model={a: 1}"]),
        (["~optim.rest"], ["~optim.rest", "cannot be removed"]),
        (["out=null"], ["out=None must be a folder"]),
        (["cache=5.5"], ["cache=5.5 must be a folder"]),
        (["seq_len=inf"], ["seq_len=inf"]),
        (["seed=99999999999999999999"], ["seed=99999999999999999999"]),
        (["optim.rest.lr=abc"], ["optim.rest.lr='abc' must be a number"]),
        (["optim.rest.betas=0.9"], ["optim.rest.betas=0.9 must be 2 numbers"]),
        (["optim=adamw", "optim.lr=inf"], ["optim.lr=inf must be a number"]),
        (["optim.rest.embedding=3"], ["optim.rest.embedding=3 must be a mapping"]),
        (["optim.rest.embedding.lr=abc"], ["optim.rest.embedding.lr='abc' must be a number"]),
        (["optim.row_blocks=no"], ["optim.row_blocks='no'"]),
        (["+schedule.step=5"], ["schedule.step is no setting of wsd"]),
        (["+data.seq_len=3"], ["data.seq_len is no setting of files"]),
        (["model.seq_len=16"], ["model.seq_len=16", "seq_len=32"]),
        (["+model.rope_base=abc"], ["model.rope_base='abc' must be a number"]),
        (["data.train=5"], ["data.train: no file matches '5'"]),
        (["data.tokenizer=5.json"], ["data.tokenizer=5.json"]),
        (["tracking=wandb", "tracking.mode=on"], ["tracking.mode='on'"]),
        (["keep_every=0"], ["keep_every=0"]),
        (["keep_every=7"], ["keep_every=7", "multiple of save_every=4"]),
        (["name=hf_abcdefghijklmnopqrstuvwxyz"], ["name holds a secret"]),
        (["data.tokenizer=https://a:hunter2pw@example.com/t"], ["addresses are not fetched", "https://***@"]),
        (["keep_best=1"], ["keep_best=1"]),
        (["on_save_error=ignore"], ["on_save_error='ignore'", "stop or continue"]),
        (["time_limit=12:00"], ["time_limit='12:00'", "minutes"]),
        (["give_up_after=0"], ["give_up_after=0"]),
        (["max_bad_updates=0"], ["max_bad_updates=0"]),
        (["on_bad_updates=skip"], ["on_bad_updates='skip'", "rollback or stop"]),
        (["diverged_above=-1"], ["diverged_above=-1"]),
        (["replica_check_every=0"], ["replica_check_every=0"]),
        (["trust=os.system"], ["trust='os.system'"]),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_no_run(corpus, tmp_path, monkeypatch, capfd, overrides, parts):
    status, message = call(monkeypatch, *small(corpus, tmp_path, *overrides))
    *before, message = message.splitlines()  # at most that a tokenizer is trained
    assert status == 2 and message.startswith("error: ") and len(before) <= 1
    for part in parts:
        assert part in message, message
    said = capfd.readouterr().err
    assert "Traceback" not in said and "Error executing" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_flags_are_not_taken_for_settings(corpus, tmp_path, monkeypatch):
    _, message = call(monkeypatch, "--multirun", *small(corpus, tmp_path, "optim.lr=-1,-2"))
    assert message.startswith("error: job 1: optim.lr must be"), message


@pytest.mark.parametrize(
    "words, part",
    [
        (["--config-dir", "/no/such/folder", "seed=1"], "--config-dir /no/such/folder is no folder"),
        (["--cfg", "job", "model=[1]"], "model=[1] must be one of"),
        (["--multirun", "seed=0,1", "data=[stdlib]"], "data=[stdlib] must be one of"),
    ],
)
def test_words_beside_flags_are_judged_too(monkeypatch, capfd, words, part):
    status, message = call(monkeypatch, *words)
    assert status == 2 and part in message and len(message.splitlines()) == 1 and not capfd.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, monkeypatch, capsys):
    status, _ = call(monkeypatch, name, "--help")
    assert status in (None, 0) and f"muown-train {name}" in capsys.readouterr().out.replace("COMMAND", name)


def test_nothing_imports_the_module_that_python_runs():
    """Python would warn that it runs a module twice."""
    package = CONFIG_DIR.parent / "muown_train"
    importing = [
        path for path in package.rglob("*.py") if re.search(r"import.*__main__|__main__ import", path.read_text())
    ]
    assert not importing


def test_the_exit_status_is_2_and_there_is_no_traceback():
    done = subprocess.run([*COMMAND, "optim.lrr=1"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: there is no key optim.lrr (did you mean optim.lr?)\n"


def test_two_processes_cannot_train_the_same_run(corpus, tmp_path, monkeypatch):
    run = built(corpus, tmp_path, "name=twice")
    status, message = call(monkeypatch, *small(corpus, tmp_path, "name=twice"))
    assert status == 2 and "twice is being trained by another process" in message
    run.close()
    assert call(monkeypatch, *small(corpus, tmp_path, "name=twice")) == (None, "")


def limited(bytes_per_file: int):
    """To be run in a child before it starts: no file may grow beyond this, as if the disk were full."""

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_per_file, bytes_per_file))

    return limit


@pytest.mark.slow
def test_a_disk_that_cannot_take_a_checkpoint(corpus, tmp_path):
    command = [*COMMAND, *small(corpus, tmp_path, "name=full")]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited(200_000))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.fullmatch(r"error: cannot write a checkpoint to \S+/full/checkpoints: .*\n", done.stderr), done.stderr
    assert not list((tmp_path / "full" / "checkpoints").iterdir())
    # what the thread that writes it found is known now or at the next boundary
    assert [line["step"] for line in metrics(tmp_path / "full")] in (list(range(5)), list(range(6)))
    assert subprocess.run(command, capture_output=True).returncode == 0  # with room again


@contextlib.contextmanager
def unwritable(folder: Path):
    """Nobody, not even root, may write to the folder; skips where that cannot be had."""
    done = subprocess.run(["chattr", "+i", folder], capture_output=True, text=True) if shutil.which("chattr") else None
    if done is None or done.returncode:
        pytest.skip(f"no way to make a folder unwritable for root: {done.stderr if done else 'no chattr'}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)


def test_a_run_folder_that_cannot_be_written(corpus, tmp_path, monkeypatch):
    arguments = small(corpus, tmp_path, "name=kept")
    run = built(corpus, tmp_path, "name=kept")
    run.resume()
    run.trainer.stop.request("SIGTERM")
    run.train()
    run.close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "kept").glob("*.*") if path.is_file()}
    with unwritable(tmp_path / "kept"):
        status, message = call(monkeypatch, *arguments)
        assert status in (1, 2) and message.startswith("error: ") and str(tmp_path / "kept") in message
    assert {path.name: path.read_bytes() for path in (tmp_path / "kept").glob("*.*") if path.is_file()} == before
    assert call(monkeypatch, *arguments)[0] is None
    assert [line["step"] for line in metrics(tmp_path / "kept")] == list(range(13))


_ENDING = """
import atexit, sys
from muown_train.cli.process import run_command
class Late:
    def __del__(self):
        print("torn down")
late = Late()  # a global, freed when the interpreter goes: threads that then want it are what aborts a rank
atexit.register(print, "at exit")
print("said")
run_command(lambda: sys.exit({status}))
"""


@pytest.mark.parametrize("code, status", [("3", 3), ("None", 0)])
def test_one_of_several_ranks_ends_in_order_but_keeps_the_interpreter(code, status):
    ran = subprocess.run(
        [sys.executable, "-c", _ENDING.format(status=code)],
        env=os.environ | {"WORLD_SIZE": "2", "RANK": "0"},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "said\nat exit\n", "")


def test_nor_does_a_process_with_a_thread_that_does_not_end(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    for start, said in ((thread, "said\nat exit\n"), ("", "said\nat exit\ntorn down\n")):
        code = start + _ENDING.format(status=3)
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (ran.returncode, ran.stdout, ran.stderr) == (3, said, "")


def choices(*overrides: str) -> str:
    return default_run_name({"model": "tiny", "optim": "muown"}, list(overrides), 0)


def test_names_of_runs():
    assert choices() == "tiny-muown-seed=0"
    assert choices("model=tiny", "seed=0", "out=elsewhere", "tracking=wandb", "tracking.mode=offline") == choices()
    assert (
        choices("model.activation_checkpointing=2", "+model.activation_checkpointing=2") == choices()
    )  # changes no number
    assert choices("reduce_dtype=bfloat16") == "tiny-muown-reduce_dtype=bfloat16-seed=0"
    assert choices("optim.lr=1e-2") == choices("optim.lr=0.01") == "tiny-muown-optim.lr=0.01-seed=0"
    assert choices("schedule=cosine", "data=files") == "tiny-muown-data=files-schedule=cosine-seed=0"
    assert choices("data.train='a/*.txt'") != choices("data.train='a_*.txt'")
    long = choices(*(f"optim.x{i}=1" for i in range(50)))
    for name in (choices("data.train='/a/*.txt'"), long):
        assert check_run_name(name) == name
    assert len(long) < 60 and long != choices(*(f"optim.x{i}=1" for i in range(51)))
    path = "data.train='/a/folder/of/many/letters/that/no/name/can/hold/*.txt'"
    sweep = [choices(path, f"optim.lr={lr}", "tokens=2e7", "seq_len=32") for lr in (1e-3, 2e-3)]
    for name, lr in zip(sweep, ("0.001", "0.002"), strict=True):
        assert re.fullmatch(rf"tiny-muown-optim\.lr={lr}-seq_len=32-seed=0-[0-9a-f]{{8}}", name), name
    assert sweep[0] != choices(path.replace("hold", "bear"), "optim.lr=1e-3", "tokens=2e7", "seq_len=32")


def test_a_run_keeps_the_longer_name_that_an_earlier_version_gave_it(tmp_path):
    words = ["data=files", "data.train='/a/folder/of/many/letters/of/texts/*.txt'", f"out={tmp_path}"]
    name = load_config(words).name
    earlier = make_folder_name(["tiny", "muown", *(word for _, word in list_naming_overrides(words)), "seed=0"])
    assert len(name) < 60 < len(earlier)
    (tmp_path / earlier).mkdir()
    assert load_config(words).name == earlier
    (tmp_path / name).mkdir()
    assert load_config(words).name == name


def test_a_source_of_weights_names_a_run_however_its_path_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert choices(f"init_from={tmp_path}/runs/a") == choices("init_from=runs/a")
    assert choices("init_from=/elsewhere/a") != choices("init_from=runs/a")
    check_same_run(Path("run"), {"config": {"init_from": "runs/a"}}, {"init_from": f"{tmp_path}/runs/a"})
    with pytest.raises(ValueError, match="init_from=runs/a, this one has init_from=runs/b"):
        check_same_run(Path("run"), {"config": {"init_from": "runs/a"}}, {"init_from": "runs/b"})


@pytest.mark.parametrize("name", ["../x", "a/b", ".", "..", ".hidden", "", "a b", "-x"])
def test_names_that_would_leave_the_folder_of_runs(name):
    with pytest.raises(ValueError, match="plain folder name"):
        check_run_name(name)


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


# tokens of a row and of an evaluation, and data with their tokenizer, where it is not that of the paper's GPTs
SETTINGS = {
    "124m": (1024, 4e6),
    "7b": (4096, 1e7),  # not a model of the paper, but with its data and tokenizer
    "qwen2_0_5b": (2048, 1e7, "sample-10BT", "Qwen/Qwen2-0.5B"),
    "speedrun": (1024, 10_485_760, None, "gpt2"),
    "track3": (1024, 10_485_760, None, "gpt2"),
}


@pytest.mark.parametrize("model", options("model"))
def test_a_model_of_the_paper_brings_its_setting_unless_told_otherwise(model):
    config = configured(f"model={model}")
    paper = model not in ("tiny", "small")
    assert ("tokenizer" in config.data) == paper
    assert config.batch_tokens == {"tiny": 4096, "small": 8192, "7b": 4_194_304}.get(model, 524288)
    if paper:
        expected = SETTINGS.get(model, (2048, 1e7))
        data = (config.data.get("name"), config.data.tokenizer)
        assert (config.seq_len, config.valid_tokens) == expected[:2]
        assert data == (expected[2:] or ("sample-100BT", "EleutherAI/gpt-neox-20b"))
    other = configured(f"model={model}", "data=stdlib", "tokens=1e6", "seq_len=512")
    assert "path" not in other.data and other.tokens == 1e6 and other.model.seq_len == 512


def test_an_own_optimizer_that_cannot_be_imported_is_said_so(tmp_path, monkeypatch):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("defaults:\n  - rest: adamw\n\n_target_: no_such_module.Opt\nlr: 1\n")
    words = ("--config-dir", str(tmp_path), "optim=mine", "trust=[no_such_module.Opt]", f"out={tmp_path}/runs")
    status, said = call(monkeypatch, *words)
    assert status == 2 and "optim._target_=no_such_module.Opt cannot be imported: No module named" in said, said
