"""Reproduce an experiment of the paper: `muown-train reproduce experiment=500m_multiseed` lists its runs.

    action       list (the default, which starts nothing), plan, run, submit, report, archive
    out          folder of all runs (runs); those of an experiment lie in OUT/EXPERIMENT or OUT/EXPERIMENT-SCALE
    scale        tiny (seconds per run) or small (minutes): the same experiment with small models, on data=stdlib
    points       number of learning rates of each grid, evenly spread
    seeds        number of seeds
    series       some of the settings that are compared, such as series=muown_wd0,muon_wd0
    jobs         number of runs at a time (run: 1, and their threads share the cores; submit: 8)
    ranks        processes of each run, with a GPU each (run: 1; plan: as the experiment's file says)
    device, mfu  of a plan: a GPU, such as H100-80GB; a known MFU in place of the estimate
    network      of a plan: GB/s of a GPU's way to other nodes
    page         of a report: a page that shows it, such as docs/results.md, to be brought up to date
    KEY=VALUE    anything else is a setting for every run, such as data.path=DIR, grad_clip=null or device=cpu

run      trains the missing runs here, goes on with those that were cut off, and measures checkpoints where the
         experiment asks for it; Ctrl-C stops all of them, saved
submit   submits these runs as a SLURM array (slurm/sweep.sbatch of the checkout), without those that wait in the queue
         already; words with dashes go to sbatch, such as --nodes=2 --partition=gpu
report   writes OUT/EXPERIMENT/report: table.md, table.csv, table.tex, figure.png, figure.pdf
archive  copies runs that are done or diverged to the archives of the checkout, docs/results/runs, without weights and
         without the places of this machine

A run counts if its settings are those of the experiment, wherever it lies under OUT or in the archives. The exit status
is 0; 1 if a run failed; 2 for a wrong setting; 130 if interrupted.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from muown_train.cli.errors import report_errors
from muown_train.config.checks import check_int, is_number
from muown_train.config.compose import CONFIG_DIR
from muown_train.config.overrides import check_overrides, parse_overrides
from muown_train.experiments.archive import archive_experiment, list_kept_places
from muown_train.experiments.grid import Grid, list_grids, load_grid
from muown_train.experiments.launch import STOPPED, Launcher, make_measuring_task, make_training_task
from muown_train.experiments.progress import GridPointStatus, describe_damage, read_progress, summarize
from muown_train.experiments.report.page import fill_page, find_part
from muown_train.experiments.report.results import build_report
from muown_train.experiments.report.write import ReportWriter
from muown_train.experiments.slurm_queue import mark_queued_runs, submit_runs
from muown_train.runtime.formatting import fit_terminal
from muown_train.runtime.suggest import suggest_nearest

ROOT = CONFIG_DIR.parent  # the checkout, or the installed package where there is no checkout
ARCHIVE = ROOT / "docs" / "results" / "runs"


@dataclass
class Request:
    """The command's own keys, the settings for every run, and the words for sbatch."""

    experiment: str | None = None
    action: str = "list"
    out: str = "runs"
    scale: str | None = None
    points: int | None = None
    seeds: int | None = None
    series: list[str] | None = None
    jobs: int | None = None
    ranks: int | None = None
    device: str | None = None
    mfu: float | None = None
    network: float | None = None
    page: str | None = None
    overrides: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


KEYS = [field.name for field in fields(Request) if field.name not in ("overrides", "flags")]
_ONLY_FOR = {  # some keys are for these actions alone
    "jobs": ("run", "submit"),
    "ranks": ("run", "plan"),
    "device": ("plan",),
    "mfu": ("plan",),
    "network": ("plan",),
    "page": ("report",),
}


def main(words: Sequence[str]) -> int:
    """Run the command with the words that follow its name."""
    words = remove_dashes(words)
    if not words or {"-h", "--help"} & set(words):
        print_help()
        return 0
    with report_errors([word for word in words if not word.startswith("-")]):
        request = parse_request(words)
        grid = load_grid(str(request.experiment), request.scale)
        grid = grid.select(request.points, request.seeds, request.series)
        points = grid.expand(request.overrides)
        if request.page:
            find_part(Path(request.page), grid.folder)  # the report is made only if the page can show it
        if request.action == "archive":
            statuses = read_progress(grid, points, request.out)
        else:
            statuses = _mark_queued(read_progress(grid, points, request.out, ARCHIVE), request)
        if request.action != "list":
            for sentence in describe_damage(statuses):
                print(f"note: {sentence}", file=sys.stderr)
        return ACTIONS[request.action](grid, statuses, request)


def print_help() -> None:
    """Print what the command does, and the experiments."""
    grids = list_grids()
    width = max(map(len, grids))
    listed = "\n".join(f"experiment={name:<{width}}  {sentence}" for name, sentence in grids.items())
    print(fit_terminal(f"{__doc__}\n{listed}"))


def remove_dashes(words: Sequence[str]) -> list[str]:
    """Turn `--scale tiny` and `--scale=tiny` into `scale=tiny`, and so for the other keys of this command."""
    plain: list[str] = []
    for word in words:
        if plain and plain[-1].startswith("--") and plain[-1][2:] in KEYS:
            plain[-1] = f"{plain[-1][2:]}={word}"
        else:
            key, equals, _ = word.partition("=")
            plain.append(word[2:] if equals and key.startswith("--") and key[2:] in KEYS else word)
    return plain


def parse_request(words: Sequence[str]) -> Request:
    """Return what the words of the command line ask for.

    Raises:
        ValueError, HydraException: a word cannot be read, or a value is wrong.
    """
    flags = [word for word in words if word.startswith("-")]
    words = [word for word in words if not word.startswith("-")]
    request, overrides = Request(), []
    # experiment= is left out: Hydra would refuse an experiment that only the grid's error explains
    check_overrides([word for word in words if not word.startswith("experiment=")])
    for word, override in zip(words, parse_overrides(words), strict=True):
        if override.key_or_group == "series":
            request.series = word.partition("=")[2].strip("[]").split(",")
        elif override.is_sweep_override():
            raise ValueError(f"{word} is several values: the grid is the experiment's, others are one for all runs")
        elif override.key_or_group in KEYS and word not in ("device=auto", "device=cpu", "device=cuda"):
            setattr(request, override.key_or_group, override.value())
        else:
            overrides.append(word)
    request.overrides, request.flags = tuple(overrides), tuple(flags)
    _check_request(request)
    return request


def _check_request(request: Request) -> None:
    if request.action not in ACTIONS:
        near = suggest_nearest(request.action, ACTIONS)
        raise ValueError(f"there is no action={request.action}{near}; there are {', '.join(ACTIONS)}")
    for key, actions in _ONLY_FOR.items():
        value = getattr(request, key)
        if value is not None and request.action not in (*actions, "list"):
            is_nodes = key == "ranks" and request.action == "submit"
            hint = "; for submit sbatch's flags say it, such as --nodes=2" * is_nodes
            raise ValueError(f"{key}={value} is for {' and '.join(f'action={name}' for name in actions)}{hint}")
    if request.flags and request.action != "submit":
        raise ValueError(f"{request.flags[0]} is for sbatch, with action=submit; settings are key=value without dashes")
    for key in ("jobs", "points", "seeds", "ranks"):
        if getattr(request, key) is not None:
            setattr(request, key, check_int(key, getattr(request, key), 1))
    if request.mfu is not None and not (is_number(request.mfu) and 0 < request.mfu <= 1):
        raise ValueError(f"mfu={request.mfu} must be above 0 and at most 1")
    request.out = str(request.out)
    if not request.out or (Path(request.out).exists() and not Path(request.out).is_dir()):
        raise ValueError(f"out={request.out} must be a folder, there or not")
    request.page = None if request.page is None else str(request.page)
    if request.experiment is None:
        meant = "".join(suggest_nearest(word.partition("=")[0], ["experiment"]) for word in request.overrides)
        raise ValueError(f"experiment is not set{meant}: there are {', '.join(list_grids())}")
    if request.action in ("submit", "archive") and not (ROOT / "slurm" / "sweep.sbatch").exists():
        raise ValueError(
            f"action={request.action} needs a clone of the repository, since slurm/ and docs/ are in no wheel: "
            "clone it, install it with pip install -e, and call the command there"
        )


def _mark_queued(statuses: list[GridPointStatus], request: Request) -> list[GridPointStatus]:
    """Return the statuses updated from SLURM's queue; actions that start no run tolerate a queue that fails."""
    try:
        return mark_queued_runs(statuses, request.out, ROOT)
    except ValueError as error:
        if request.action in ("run", "submit"):
            raise
        print(f"note: {error}", file=sys.stderr)
        return statuses


def list_runs(grid: Grid, statuses: list[GridPointStatus], request: Request) -> int:
    """Print a line for each run."""
    print(f"{grid.name}: {grid.sentence}")
    _print_settings(grid, statuses)
    width = max(len(status.point.title) for status in statuses)
    print("\n".join(status.format_line(width) for status in statuses))
    if archived := sum(status.run is not None and status.folder.is_relative_to(ARCHIVE) for status in statuses):
        print(f"{archived} of them are kept in {ARCHIVE}")
    print(summarize(statuses))
    return 0


def _print_settings(grid: Grid, statuses: list[GridPointStatus]) -> None:
    for line in grid.describe_settings(status.point for status in statuses):
        print(line)


def plan_runs(grid: Grid, statuses: list[GridPointStatus], request: Request) -> int:
    """Print what the runs cost."""
    from muown_train.experiments.cost import describe_costs

    device = request.device or (grid.gpus.device if grid.gpus else None)
    if device is None:
        raise ValueError(f"experiment={grid.name} is for a CPU: a plan needs device=, such as device=H100-80GB")
    ranks = request.ranks or (1 if grid.scale or not grid.gpus else grid.gpus.ranks)
    _print_settings(grid, statuses)
    for line in describe_costs(grid, statuses, device, ranks, request.mfu, request.network):
        print(line, flush=True)
    return 0


def train_runs(grid: Grid, statuses: list[GridPointStatus], request: Request) -> int:
    """Train what is missing, and measure what is done."""
    pending = [status for status in statuses if status.needs_training]
    print(summarize(statuses))
    if not pending:
        elsewhere = sum(status.state == "running" for status in statuses)
        print("nothing to train" + f": {elsewhere} in training by another process" * bool(elsewhere))
        if not grid.measure:
            return 0
    import torch

    from muown_train.experiments.cost import check_runs

    ranks = request.ranks or 1
    check_runs([status.point for status in pending], ranks)  # an error is shown now, and not in the logs of the runs
    logs = Path(request.out) / grid.folder / "logs"
    launcher = Launcher(logs, request.jobs or 1, ranks, torch.cuda.device_count())
    exit_status = launcher.run([make_training_task(status, ranks) for status in pending]) if pending else 0
    if exit_status in STOPPED or not grid.measure:
        return exit_status
    statuses = read_progress(grid, [status.point for status in statuses], request.out, ARCHIVE)
    done = [status for status in statuses if status.state == "done"]
    kept = [status for status in done if (status.folder / "checkpoints").exists()]
    lost = [str(status.folder) for status in done if status not in kept and not _is_measured(status, grid.measure)]
    if lost:
        print(f"not measured, since no checkpoints are kept: {', '.join(lost)}")
    tasks = [make_measuring_task(status, measure, ranks) for measure in grid.measure for status in kept]
    return max(exit_status, launcher.run(tasks))


def _is_measured(status: GridPointStatus, measures: Sequence[str]) -> bool:
    kinds = [measure.split()[0] for measure in measures]
    return status.run is not None and all(status.run.read_lines(f"analysis/{kind}.jsonl") for kind in kinds)


def submit_missing(grid: Grid, statuses: list[GridPointStatus], request: Request) -> int:
    """Submit what is missing to SLURM, with an element of an array for each run."""
    pending = [status for status in statuses if status.needs_training]
    print(summarize(statuses))
    if not pending:
        print("nothing to submit")
        return 0
    from muown_train.experiments.cost import check_runs  # loads torch, which takes seconds

    check_runs([status.point for status in pending], 1)
    return submit_runs(pending, Path(request.out) / grid.folder, request.jobs or 8, request.flags, ROOT)


def write_report(grid: Grid, statuses: list[GridPointStatus], request: Request) -> int:
    """Write the tables and figures, and bring a page up to date that shows them."""
    writer = ReportWriter(build_report(grid, statuses, request.overrides))
    files = writer.write(Path(request.out) / grid.folder / "report")
    print("\n".join(table.format_markdown() for table in writer.tables))
    print("\n".join(writer.list_notes()))
    print(f"{files[0].parent}: {', '.join(path.name for path in files)}")
    if request.page:
        print(f"{request.page}: {fill_page(Path(request.page), grid.folder, writer.format_body(4), files)}")
    return 0


def archive_runs(grid: Grid, statuses: list[GridPointStatus], request: Request) -> int:
    """Copy what is done or diverged to the archives, where reports find it without OUT."""
    print(summarize(statuses))
    if not any(status.state in ("done", "diverged") for status in statuses):
        print("nothing to archive")
    width, places = max(len(status.folder.name) for status in statuses), dict[str, None]()
    for status, outcome in archive_experiment(grid, statuses, ARCHIVE):
        print(f"{status.folder.name:<{width}}  {outcome}", flush=True)
        places |= dict.fromkeys(list_kept_places(status.folder))
    for setting in places:
        print(f"note: {setting} is archived with its place on this machine, since it defines the runs")
    return 0


ACTIONS: dict[str, Callable[[Grid, list[GridPointStatus], Request], int]] = {
    "list": list_runs,
    "plan": plan_runs,
    "run": train_runs,
    "submit": submit_missing,
    "report": write_report,
    "archive": archive_runs,
}
