"""The view of an experiment: its specification, offline, names metrics that runs write."""

import json
import re
import sys

import pytest

from muown_train.cli.commands.dashboard import main
from muown_train.cli.main import main as run_words
from tests.helpers.paths import ROOT

pytest.importorskip("wandb_workspaces")


@pytest.fixture
def view(capsys) -> dict:
    main(["me/muown", "--group", "table 1", "--print"])
    return json.loads(capsys.readouterr().out)


def test_it_shows_the_runs_of_a_group_over_tokens(view):
    assert (view["entity"], view["project"], view["displayName"]) == ("me", "muown", "table 1")
    section = view["spec"]["section"]
    (filtered,) = section["runSets"][0]["filters"]["filters"]
    assert filtered["key"] == {"section": "run", "name": "group"}
    assert (filtered["op"], filtered["value"]) == ("=", "table 1")
    assert section["settings"]["xAxis"] == "tokens"


def test_its_panels(view):
    panels = {}
    for section in view["spec"]["section"]["panelBankConfig"]["sections"]:
        assert section["isOpen"] and section["localPanelSettings"]["xAxis"] == "tokens"
        for panel in section["panels"]:
            panels[panel["config"]["chartTitle"]] = panel["viewType"], panel["config"]
    curves = {title: config for title, (kind, config) in panels.items() if kind == "Run History Line Plot"}
    assert all(config["xAxis"] == "tokens" for config in curves.values())
    for title in ("Validation loss", "Training loss"):
        assert curves[title]["groupBy"] == "run.value.optimizer" and curves[title]["groupAgg"] == "mean"
    kind, scatter = panels["Final perplexity against learning rate"]
    assert kind == "Scatter Plot" and scatter["xAxisLogScale"]
    assert (scatter["xAxis"], scatter["yAxis"]) == ("config:optim.value.lr", "summary:valid/perplexity")
    assert re.match(curves["Spectra"]["metricRegex"], "spectral/norm/layers.0.mlp")
    shown = {metric for config in curves.values() for metric in config["metrics"]}
    wanted = {"train/grad_norm", "train/skipped_updates", "system/tokens_per_second", "valid/loss", "train/loss"}
    assert wanted < shown
    training = "".join(path.read_text() for path in (ROOT / "muown_train" / "training").glob("*.py"))
    assert [metric for metric in shown if f'"{metric}"' not in training] == []


def test_the_optimizer_is_where_the_sink_writes_it(tmp_path):
    from muown_train.training.tracking.wandb_sink import _describe_run

    assert _describe_run(tmp_path, {"optim": {"_target_": "muown_train.optim.Muown"}}) == {"optimizer": "Muown"}


@pytest.mark.parametrize("project", ["muown", "me/", "a/b/c"])
def test_a_project_is_named_with_its_entity(project, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([project, "--print"])
    assert f"{project!r} must be ENTITY/PROJECT" in capsys.readouterr().err


def test_a_view_that_cannot_be_saved(monkeypatch, capsys):
    from wandb_workspaces.workspaces import Workspace

    def refused(self):
        raise RuntimeError("no access with api_key=0123456789abcdef\nand more")

    monkeypatch.setattr(Workspace, "save", refused)
    with pytest.raises(SystemExit) as ended:
        main(["me/muown"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: the view could not be saved: no access with api_key=***\n"


def test_without_the_package_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    monkeypatch.setattr(sys, "argv", ["muown-train", "dashboard", "me/muown", "--print"])
    with pytest.raises(SystemExit) as ended:
        run_words()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: the library wandb_workspaces") and "[wandb]'`" in said
