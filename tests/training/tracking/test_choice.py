"""`tracking=`: none, one or several sinks, with keys and stored configurations as they were when there was one."""

import pytest

from muown_train.config.compose import load_config
from muown_train.config.schema import parse_config
from muown_train.training.build import build_sinks
from tests.helpers.runs import metrics, trained

NAMES = {"TensorBoardSink", "WandbSink"}


def build(*words):
    return {type(sink).__name__: sink for sink in build_sinks(load_config(words).tracking or {})}


def test_none_one_and_both(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert build() == build("tracking=none") == build("tracking=[]") == {}
    assert build("tracking=wandb").keys() == build("tracking=[wandb]").keys() == {"WandbSink"}
    assert build("tracking=tensorboard").keys() == build("tracking=[tensorboard]").keys() == {"TensorBoardSink"}
    for words in ("tracking=[wandb,tensorboard]", "tracking=[tensorboard,wandb]"):
        sinks = build(words, "tracking.project=one", "tracking.mode=offline", "tracking.finish_timeout=5")
        assert sinks.keys() == NAMES and {sink.finish_timeout for sink in sinks.values()} == {5}
        assert sinks["WandbSink"].sink.settings["project"] == "one"


def test_keys_of_one_sink_stay():
    assert build("tracking=tensorboard", "tracking.finish_timeout=7")["TensorBoardSink"].finish_timeout == 7
    sinks = build("tracking=[wandb,tensorboard]", "tracking.tensorboard.finish_timeout=7")
    assert {name: sink.finish_timeout for name, sink in sinks.items()} == {"TensorBoardSink": 7, "WandbSink": 60}


@pytest.mark.parametrize(
    "target", ["muown_train.tensorboard_sink.TensorBoardSink", "muown_train.training.tracking.wandb_sink.WandbSink"]
)
def test_a_stored_configuration_has_the_sink_that_it_had(target):
    tree = load_config([]).to_dict() | {"tracking": {"_target_": target, "finish_timeout": 3}}
    (sink,) = build_sinks(parse_config(tree, "run").tracking)
    assert type(sink).__name__ == target.rpartition(".")[2] and sink.finish_timeout == 3


def test_a_section_that_names_no_sink_is_refused():
    with pytest.raises(ValueError, match="tracking has no _target_"):
        build_sinks({"project": "a"})
    with pytest.raises(ValueError, match=r"tracking\.a\._target_='os\.system' is not among"):
        build_sinks({"a": {"_target_": "os.system"}})


def test_a_run_records_to_both(corpus, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = trained(corpus, tmp_path, "tracking=[wandb,tensorboard]", "tracking.mode=offline")
    assert list((run.folder / "tensorboard").glob("events.*")) and list((run.folder / "wandb").glob("offline-run-*"))
    assert len(metrics(run.folder)) == 13
