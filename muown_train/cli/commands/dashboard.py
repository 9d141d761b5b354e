"""The W&B view of an experiment: `python scripts/wandb_dashboard.py ENTITY/PROJECT [--group GROUP]` saves it.

`--print` shows its specification as JSON and needs no network. Needs pip install 'muown-train[dashboard]'.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from muown_train.cli.errors import CommandParser
from muown_train.runtime.redaction import redact

try:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr
except ModuleNotFoundError:
    sys.exit("error: this needs a package: pip install 'muown-train[dashboard]'")

OPTIMIZER = "run.optimizer"  # in the configuration of a run at W&B, as WandbSink writes it


def main(words: Sequence[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    parser.add_argument("--group", help="only runs with this tracking.group")
    parser.add_argument("--name", help="of the view; by default that of the group or the project")
    parser.add_argument("--print", action="store_true", help="show the specification as JSON and save nothing")
    arguments = parser.parse_args(words)
    entity, _, project = arguments.project.partition("/")
    if not entity or not project or "/" in project:
        parser.error(f"{arguments.project!r} must be ENTITY/PROJECT, such as my-team/muown")
    view = workspace(entity, project, arguments.group, arguments.name or arguments.group or project)
    if arguments.print:
        print(json.dumps(view._to_model().model_dump(mode="json", by_alias=True, exclude_none=True), indent=1))
        return
    try:
        view.save()
    except Exception as error:  # of many kinds: no login, no network, no such project
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        sys.exit(f"error: the view could not be saved: {redact(first)}")


def workspace(entity: str, project: str, group: str | None, name: str) -> ws.Workspace:
    """The whole view, over tokens, of the runs of a group."""
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            section("Loss by optimizer", *losses()),
            section("Final perplexity", *learning_rates()),
            section("Spectra", *spectra()),
            section("Updates", curve("Gradient norm", "train/grad_norm", log_y=True), *updates()),
            section("Speed", *speed()),
        ],
        settings=ws.WorkspaceSettings(x_axis="tokens", max_runs=100),
        runset_settings=ws.RunsetSettings(filters=[expr.Metric("Group") == group] if group else []),
    )


def section(name: str, *panels: wr.LinePlot | wr.ScatterPlot) -> ws.Section:
    return ws.Section(
        name=name,
        panels=list(panels),
        is_open=True,
        # otherwise each section has an axis of its own
        panel_settings=ws.SectionPanelSettings(x_axis="tokens"),
    )


def curve(title: str, metric: str, **options: object) -> wr.LinePlot:
    """One metric against tokens, a line for every run."""
    return wr.LinePlot(title=title, x="tokens", y=[metric], title_x="tokens", max_runs_to_show=100, **options)


def losses() -> list[wr.LinePlot]:
    """Means over the runs of each optimizer with their range, and every run."""
    by_optimizer = dict(groupby=wr.Config(OPTIMIZER), groupby_aggfunc="mean", groupby_rangefunc="minmax")
    return [
        curve("Validation loss", "valid/loss", **by_optimizer),
        curve("Training loss", "train/loss", smoothing_type="exponential", smoothing_factor=0.9, **by_optimizer),
        curve("Validation loss, every run", "valid/loss"),
    ]


def learning_rates() -> list[wr.ScatterPlot]:
    perplexity = wr.SummaryMetric("valid/perplexity")
    rates = dict(x=wr.Config("optim.lr"), y=perplexity, log_x=True, log_y=True)
    legend = "${config:run.value.optimizer}: ${run:displayName}"
    return [wr.ScatterPlot(title="Final perplexity against learning rate", legend_template=legend, **rates)]


def spectra() -> list[wr.LinePlot]:
    return [
        wr.LinePlot(title="Spectra", x="tokens", metric_regex="^spectral/.*", title_x="tokens", max_runs_to_show=100)
    ]


def updates() -> list[wr.LinePlot]:
    return [curve("Skipped updates", "train/skipped_updates"), curve("Learning rate", "train/lr")]


def speed() -> list[wr.LinePlot]:
    return [
        curve("Throughput, tokens per second", "system/tokens_per_second"),
        curve("Model FLOPs utilization", "system/mfu"),
        curve("Share of time that waits for data", "data/wait_fraction"),
        curve("Peak memory, bytes", "system/peak_memory"),
    ]
