"""What files of runs may hold: each reader takes what runs write, and refuses the rest in a sentence."""

import json
import os
import re
import shutil
import struct
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save

from muown_train.analysis.checkpoints import check_results_folder
from muown_train.cli.commands import compare, sample
from muown_train.cli.errors import report_errors
from muown_train.config.compose import load_config
from muown_train.config.schema import parse_config
from muown_train.experiments.compare import compare_runs
from muown_train.runs.averaging import open_checkpoints
from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.checkpoint_files import find_fault
from muown_train.runs.checkpoint_reader import open_checkpoint, read_newest_metadata
from muown_train.runs.hf.export import export_run
from muown_train.runs.hf.import_hf import import_folder
from muown_train.runs.manifest import encode_config
from muown_train.runs.metrics import read_metrics
from muown_train.runs.record import NoRun, read_config, read_run
from muown_train.runs.saved_run import open_run
from muown_train.runs.state import RandomState
from muown_train.runs.status import count_start, read_status
from muown_train.runtime.atomic_files import MAX_DEPTH, parse_json, read_json, read_regular, try_read_json
from muown_train.runtime.formatting import escape_controls
from muown_train.training.continuation import continue_from_checkpoint
from tests.helpers.checkpoints import rewrite_index
from tests.helpers.folders import line, settings, write
from tests.helpers.hostile import write_in_checkpoint
from tests.helpers.runs import HERE, trained

TEXT = "${oc.env:HOME}"  # would be the home of whoever reads it


@pytest.mark.parametrize(
    "text, says",
    [
        ("[" * 100_000 + "]" * 100_000, "nested more than"),
        ('{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), "nested more than"),
        ("9" * 400, "a whole number of 400 digits"),
        ("9" * 5000, "a whole number of 5000 digits"),
        ("{", "Expecting"),
        (b"\xff\xfe", "utf-8"),
    ],
)
def test_json_that_is_none(tmp_path, text, says):
    content = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(ValueError, match=says):
        parse_json(content)
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a.json is no JSON: .*{says}"):
        read_json(tmp_path / "a.json")
    assert try_read_json(tmp_path / "a.json") == {}


def test_json_that_is_some():
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(b'{"a": [1, -2.5, null, 123456789012345678901234567890], "b": "\\u00e9"}')["a"][3] == int(
        "123456789012345678901234567890"
    )
    assert json.dumps(parse_json(deep.encode())) == deep


def make_odd(way, path):
    """Put something at a path that is no regular file."""
    if way == "fifo":
        os.mkfifo(path)
    elif way == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if way == "device" else path.with_name("elsewhere"))


@pytest.mark.parametrize("way", ["fifo", "folder", "device", "link"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, way):
    write(tmp_path / "run", [line(0, valid=2.0), line(1, 2.0, 2.0)], settings())
    (tmp_path / "run" / "elsewhere").write_text("{}")
    for name in ("metrics.jsonl", "status.json", "manifest.json", "config.yaml"):
        path = tmp_path / "run" / name
        path.unlink()
        make_odd(way, path)
        with pytest.raises(ValueError, match=f"{name} is a .*, and must be a regular file"):
            read_regular(path)
    assert read_status(tmp_path / "run") == {} and try_read_json(tmp_path / "run" / "manifest.json") == {}
    with pytest.raises(NoRun, match=r"config.yaml cannot be read: .* must be a regular file"):
        read_run(tmp_path / "run")
    with pytest.raises(ValueError, match="regular file"):
        read_metrics(tmp_path / "run" / "metrics.jsonl")


@pytest.mark.parametrize("way", ["fifo", "folder", "device", "link"])
@pytest.mark.parametrize("name", ["index.json", "rank-00000.json", "rank-00000.safetensors"])
def test_such_a_file_of_a_checkpoint_is_damage(tmp_path, way, name):
    Checkpoints(tmp_path, HERE).save(1, {"random": RandomState(HERE)}, wait=True)
    path = tmp_path / "step-00000001" / name
    path.rename(path.with_name("elsewhere"))
    make_odd(way, path)
    assert "must be a regular file" in str(find_fault(path.parent))


def test_a_file_of_any_size_is_not_read(tmp_path):
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(ValueError, match=r"has 1,099,511,627,776 bytes, and may have"):
        read_regular(tmp_path / "manifest.json")


class Counters:
    """State as the trainer and the loader of a run have it."""

    def __init__(self, step):
        self.step = step

    def state_dict(self):
        return {"step": self.step, "tokens": 256 * self.step, "seconds": 1.5, "rollbacks": 0}

    def load_state_dict(self, state):
        self.step = state["step"]


def change_state(key, value):
    def change(folder):
        file = folder / "rank-00000.json"
        write_in_checkpoint(file, json.dumps(json.loads(file.read_text()) | {key: value}).encode())

    return change


def change_tensors(change):
    def rewrite(folder):
        file = folder / "rank-00000.safetensors"
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        text = json.dumps(change(header)).encode()
        write_in_checkpoint(file, struct.pack("<Q", len(text)) + text + content[8 + length :])

    return rewrite


def replace_tensors(tensors):
    return lambda folder: write_in_checkpoint(folder / "rank-00000.safetensors", save(tensors))


def change_about(key, value):
    return lambda folder: rewrite_index(folder / "index.json", lambda index: index["about"].update({key: value}))


TORCH_STATE = torch.get_rng_state()


@pytest.mark.parametrize(
    "change, says",
    [
        (change_state("trainer/step", "abc"), "trainer/step='abc', which must be a whole number"),
        (change_state("trainer/tokens", -1), "trainer/tokens=-1, which must be a whole number"),
        (change_state("trainer/seconds", "1"), "trainer/seconds='1', which must be a number"),
        (change_state("trainer/rollbacks", True), "trainer/rollbacks=True, which must be"),
        (change_state("data/rows", 1e30), r"data/rows=1e\+30, which must be"),
        (change_state("data/skipped", 5), "data/skipped=5, which must be a list"),
        (change_state("data/skipped", [[1, 2, 3]]), "data/skipped=.*2 items"),
        (change_state("data/streams/0/unit", None), "data/streams/0/unit=None"),
        (change_state("random/0/python", [3, [1, 2], None]), "the state of Python's generator"),
        (change_state("random/0/numpy/state/key", [1]), "a list of 624 items"),
        (change_state("trainer/step/x", 1), "both 'trainer/step' and 'trainer/step/x'"),
        (lambda folder: write_in_checkpoint(folder / "rank-00000.json", b"[]"), "a list, not an object"),
        (lambda folder: write_in_checkpoint(folder / "rank-00000.json", b"[" * 99999), "nested more than"),
        (lambda folder: (folder / "index.json").write_bytes(b"[" * 99999), "nested more than"),
        (replace_tensors({"random/0/torch": TORCH_STATE[:99]}), "no state of a generator"),
        (replace_tensors({"model/w": torch.zeros(2, dtype=torch.complex64)}), "has the dtype 'C64'"),
        (replace_tensors({"trainer/step/w": torch.zeros(2)}), "both 'trainer/step' and"),
        (change_tensors(lambda header: {key: {} for key in header}), "has the dtype None"),
        (change_tensors(lambda header: {k: v | {"shape": [7]} for k, v in header.items()}), r"has shape=\[7\]"),
        (change_tensors(lambda header: {}), "its tensors have 0 bytes"),
        (change_tensors(lambda header: [header]), "no JSON object"),
        (change_about("config", 5), "about.config=5, which must be a mapping"),
        (change_about("wandb_id", ["x"]), "about.wandb_id=.*must be text or null"),
        (change_about("origin", {"step": "x"}), "about.origin.step='x'"),
    ],
)
def test_state_that_no_run_writes_sets_a_checkpoint_aside(tmp_path, change, says):
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, HERE, warn=said.append, metadata={"config": {}})
    state = {"trainer": Counters(4), "random": RandomState(HERE)}
    checkpoints.save(4, state, wait=True)
    checkpoints.save(8, state | {"trainer": Counters(8)}, wait=True)
    change(tmp_path / "step-00000008")
    assert checkpoints.load(state) == 4 and len(said) == 1
    assert "set aside as damaged-step-00000008" in said[0]
    assert re.search(says, said[0]), said


@pytest.mark.parametrize("status", ["{}", '{"state": "diverged"}', '{"state": 5}', '{"step": "x"}', "[", "[]", "{}x"])
def test_a_status_that_says_little(tmp_path, status):
    (tmp_path / "status.json").write_text(status)
    assert read_status(tmp_path).keys() <= {"state"}
    (tmp_path / "starts.jsonl").write_text('{"job": null, "saved": null, "time": 5}\n{"job": nu')
    count_start(tmp_path, 3)
    count_start(tmp_path, 3)
    assert (tmp_path / "starts.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize(
    "text, says",
    [
        ("x: &a {y: *a}", "nested more than"),
        ("a: &a [1]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij")),
         "more than 10,000,000 values"),
        ("[" * 100_000, "is not YAML"),
        ("!!timestamp x", "cannot be read"),
        ("batch_tokens: x", "batch_tokens='x', which must be a whole number"),
        ("model: 5", "model=5, which must be a mapping"),
        (f"seed: {'9' * 400}", "seed=9+…, which must be"),
    ],
)  # fmt: skip
def test_a_configuration_that_is_none(tmp_path, text, says):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(NoRun, match=f"config.yaml .*{says}"):
        read_config(tmp_path)


def test_control_characters_are_spelt_out():
    assert escape_controls("a\x1b[2J\rb\n\tc\x9b\x7f é 語 \ud800") == "a\\x1b[2J\\rb\n\tc\\x9b\\x7f é 語 \\ud800"


def test_a_sample_shows_what_would_move_the_cursor(capsys):
    sample.write("\x1b]0;a title\x07 text\n")
    assert capsys.readouterr().out == "\\x1b]0;a title\\x07 text\n"


def test_errors_and_comparisons_show_what_would_move_the_cursor(tmp_path, capsys):
    odd = "a\x1b]0;a title\x07 text"
    with pytest.raises(SystemExit), report_errors([]):
        raise ValueError(f"there is no column {odd}")
    for seed, kind in enumerate(("plain", odd)):
        lines = [line(0, valid=2.0), line(1, 2.0, 2.0)]
        write(tmp_path / f"run-{seed}", lines, settings(seed, kind=kind), state="diverged", reason=odd)
    runs = compare.read_runs(sorted(tmp_path.glob("run-*")))
    compare.print_comparison(compare_runs(runs), runs, tmp_path)
    said = capsys.readouterr()
    assert said.err == "error: there is no column a\\x1b]0;a title\\x07 text\n"
    assert said.out.count("a\\x1b]0;a title\\x07 text") >= 3 and not {"\x1b", "\x07"} & {*said.out}


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    return trained(corpus, tmp_path_factory.mktemp("runs")).folder


@pytest.fixture
def copy(run, tmp_path):
    """A run's folder that may be changed."""
    return shutil.copytree(run, tmp_path / "run")


def test_stored_text_is_text_for_every_reader(copy, tmp_path):
    """A configuration from elsewhere never has its interpolations resolved."""
    newest = copy / "checkpoints" / "step-00000012"

    def change(index):
        index["about"]["config"]["data"]["train"] = TEXT
        index["about"]["config"]["out"] = TEXT
        index["about"]["data"]["tokenizer"] = TEXT

    rewrite_index(newest / "index.json", change)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("out: ", f"out: {TEXT} # "))
    assert read_config(copy)["out"] == read_run(copy).config["out"] == TEXT
    assert open_checkpoint(copy).config["data"]["train"] == TEXT
    assert read_newest_metadata(copy / "checkpoints")["config"]["out"] == TEXT
    saved = open_run(copy)
    assert saved.config.data["train"] == saved.config.out == TEXT
    assert parse_config(saved.config.to_dict(), "x").out == TEXT
    assert saved.load_tokenizer().name == TEXT
    assert [each.config["out"] for each in open_checkpoints(copy)][-1] == TEXT
    assert f"train: {TEXT}\n" in encode_config(saved.config.to_dict()).decode()
    export_run(saved, tmp_path / "hf")
    for file in (tmp_path / "hf").glob("*.json"):
        assert os.environ["HOME"] not in file.read_text()
    (tmp_path / "hf" / "muown_train.json").write_text(json.dumps({"run": TEXT, "step": 12}))
    assert import_folder(tmp_path / "hf", tmp_path / "imported").origin["run"] == TEXT
    words = ["name=new", "schedule=decay_from", f"checkpoint={copy}", "tokens=5000", f"out={tmp_path}"]
    config, source = continue_from_checkpoint(load_config(words), words)
    assert config.data["train"] == source.data["tokenizer"] == TEXT
    with pytest.raises(ValueError, match=r"cannot be written to config\.yaml"):
        encode_config({"out": "${"})


def test_another_tokenizer_is_noticed(copy, run, tmp_path):
    file = copy / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content))  # the same tokenizer in other bytes is another file
    with pytest.raises(ValueError, match=r"tokenizer.json is not the tokenizer that the model was trained with"):
        open_run(copy).load_tokenizer()
    with pytest.raises(ValueError, match="is not the tokenizer"):
        export_run(open_run(copy), tmp_path / "hf")
    for step in (8, 12):  # of an earlier version, which kept no hash
        index = copy / "checkpoints" / f"step-{step:08d}" / "index.json"
        rewrite_index(index, lambda index: index["about"]["data"].pop("tokenizer_hash"))
    assert open_run(copy).load_tokenizer().size == open_run(run).load_tokenizer().size
    content["added_tokens"].append({**content["added_tokens"][0], "id": 10**6, "content": "<|far|>"})
    content["model"]["vocab"]["<|far|>"] = 10**6
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"ids up to 1,000,000, and the model has \d,?\d* entries"):
        open_run(copy).load_tokenizer()


def test_what_is_imported_keeps_the_hash_of_its_own_tokenizer(run, tmp_path):
    export_run(open_run(run), tmp_path / "hf")
    (tmp_path / "hf" / "muown_train.json").write_text(json.dumps({"step": 1, "tokenizer_hash": "0" * 32}))
    import_folder(tmp_path / "hf", tmp_path / "imported")
    assert open_run(tmp_path / "imported").load_tokenizer().size
    (tmp_path / "imported" / "tokenizer.json").write_bytes((run / "tokenizer.json").read_bytes() + b"\n")
    with pytest.raises(ValueError, match="is not the tokenizer"):
        open_run(tmp_path / "imported").load_tokenizer()


def test_results_are_not_written_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "analysis").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"run/analysis is a link or a file, and must be a folder"):
        check_results_folder(tmp_path / "run")
    (tmp_path / "run" / "analysis").unlink()
    assert check_results_folder(tmp_path / "run") == tmp_path / "run" / "analysis"
    (tmp_path / "run" / "analysis").mkdir()
    (tmp_path / "run" / "analysis" / ".spectral.lock").symlink_to(tmp_path / "elsewhere" / "x")
    with pytest.raises(ValueError, match=r"analysis/.spectral.lock is a link"):
        check_results_folder(tmp_path / "run")
