"""Runs read by others: any checkpoint, written by any number of ranks, without touching the run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from muown_train.cli.commands import evaluate
from muown_train.runs import checkpoint_files as files
from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.hf.export import export_run
from muown_train.runs.saved_run import open_run, write_run
from muown_train.runtime.distributed import World
from tests.helpers.checkpoints import rewrite_index, take_new_step
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import metrics, trained


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    return trained(corpus, tmp_path_factory.mktemp("runs"), "compile=false")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_model_is_what_was_trained(run):
    before = snapshot(run.folder)
    saved = open_run(run.folder)
    assert saved.step == 12
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(saved.load_model()(ids), run.model.eval()(ids))
    tokenizer = saved.load_tokenizer()
    assert tokenizer.fingerprint == run.data.tokenizer.fingerprint
    assert tokenizer.decode(tokenizer.encode_batch(["The kaban"])[0]) == "The kaban"
    assert snapshot(run.folder) == before


def test_a_step_or_a_checkpoint_can_be_chosen(run):
    earlier = open_run(run.folder, step=8)
    assert earlier.step == 8
    assert open_run(earlier.checkpoint).step == 8
    assert open_run(earlier.checkpoint).folder == run.folder
    with pytest.raises(ValueError, match=r"no checkpoint of step 5; there are 12, 8"):
        open_run(run.folder, step=5)


def train_on_this_rank(world: World, corpus: Path, out: Path) -> dict[str, torch.Tensor]:
    model = trained(corpus, out, "micro_batch=1", world=world).model
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_a_run_of_two_ranks_is_read_exported_and_evaluated(corpus, tmp_path):
    transformers = pytest.importorskip("transformers")
    weights = on_ranks(2, train_on_this_rank, corpus, tmp_path)[0]
    saved = open_run(tmp_path / "run")
    loaded = dict(saved.load_model().named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    export_run(saved, tmp_path / "hf")
    theirs = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters())
    _, _, v = weights["blocks.1.attention.qkv.weight"].chunk(3)
    assert torch.equal(theirs["model.layers.1.self_attn.v_proj.weight"], v)
    assert torch.equal(theirs["model.layers.1.mlp.down_proj.weight"], weights["blocks.1.mlp.out.weight"])
    evaluate.main([str(tmp_path / "run"), f"cache={tmp_path}/elsewhere", "--json", str(tmp_path / "results.json")])
    [found] = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert found["all"]["loss"] == pytest.approx(metrics(tmp_path / "run")[-1]["valid/loss"], rel=1e-6)


def test_a_damaged_checkpoint_is_passed_over_and_left(corpus, tmp_path, capsys):
    run = trained(corpus, tmp_path)
    newest = open_run(run.folder).checkpoint
    file = newest / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    assert open_run(run.folder).step == 8
    said = capsys.readouterr()
    assert "step-00000012 is damaged: rank-00000.safetensors has" in said.err and not said.out
    assert said.err.endswith("step-00000008 is read instead\n") and said.err.count("\n") == 1
    with pytest.raises(ValueError, match=r"step-00000012 is damaged: rank-00000.safetensors has \d+ bytes"):
        open_run(run.folder, step=12)
    assert newest.exists()


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*nothing"):
        open_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match="has no checkpoint"):
        open_run(tmp_path)


def test_a_strangers_configuration_runs_no_code(run, tmp_path):
    saved = open_run(run.folder)
    config = {**saved.config.to_dict(), "model": {"_target_": "os.system", "command": "true"}, "trust": ["os.system"]}
    write_run(tmp_path / "theirs", saved.load_weights(), config, 1, saved.data, None, {})
    with pytest.raises(ValueError, match=r"model._target_='os.system' is not among"):
        open_run(tmp_path / "theirs").load_model()


def test_what_is_written_is_read(run, tmp_path):
    saved = open_run(run.folder)
    doubled = {name: 2 * weight for name, weight in saved.load_weights().items()}
    folder = tmp_path / "doubled"
    write_run(
        folder, doubled, saved.config.to_dict(), saved.step, saved.data, saved.load_tokenizer().raw, {"made": "here"}
    )
    again = open_run(folder)
    assert again.step == saved.step and again.opened.weights_alone and not saved.opened.weights_alone
    assert all(torch.equal(weight, doubled[name]) for name, weight in again.load_weights().items())
    assert again.load_tokenizer().fingerprint == saved.load_tokenizer().fingerprint
    assert json.loads((folder / "manifest.json").read_text()) == {"made": "here"}
    with pytest.raises(ValueError, match="doubled exists"):
        write_run(folder, doubled, saved.config.to_dict(), 1, saved.data, None, {})


def copied(run, folder: Path) -> Path:
    """A run's folder that may be changed."""
    shutil.copytree(run.folder / "checkpoints", folder / "checkpoints")
    return folder


class Training:
    """A run that goes on while others read it: as often as told, it saves and removes the newest of its checkpoints.

    Args:
        first: before the files are checked, or after it.
    """

    def __init__(self, monkeypatch, times: int, first: bool) -> None:
        self.left, self.first, self.checked = times, first, files.find_fault
        monkeypatch.setattr(files, "find_fault", self.fault)

    def fault(self, checkpoint: Path) -> str | None:
        found = None if self.first else self.checked(checkpoint)
        if self.left:
            self.left -= 1
            self.goes_on(checkpoint.parent)
        return self.checked(checkpoint) if self.first else found

    def goes_on(self, folder: Path) -> None:
        newest = files.list_checkpoints(folder)[0]
        later = newest.with_name(f"step-{files.parse_step(newest) + 1:08d}")
        shutil.copytree(newest, later)
        take_new_step(later)
        files.prune(folder, 1, None, False).join()


@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_removes_its_newest_meanwhile(run, tmp_path, monkeypatch, capsys, first):
    folder = copied(run, tmp_path / "run")
    Training(monkeypatch, 2, first)
    saved = open_run(folder)
    assert saved.step == 14 and files.list_checkpoints(folder / "checkpoints") == [saved.checkpoint]
    assert not capsys.readouterr().err  # nothing is damaged
    Training(monkeypatch, 1, first)
    with pytest.raises(ValueError, match=r"step-00000014: the run has removed step 14 meanwhile"):
        open_run(folder, step=14)
    Training(monkeypatch, 1, first)
    with pytest.raises(ValueError, match=r"step-00000015: the run has removed step 15 meanwhile"):
        open_run(files.list_checkpoints(folder / "checkpoints")[0])
    Training(monkeypatch, 1000, first)
    with pytest.raises(ValueError, match=r"the run has removed step 20 meanwhile"):
        open_run(folder)


def test_what_is_open_can_be_read_when_it_is_removed(run, tmp_path):
    folder = copied(run, tmp_path / "run")
    saved, before = open_run(folder), open_run(run.folder).load_weights()
    shutil.rmtree(folder)
    weights = saved.load_weights()
    assert weights.keys() == before.keys() and all(torch.equal(weights[name], before[name]) for name in before)
    ids = torch.arange(32)[None]
    assert torch.equal(saved.load_model()(ids), run.model.eval()(ids))


def test_a_state_to_go_on_from_that_is_removed(run, tmp_path):
    folder = copied(run, tmp_path / "run") / "checkpoints"
    checkpoint = folder / "step-00000008"
    checkpoints = Checkpoints(folder, World(0, 1, torch.device("cpu")))
    assert checkpoints.load({}, checkpoint) == 8
    files.prune(folder, 1, None, False).join()
    with pytest.raises(OSError, match=r"step-00000008: the run has removed step 8 meanwhile"):
        checkpoints.load({}, checkpoint)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda named: named.clear(), "does not name rank-00000.json"),
        (lambda named: named.pop("rank-00000.safetensors"), "does not name rank-00000.safetensors"),
        (lambda named: named.update({"../x": {}}), r"names \.\./x"),
        (lambda named: named.update({"rank-00001.json": named["rank-00000.json"]}), "name rank-00001.safetensors"),
    ],
)
def test_an_index_that_does_not_list_its_files_is_damage(run, tmp_path, change, says):
    folder = copied(run, tmp_path / "run")
    file = folder / "checkpoints" / "step-00000012" / "index.json"
    rewrite_index(file, lambda index: change(index["files"]))
    with pytest.raises(ValueError, match=f"step-00000012 is damaged: index.json .*{says}"):
        open_run(folder, step=12)
    assert [index["step"] for index in files.read_complete_indices(folder / "checkpoints")] == [8]


def test_a_rank_that_the_index_does_not_list_is_damage(run, tmp_path):
    folder = copied(run, tmp_path / "run")
    (folder / "checkpoints" / "step-00000012" / "rank-00001.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is damaged: index.json does not name rank-00001.safetensors"):
        open_run(folder, step=12)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda index: index.pop("step"), "index.json has step=None, which is not that of the folder"),
        (lambda index: index.update(step=8), "index.json has step=8, which is not that of the folder"),
        (lambda index: index.update(step="12"), "index.json has step='12', which is not"),
        (lambda index: index.pop("about"), "does not say what it is a checkpoint of"),
        (lambda index: index["about"].update(data=[1]), r"has about.data=\[1\], which must be a mapping"),
        (lambda index: index["about"]["config"].pop("model"), "model=None: it must be a mapping with a _target_"),
        (lambda index: index["about"]["config"].update(model=3), "model=3: it must be a mapping with a _target_"),
        (lambda index: index["about"]["config"]["model"].pop("_target_"), "it must be a mapping with a _target_"),
        (lambda index: index["about"]["config"]["model"].update(_target_=5), "it must be a mapping with a _target_"),
        (
            lambda index: index["about"]["config"]["model"].update(_target_="torch.optim.AdamW"),
            "model._target_=torch.optim.AdamW, which is no model",
        ),
        (lambda index: index["about"]["config"].pop("out"), "configuration that cannot be used: .*'out'"),
        (
            lambda index: index["about"]["config"]["model"].pop("vocab_size"),
            "model that cannot be made: .*'vocab_size'",
        ),
        (lambda index: index["about"]["config"]["model"].update(vocab_size=10**18), "model that cannot be made"),
        (
            lambda index: index["about"]["config"]["model"].update(vocab_size=10**6),
            r"step-00000012: embedding.weight has",
        ),
        (
            lambda index: index["about"]["config"]["model"].update(seq_len=10**13),
            "model that cannot be made: .*seq_len",
        ),
        (
            lambda index: index["about"]["config"]["model"].update(layers=4000),
            r"model.layers=4000, and holds \d+ weights",
        ),
    ],
)
def test_a_strangers_odd_index_is_one_sentence(run, tmp_path, change, says):
    folder = copied(run, tmp_path / "run")
    file = folder / "checkpoints" / "step-00000012" / "index.json"
    rewrite_index(file, change)
    with pytest.raises(ValueError, match=says):
        open_run(folder, step=12).load_model()


def test_a_folder_is_written_whole_or_not_at_all(run, tmp_path, monkeypatch):
    saved, folder = open_run(run.folder), tmp_path / "new"
    words = (saved.load_weights(), saved.config.to_dict(), 1, saved.data, None, {})

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_rank", full)
        with pytest.raises(OSError, match="No space left") as raised:
            write_run(folder, *words)
        assert raised.value.errno == 28 and raised.value.filename == str(folder)
    assert [path.name for path in tmp_path.iterdir()] == [".new.lock"]
    (tmp_path / ".new.partial").mkdir()  # of one that was killed
    (tmp_path / ".new.partial" / "config.yaml").touch()
    write_run(folder, *words)
    assert open_run(folder).step == 1 and sorted(path.name for path in folder.iterdir())[0] == "checkpoints"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new.lock", "new"]
    with FileLock(tmp_path / ".other.lock"), pytest.raises(ValueError, match="other is being written by another proc"):
        write_run(tmp_path / "other", *words)


def test_weights_alone_are_not_trained_on(corpus, run, tmp_path):
    saved = open_run(run.folder)
    write_run(
        tmp_path / "run", saved.load_weights(), saved.config.to_dict(), 12, saved.data, saved.load_tokenizer().raw, {}
    )
    before = snapshot(tmp_path / "run")
    with pytest.raises(ValueError, match=r"run holds weights alone, .* another name, and init_from=.*/run"):
        trained(corpus, tmp_path)
    assert snapshot(tmp_path / "run") == before
    assert trained(corpus, tmp_path, "name=on", f"init_from={tmp_path}/run").trainer.step == 12
