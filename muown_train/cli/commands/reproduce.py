"""An experiment of the paper: `python scripts/reproduce.py experiment=500m_multiseed` lists its runs and their states.

    action       list (default; starts nothing), plan, run, submit, report, archive
    out          folder of all runs (runs); those of an experiment are in OUT/EXPERIMENT or OUT/EXPERIMENT-SCALE
    scale        tiny (seconds a run) or small (minutes): the same experiment with small models, on data=stdlib
    points       so many of each grid of learning rates, evenly spread
    seeds        so many of the seeds
    series       some of the settings compared, such as series=muown_wd0,muon_wd0
    jobs         runs at a time (run: 1, their threads share the cores; submit: 8)
    ranks        processes of each run, on a GPU each (run: 1; plan: as the experiment's file says)
    device, mfu  of a plan: such as H100-80GB; a known MFU in place of the roofline
    page         of a report: a page that shows it, such as docs/results.md, to be brought up to date
    KEY=VALUE    anything else is a setting for every run, such as data.path=DIR or paper_exact=true

run     trains here what is missing, goes on with what was cut off, and measures checkpoints where the experiment asks
        for it; Ctrl-C stops all, saved
submit  does so as a SLURM array (slurm/sweep.sbatch); words with dashes go to sbatch: --nodes=2 --partition=gpu
        what such jobs have in the queue already is left out
report  writes OUT/EXPERIMENT/report: table.md, table.csv, table.tex, figure.png, figure.pdf
archive copies what is done or diverged to docs/results/runs, without weights and without places of this machine

A run counts if its settings are those of the experiment, wherever under OUT or docs/results/runs it lies. Exit status:
0; 1 a run failed; 2 a setting that cannot be; 130 interrupted.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muown_train.experiments.grid import Experiment
    from muown_train.experiments.progress import Found

ROOT = Path(__file__).resolve().parents[1]
ARCHIVE = ROOT / "docs" / "results" / "runs"
ACTIONS = ("list", "plan", "run", "submit", "report", "archive")
DEFAULTS: dict[str, Any] = {
    "experiment": None,
    "action": "list",
    "out": "runs",
    "scale": None,
    "points": None,
    "seeds": None,
    "series": None,
    "jobs": None,
    "ranks": None,
    "device": None,
    "mfu": None,
    "page": None,
}
ONLY = {  # of the keys those that are for some actions
    "jobs": ("run", "submit"),
    "ranks": ("run", "plan"),
    "device": ("plan",),
    "mfu": ("plan",),
    "page": ("report",),
}


def settings(words: list[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Our own keys, checked; the overrides for every run; the words for sbatch."""
    from muown_train.config.checks import check_int, is_number
    from muown_train.config.overrides import check_overrides, parse_overrides
    from muown_train.runtime.suggest import suggest_nearest

    flags = [word for word in words if word.startswith("-")]
    words = [word for word in words if not word.startswith("-")]
    own, further = dict(DEFAULTS), []
    check_overrides([word for word in words if not word.startswith("experiment=")])  # which are more than ours
    for word, override in zip(words, parse_overrides(words), strict=True):
        if override.key_or_group == "series":
            own["series"] = word.partition("=")[2].strip("[]").split(",")
        elif override.is_sweep_override():
            raise ValueError(f"{word} is several values: the grid is the experiment's, others are one for all runs")
        elif override.key_or_group in DEFAULTS:
            own[override.key_or_group] = override.value()
        else:
            further.append(word)
    if own["action"] not in ACTIONS:
        near = suggest_nearest(str(own["action"]), ACTIONS)
        raise ValueError(f"there is no action={own['action']}{near}; there are {', '.join(ACTIONS)}")
    for key, actions in ONLY.items():
        if own[key] is not None and own["action"] not in (*actions, "list"):
            hint = "; for submit sbatch's flags say it, such as --nodes=2" * (
                key == "ranks" and own["action"] == "submit"
            )
            raise ValueError(f"{key}={own[key]} is for {' and '.join(f'action={name}' for name in actions)}{hint}")
    if flags and own["action"] != "submit":
        raise ValueError(f"{flags[0]} is for sbatch, with action=submit; settings are key=value without dashes")
    for key in ("jobs", "points", "seeds", "ranks"):
        if own[key] is not None:
            own[key] = check_int(key, own[key], 1)
    if own["mfu"] is not None and not (is_number(own["mfu"]) and 0 < own["mfu"] <= 1):
        raise ValueError(f"mfu={own['mfu']} must be above 0 and at most 1")
    own["out"] = str(own["out"])
    if not own["out"] or (Path(own["out"]).exists() and not Path(own["out"]).is_dir()):
        raise ValueError(f"out={own['out']} must be a folder, there or not")
    return own, further, flags


def without_dashes(words: list[str]) -> list[str]:
    """`--scale tiny` and `--scale=tiny` as `scale=tiny`, and so for our other keys."""
    plain: list[str] = []
    for word in words:
        if plain and plain[-1].startswith("--") and plain[-1][2:] in DEFAULTS:
            plain[-1] = f"{plain[-1][2:]}={word}"
        else:
            key, equals, _ = word.partition("=")
            plain.append(word[2:] if equals and key.startswith("--") and key[2:] in DEFAULTS else word)
    return plain


def plan(experiment: "Experiment", found: "list[Found]", own: dict[str, Any]) -> int:
    """Print what the runs cost."""
    from muown_train.experiments.cost import plan_lines

    gpus = experiment.gpus
    device = own["device"] or (gpus and gpus.device)
    if device is None:
        raise ValueError(f"experiment={experiment.name} is for a CPU: a plan needs device=, such as device=H100-80GB")
    ranks = own["ranks"] or (1 if experiment.scale or not gpus else gpus.ranks)
    for line in plan_lines(experiment, found, device, ranks, own["mfu"]):
        print(line, flush=True)
    return 0


def run(experiment: "Experiment", found: "list[Found]", own: dict[str, Any]) -> int:
    """Train what is missing, and measure what is done."""
    from muown_train.experiments.launch import STOPPED, Launcher, Task, python, training
    from muown_train.experiments.progress import progress, summary

    wanted = [each for each in found if each.wanted]
    print(summary(found))
    if not wanted:
        elsewhere = sum(each.state == "running" for each in found)
        print("nothing to train" + f": {elsewhere} in training by another process" * bool(elsewhere))
        if not experiment.measure:
            return 0
    import torch

    from muown_train.experiments.cost import check_runs

    ranks = own["ranks"] or 1
    check_runs([each.cell for each in wanted], ranks)  # an error now, not in the runs' logs
    logs = Path(own["out"]) / experiment.folder / "logs"
    launcher = Launcher(logs, own["jobs"] or 1, ranks, torch.cuda.device_count())
    status = launcher.run([training(each, ranks) for each in wanted]) if wanted else 0
    if status == STOPPED or not experiment.measure:
        return status
    found = progress(experiment, [each.cell for each in found], own["out"], ARCHIVE)
    ended = [each for each in found if each.state == "done"]
    done = [each for each in ended if (each.folder / "checkpoints").exists()]
    measures = [shlex.split(each) for each in experiment.measure]
    files = [f"analysis/{kind}.jsonl" for kind, *_ in measures]
    measured = [each for each in ended if all(each.run and each.run.read_lines(file) for file in files)]
    if bare := [each for each in ended if each not in done and each not in measured]:
        print(f"not measured, since no checkpoints are kept: {', '.join(str(each.folder) for each in bare)}")
    tasks = []
    for kind, *rest in measures:
        for each in done:  # what has been measured is not measured again
            program = [*python(ranks), str(ROOT / "scripts" / "analyze.py"), kind, str(each.folder), *rest]
            log = f"{each.folder.name}-{kind}"
            tasks.append(Task(each.cell.name, log, program, kind, partial(str, kind), partial(str, f"{kind} measured")))
    return max(status, launcher.run(tasks))


def submit(experiment: "Experiment", found: "list[Found]", own: dict[str, Any], flags: list[str]) -> int:
    """Give what is missing to SLURM, an element of an array for each run."""
    from muown_train.experiments.launch import line_of
    from muown_train.experiments.progress import summary
    from muown_train.experiments.slurm_queue import keep_job
    from muown_train.runtime.atomic_files import write_atomic

    wanted = [each for each in found if each.wanted]
    print(summary(found))
    if not wanted:
        print("nothing to submit")
        return 0
    from muown_train.experiments.cost import check_runs  # which loads torch

    check_runs([each.cell for each in wanted], 1)
    if shutil.which("sbatch") is None:
        raise ValueError("action=submit needs sbatch, which is not here: submit from a login node, or action=run")
    if Path.cwd() != ROOT:
        raise ValueError(f"call action=submit in {ROOT}: its jobs run there, where relative paths would be others")
    jobs, folder = own["jobs"] or 8, Path(own["out"]) / experiment.folder
    folder.mkdir(parents=True, exist_ok=True)
    runs = folder / f"submitted-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    write_atomic(runs, "".join(f"{line_of(each)}\n" for each in wanted).encode())
    print(f"{runs}: {len(wanted)} runs, at most {jobs} at a time", flush=True)
    environment = os.environ | {"AT_ONCE": str(jobs)}
    sweep = str(ROOT / "slurm" / "sweep.sbatch")
    words = [sweep, *flags, f"@{runs.resolve()}"]
    done = subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    if done.returncode == 0 and not keep_job(runs, done.stdout):
        print("note: sbatch named no job: a further action=submit will not know of these runs until they begin")
    return done.returncode


def archive(experiment: "Experiment", found: "list[Found]") -> int:
    """Copy what is done or diverged to where reports find it without OUT."""
    from muown_train.experiments.archive import archive_experiment, list_kept_places
    from muown_train.experiments.progress import summary

    print(summary(found))
    if not any(each.state in ("done", "diverged") for each in found):
        print("nothing to archive")
    width, stay = max(len(each.folder.name) for each in found), dict[str, None]()
    for each, done in archive_experiment(experiment, found, ARCHIVE):
        print(f"{each.folder.name:<{width}}  {done}", flush=True)
        stay |= dict.fromkeys(list_kept_places(each.folder))
    for setting in stay:
        print(f"note: {setting} is archived with its place on this machine, since it defines the runs")
    return 0


def queued(found: "list[Found]", own: dict[str, Any]) -> "list[Found]":
    """What the queue says of them; what only looks goes on without it."""
    from muown_train.experiments.slurm_queue import with_queue

    try:
        return with_queue(found, own["out"], ROOT)
    except ValueError as error:
        if own["action"] in ("run", "submit"):
            raise
        print(f"note: {error}", file=sys.stderr)
        return found


def main(words: Sequence[str]) -> int:
    words = without_dashes(list(words))
    if not words or {"-h", "--help"} & set(words):
        from muown_train.experiments.grid import names

        print(__doc__)
        known = names()
        width = max(map(len, known))
        print("\n".join(f"experiment={name:<{width}}  {sentence}" for name, sentence in known.items()))
        return 0
    from muown_train.cli.errors import report_errors

    with report_errors([word for word in words if not word.startswith("-")]):
        from muown_train.experiments.grid import load_experiment, names
        from muown_train.experiments.progress import damages, progress, summary
        from muown_train.experiments.report.page import check_page
        from muown_train.runtime.suggest import suggest_nearest

        own, further, flags = settings(words)
        if own["experiment"] is None:
            meant = "".join(suggest_nearest(word.partition("=")[0], ["experiment"]) for word in further)
            raise ValueError(f"experiment is not set{meant}: there are {', '.join(names())}")
        experiment = load_experiment(str(own["experiment"]), own["scale"])
        experiment = experiment.part(own["points"], own["seeds"], own["series"])
        cells = experiment.cells(further)
        if own["page"]:
            check_page(Path(str(own["page"])), experiment.folder)
        if own["action"] == "archive":
            found = progress(experiment, cells, own["out"])
        else:
            found = queued(progress(experiment, cells, own["out"], ARCHIVE), own)
        if own["action"] != "list":
            for sentence in damages(found):
                print(f"note: {sentence}", file=sys.stderr)
        if own["action"] == "archive":
            return archive(experiment, found)
        if own["action"] == "plan":
            return plan(experiment, found, own)
        if own["action"] == "run":
            return run(experiment, found, own)
        if own["action"] == "submit":
            return submit(experiment, found, own, flags)
        if own["action"] == "report":
            from muown_train.experiments.report.page import fill
            from muown_train.experiments.report.results import report

            made = report(experiment, found, further)
            paths = made.write(Path(own["out"]) / experiment.folder / "report")
            print("\n".join(table.markdown() for table in made.tables))
            print("\n".join(made.notes()))
            print(f"{paths[0].parent}: {', '.join(path.name for path in paths)}")
            if own["page"]:
                print(f"{own['page']}: {fill(Path(str(own['page'])), experiment.folder, made.body(4), paths)}")
            return 0
        print(f"{experiment.name}: {experiment.sentence}")
        width = max(len(each.cell.name) for each in found)
        print("\n".join(each.line(width) for each in found))
        if kept := sum(each.run is not None and each.folder.is_relative_to(ARCHIVE) for each in found):
            print(f"{kept} of them are kept in {ARCHIVE}")
        print(summary(found))
    return 0
