"""Make a view of an experiment at W&B: `muown-train dashboard ENTITY/PROJECT [--group GROUP]` saves it.

`--print` shows its specification as JSON and needs no network. The command needs pip install 'muown-train[wandb]'.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from muown_train.cli.errors import CommandParser
from muown_train.cli.process import FAILED, exit_with
from muown_train.runtime.redaction import redact

OPTIMIZER = "run.optimizer"  # key in the configuration of a run at W&B, as WandbSink writes it


def main(words: Sequence[str]) -> None:
    """Run the command with the words that follow its name."""
    parser = CommandParser(__doc__)
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    parser.add_argument("--group", help="show only runs with this tracking.group")
    parser.add_argument("--name", help="name of the view (default that of the group or the project)")
    parser.add_argument("--print", action="store_true", help="show the specification as JSON and save nothing")
    arguments = parser.parse_args(words)
    entity, _, project = arguments.project.partition("/")
    if not entity or not project or "/" in project:
        parser.error(f"{arguments.project!r} must be ENTITY/PROJECT, such as my-team/muown")
    view = build_view(entity, project, arguments.group, arguments.name or arguments.group or project)
    if arguments.print:
        print(json.dumps(view._to_model().model_dump(mode="json", by_alias=True, exclude_none=True), indent=1))
        return
    try:
        view.save()
    except Exception as error:  # there are many kinds: no login, no network, no such project
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        exit_with(f"error: the view could not be saved: {redact(first)}", FAILED)


def build_view(entity: str, project: str, group: str | None, name: str) -> Any:
    """Return the whole view of the runs of a group, a wandb_workspaces Workspace; every curve is over tokens.

    Raises:
        ImportError: the extra `wandb` is not installed.
    """
    # import_module, because the package declares no types and is an extra
    ws: Any = import_module("wandb_workspaces.workspaces")
    expr: Any = import_module("wandb_workspaces.expr")
    sections = {
        "Loss by optimizer": _make_loss_panels(),
        "Final perplexity": [_make_learning_rate_panel()],
        "Spectra": [_make_curve("Spectra", metric_regex="^spectral/.*")],
        "Steps": [
            _make_curve("Gradient norm", "train/grad_norm", log_y=True),
            _make_curve("Skipped steps", "train/skipped_updates"),
            _make_curve("Learning rate", "train/lr"),
        ],
        "Speed": [
            _make_curve("Throughput, tokens per second", "system/tokens_per_second"),
            _make_curve("Model FLOPs utilization", "system/mfu"),
            _make_curve("Share of time that waits for data", "data/wait_fraction"),
            _make_curve("Peak memory, bytes", "system/peak_memory"),
        ],
    }
    over_tokens = ws.SectionPanelSettings(x_axis="tokens")  # otherwise each section has an axis of its own
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            ws.Section(name=title, panels=panels, is_open=True, panel_settings=over_tokens)
            for title, panels in sections.items()
        ],
        settings=ws.WorkspaceSettings(x_axis="tokens", max_runs=100),
        runset_settings=ws.RunsetSettings(filters=[expr.Metric("Group") == group] if group else []),
    )


def _import_reports() -> Any:
    return import_module("wandb_workspaces.reports.v2")


def _make_curve(title: str, *metrics: str, **options: Any) -> Any:
    """Return a panel of metrics against tokens, with a line for every run."""
    return _import_reports().LinePlot(
        title=title, x="tokens", y=list(metrics), title_x="tokens", max_runs_to_show=100, **options
    )


def _make_loss_panels() -> list[Any]:
    """Return panels of the means over the runs of each optimizer, with their range, and of every run."""
    by_optimizer = dict(groupby=_import_reports().Config(OPTIMIZER), groupby_aggfunc="mean", groupby_rangefunc="minmax")
    return [
        _make_curve("Validation loss", "valid/loss", **by_optimizer),
        _make_curve("Training loss", "train/loss", smoothing_type="exponential", smoothing_factor=0.9, **by_optimizer),
        _make_curve("Validation loss, every run", "valid/loss"),
    ]


def _make_learning_rate_panel() -> Any:
    reports = _import_reports()
    return reports.ScatterPlot(
        title="Final perplexity against learning rate",
        legend_template="${config:run.value.optimizer}: ${run:displayName}",
        x=reports.Config("optim.lr"),
        y=reports.SummaryMetric("valid/perplexity"),
        log_x=True,
        log_y=True,
    )
