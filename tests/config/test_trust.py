"""A stranger's run folder or configuration cannot run code, and names of runs cannot lead elsewhere."""

import ast
import json
import os
import re
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import muown_train
import muown_train.optim
from muown_train.config.compose import CONFIG_DIR, check_config, compose_config, load_config
from muown_train.config.instantiate import ALLOWED, bind_target, check_targets
from muown_train.config.overrides import check_from_command_line
from muown_train.config.run_name import locate_run_folder
from muown_train.runs.record import read_run
from muown_train.runs.saved_run import open_run
from muown_train.training.continuation import continue_from_checkpoint
from tests.helpers.checkpoints import rewrite_index
from tests.helpers.runs import trained

STRANGE = [
    "os.system",
    "subprocess.run",
    "builtins.eval",
    "builtins.exec",
    "hydra.utils.get_method",
    "hydra.utils.get_class",
    "hydra.utils.instantiate",
    "functools.partial",
    "torch.load",
    "torch.optim.lr_scheduler.LambdaLR",
    "torch.optim.sys.modules",
    "torch.optim.AdamW.__init__.__globals__",
    "muown_train.data.workers.pickle.loads",
    "muown_train.optim.muon.Muon",
    "muown_train.optim.Muon ",
    "",
]


def targets(tree) -> list[str]:
    """Every `_target_` in a nested configuration."""
    if isinstance(tree, list):
        return [name for item in tree for name in targets(item)]
    if not isinstance(tree, dict):
        return []
    return [v for k, v in tree.items() if k == "_target_"] + [name for item in tree.values() for name in targets(item)]


def test_the_list_is_what_the_configurations_name():
    trees = [yaml.safe_load(path.read_text()) for path in CONFIG_DIR.rglob("*.yaml")]
    for tree in trees:
        tree.pop("hydra", None)  # Hydra's own settings, such as its callbacks, are not those of a run
    named = {name for tree in trees for name in targets(tree)}
    assert named <= ALLOWED
    optimizers = {f"muown_train.optim.{name}" for name in muown_train.optim.__all__}
    for target in ALLOWED - named:
        kind = target.rpartition(".")[2]
        if target.startswith("torch.optim."):
            assert issubclass(getattr(torch.optim, kind), torch.optim.Optimizer)
        else:
            assert target in optimizers and issubclass(getattr(muown_train.optim, kind), torch.optim.Optimizer)


@pytest.mark.parametrize("target", [*STRANGE, None, 5, ["os.system"], {"_target_": "os.system"}])
def test_no_other_target_at_any_depth(target, monkeypatch):
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    good = {"_target_": "torch.optim.AdamW", "lr": 0.1}
    bad = {"_target_": target, "command": "exit 1"}
    for settings, place in (
        (bad, "optim"),
        (good | {"lr": bad}, "optim.lr"),
        (good | {"betas": [0.9, {"x": (bad,)}]}, "optim.betas.1.x.0"),
        (good | {"_args_": [bad]}, "optim._args_.0"),
        (good | {"_recursive_": False, "eps": bad}, "optim.eps"),
        (good | {"eps": bad | {"_partial_": True}}, "optim.eps"),
        (good | {"eps": bad | {"_convert_": "object", "_partial_": "yes"}}, "optim.eps"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{place}._target_={target!r}")) as caught:
            bind_target(settings, "optim", given=["params"])
        assert f"trust=[{target}]" in str(caught.value)


@pytest.mark.parametrize("key", ["_args_", "_recursive_", "_convert_", "__init__", "lrr", 3])
def test_keys_that_hydra_gives_a_meaning_are_no_settings(key):
    with pytest.raises(ValueError, match=f"optim.{key} is no setting of AdamW"):
        bind_target({"_target_": "torch.optim.AdamW", key: [1]}, "optim", given=["params"])


def test_partial_means_nothing_at_the_top():
    for value in (True, False, "os.system"):
        made = bind_target({"_target_": "torch.optim.AdamW", "_partial_": value, "lr": 0.1}, "optim")
        assert isinstance(made, partial) and (made.func, made.keywords) == (torch.optim.AdamW, {"lr": 0.1})


@pytest.mark.parametrize("settings", [{}, {"lr": 1}, None, 5, "os.system"])
def test_a_section_that_names_nothing(settings):
    with pytest.raises(ValueError, match="optim has no _target_"):
        bind_target(settings, "optim")


def test_what_is_trusted_may_be_named_and_nothing_else():
    svd = "muown_train.optim.core.orthogonalize.svd"
    settings = {"_target_": "muown_train.optim.Muown", "orthogonalizer": {"_target_": svd, "_partial_": True}}
    with pytest.raises(ValueError, match=r"optim\.orthogonalizer\._target_="):
        bind_target(settings, "optim", ["params"], trust=["muown_train.optim.core.orthogonalize"])
    made = bind_target(settings, "optim", ["params"], trust=[svd])
    assert made.keywords["orthogonalizer"].func is muown_train.optim.core.orthogonalize.svd
    half = {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2}
    assert bind_target(half, "x", trust=["fractions.Fraction"])() == Fraction(1, 2)
    settings = {"_target_": "muown_train.optim.Muown", "orthogonalizer": [half], "lr": half}
    made = bind_target(settings, "x", trust=["fractions.Fraction"])
    assert made.keywords == {"orthogonalizer": [Fraction(1, 2)], "lr": Fraction(1, 2)}


@pytest.mark.parametrize(
    "settings, part",
    [
        ({"_target_": "no.such.thing"}, "x._target_=no.such.thing cannot be imported: No module named 'no'"),
        ({"_target_": "math.nothing"}, "x._target_=math.nothing cannot be imported"),
        ({"_target_": "nothing"}, "x._target_=nothing cannot be imported"),
        ({"_target_": "math.pi"}, "x._target_=math.pi is no class or function"),
        ({"_target_": "torch.optim.AdamW", "eps": {"_target_": "torch.optim.SGD"}}, "x.eps cannot be made"),
        ({"_target_": "torch.optim.AdamW", "eps": {"_target_": "torch.optim.SGD", "a": 1}}, "x.eps.a is no setting of"),
    ],
)
def test_what_is_trusted_but_cannot_be_had_is_one_sentence(settings, part):
    with pytest.raises(ValueError, match=re.escape(part)) as caught:
        bind_target(settings, "x", trust=["no.such.thing", "math.nothing", "nothing", "math.pi"])
    assert "\n" not in str(caught.value)


trees = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)


@given(trees, st.lists(st.one_of(st.integers(0, 2), st.text("ab", min_size=1, max_size=2)), max_size=4))
def test_a_strange_target_is_found_wherever_it_is_hidden(tree, path):
    hidden = {"_target_": "os.system"}
    for step in path:
        hidden = [tree] * step + [hidden] if isinstance(step, int) else {"beside": tree, step: hidden}
    with pytest.raises(ValueError, match=r"os\.system"):
        check_targets(hidden, "model")
    check_targets(tree, "model")


def test_trust_counts_only_on_the_command_line():
    check_from_command_line("trust", [], ["seed=1"])
    check_from_command_line("trust", ["my.Optimizer"], ["trust=[my.Optimizer]"])
    check_from_command_line("trust", ["b.c"], ["trust=[a]", "seed=1", "trust=[b.c]"])
    for trust, overrides in ((["os.system"], ["seed=1"]), (["a", "os.system"], ["trust=[a]"]), ([], ["trust=[a]"])):
        with pytest.raises(ValueError, match="trust="):
            check_from_command_line("trust", trust, overrides)


def test_tasks_count_only_on_the_command_line():
    """A file that a task is described by may name code of its own."""
    assert load_config(["tasks=[hellaswag,mine/a.yaml]"]).tasks == ["hellaswag", "mine/a.yaml"]
    composed = compose_config(["tasks=[a.yaml]"])  # as a stranger's experiment may have it
    with pytest.raises(ValueError, match=r"tasks=\['a\.yaml'\] counts only on the command line"):
        check_config(composed, {"model": "tiny", "optim": "muown"}, ["seed=1"])


def test_no_part_of_the_program_can_load_code_from_a_file():
    """`pickle` serves the pipes between a run's own processes, and nothing else."""
    root = Path(muown_train.__file__).parent
    unsafe = {"torch.load", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
    unsafe |= {"eval", "exec", "os.system", "marshal.loads", "shelve.open", "joblib.load", "instantiate"}
    tails = {name.rpartition(".")[2] for name in unsafe}
    found = set()
    for path in [*root.rglob("*.py"), *(root.parent / "scripts").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) in tails:
                found |= {(path.name, ast.unparse(node.func))} & {(path.name, name) for name in unsafe}
            if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code", "weights_only"):
                found.add((path.name, node.arg))
    assert found == {("workers.py", "pickle.loads")}


def strange_folder(folder: Path, corpus: Path) -> Path:
    """What a stranger may hand over as a finished run; the file that appears if any code of theirs runs."""
    run = trained(corpus, folder, "tokens=1024").folder
    bomb = folder / "exploded"
    code = f"!!python/object/apply:os.system ['touch {bomb}']"
    (run / "config.yaml").write_text(f"trust: [os.system]\nmodel: {code}\nseed: {code}\n")
    about = {"config": {"trust": ["os.system"], "model": {"_target_": "os.system"}}, "data": {}}
    for path in run.glob("checkpoints/*/index.json"):
        rewrite_index(path, lambda index: index.update(about=about))
    for path in (run / "manifest.json", run / "status.json"):
        content = json.loads(path.read_text() if path.exists() else "{}") | {"about": about}
        path.write_text(json.dumps(content | {"trust": ["os.system"], "_target_": "os.system", "command": code}))
    return bomb


def test_going_on_with_a_strangers_run_runs_none_of_its_code(corpus, tmp_path):
    bomb = strange_folder(tmp_path, corpus)
    with pytest.raises(ValueError, match=r"os\.system"):  # not the run that is to go on
        trained(corpus, tmp_path, "tokens=2048")
    assert not bomb.exists()


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/x", "a/b", "..", ".", "a\n", "a\nb", "a\0b", "a\\b", "x" * 300, "", "-rf", ".git"]
)
def test_names_that_are_no_folder_names(name, tmp_path):
    with pytest.raises(ValueError, match="must be a plain folder name") as caught:
        locate_run_folder(str(tmp_path), name)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value) and "\0" not in str(caught.value)


@given(st.text(max_size=250))
def test_a_name_that_is_allowed_stays_in_the_folder_of_runs(name):
    try:
        folder = locate_run_folder("/no/such/runs", name)
    except ValueError:
        return
    assert folder.resolve().parent == Path("/no/such/runs") and folder.name == name
    assert len(os.fsencode(folder.name)) <= 255


@pytest.mark.parametrize(
    "link", ["", "checkpoints", "metrics.jsonl", "checkpoints/step-00000001", "config.yaml.partial"]
)
def test_links_in_a_runs_folder_lead_nowhere(tmp_path, link):
    outside = tmp_path / "outside"
    outside.mkdir()
    path = tmp_path / "runs" / "run" / link
    path.parent.mkdir(parents=True)
    assert locate_run_folder(str(tmp_path / "runs"), "run") == tmp_path / "runs" / "run"
    path.symlink_to(outside)
    with pytest.raises(ValueError, match="is a symbolic link") as caught:
        locate_run_folder(str(tmp_path / "runs"), "run")
    assert str(path) in str(caught.value)


def test_the_folder_of_runs_itself_may_be_a_link(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    assert locate_run_folder(str(tmp_path / "runs"), "run") == tmp_path / "runs" / "run"


def test_text_of_a_stored_configuration_is_never_interpolated(corpus, tmp_path, monkeypatch):
    """What a stranger's checkpoint names must not read the environment of whoever goes on with it."""
    monkeypatch.setenv("MY_DATABASE_URL", "postgres://me:secret@host")
    run = trained(corpus, tmp_path, "tokens=1024").folder
    evil = "evil/${oc.env:MY_DATABASE_URL}"
    for path in run.glob("checkpoints/*/index.json"):
        rewrite_index(path, lambda index: index["about"]["config"].update(name=evil, cache=evil, data={"path": evil}))
    text = (run / "config.yaml").read_text().replace("name: run", f"name: {evil}")
    (run / "config.yaml").write_text(text)
    saved = open_run(run)
    assert saved.config.data["path"] == saved.config.cache == evil
    words = [f"checkpoint={run}", "schedule=decay_from", "tokens=512", f"out={tmp_path}", "name=next"]
    config, source = continue_from_checkpoint(load_config(words), words)
    assert source is not None and config.data["path"] == evil
    assert "secret" not in repr(config) and "secret" not in repr(read_run(run).config)
