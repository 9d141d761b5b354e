"""Check a GPU in ten minutes: `python scripts/check_gpu.py [PART …] [--minutes 10] [--out FILE.json]`.

The parts, in this order unless you name some:

    tests       the tests marked gpu: optimizers, models, runs, and two ranks on one GPU
    train       tokens per second, MFU, parts of a step and peak memory of the 124M and the 500M model, compiled and in
                bfloat16, beside a plain loop with torch.optim.Muon and beside the estimates of `muown-train plan`
    optimizers  time of a step of each optimizer, and for each shape of matrices, and the number of kernels it launches
    attention   time of each implementation of attention, and the one that torch takes by itself
    compare     models of width 256 trained with Muown, Muon and AdamW, as many as the minutes that are left allow

Each part is a process of its own with a share of the minutes, so a part that fails or hangs takes nothing from the
others, and what it had measured until then is kept. A table is printed after each part, and everything is written as
JSON at the end. `--dry-run` runs all of this code on the CPU with tiny sizes; its numbers mean nothing.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from gpu_limits import ROOT, Limits, Row

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.cli.process import run_script
from muown_train.runtime.hardware import find_device

# part -> its module, its function there, and the share that it gets of the time that is left when it starts
PARTS = {
    "tests": ("gpu_tests", "run_tests", 0.4),
    "train": ("gpu_training", "measure_training", 0.65),
    "optimizers": ("gpu_kernels", "measure_optimizers", 0.6),
    "attention": ("gpu_kernels", "measure_attention", 0.4),
    "compare": ("gpu_training", "compare_optimizers", 1.0),
}
START = 20.0  # seconds that a part gets on top for starting Python


def ask(*command: str) -> str | None:
    """Return the first line that a command prints; None if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # there is no such command
        return None
    return done.stdout.split("\n")[0] or None


def describe_machine() -> Row:
    """Return the names and versions that results depend on."""
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    machine["commit"] = ask("git", "rev-parse", "HEAD")
    if torch.cuda.is_available():
        machine["driver"] = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        machine["gpu"] = torch.cuda.get_device_name()
        machine["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return machine


def run_part(name: str, arguments: argparse.Namespace, seconds: float) -> Row:
    """Run a part in a process of its own for so many seconds, and return what it measured and how it ended."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows, errors = Path(folder, "rows"), Path(folder, "errors")
        command = [sys.executable, __file__, name, "--rows", str(rows), "--minutes", str(seconds / 60)]
        command += ["--dry-run"] * arguments.dry_run + ["--models", arguments.models]
        command += ["--data", arguments.data] if arguments.data else []
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if arguments.dry_run:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        with errors.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file, start_new_session=True)
            state = wait_for_part(process, seconds + START)
        written = rows.read_text().splitlines() if rows.exists() else []
        result: Row = {"state": state, "seconds": round(time.monotonic() - started, 1)}
        result["rows"] = [json.loads(line) for line in written if line.endswith("}")]
        if state != "done":
            result["error"] = errors.read_text()[-3000:]
    return result


def wait_for_part(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Return how a part ended; one that takes too long is ended with all processes that it started."""
    try:
        return "failed" if process.wait(seconds) else "done"
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure_part(name: str, arguments: argparse.Namespace) -> None:
    """Run a part in this process, and write each row as soon as it is there."""
    module, function, _ = PARTS[name]
    measure = getattr(import_module(module), function)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    deadline = time.monotonic() + 60 * arguments.minutes
    limits = Limits(device, arguments.dry_run, deadline, arguments.models.split(","), arguments.data)
    with open(arguments.rows, "a") as file:
        for row in measure(limits):
            print(json.dumps(row), file=file, flush=True)


def format_value(value: Any) -> str:
    """Return the text of a cell."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def format_tables(rows: list[Row]) -> str:
    """Return the tables of a part as Markdown."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row["table"], []).append({key: value for key, value in row.items() if key != "table"})
    lines = []
    for title, own in tables.items():
        columns = list(dict.fromkeys(key for row in own for key in row))
        lines += [f"\n**{title}**\n", "| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
        lines += ["| " + " | ".join(format_value(row.get(column)) for column in columns) + " |" for row in own]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"by default all: {' '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all parts together (default 10)")
    parser.add_argument("--models", default="124m,500m", help="models of `train` and `optimizers` (default 124m,500m)")
    parser.add_argument("--data", help="for `compare`: a folder of prepared shards, or a glob of text files")
    parser.add_argument("--out", type=Path, help="file of the results as JSON")
    parser.add_argument("--dry-run", action="store_true", help="run everything on the CPU with tiny sizes")
    parser.add_argument("--rows", help=argparse.SUPPRESS)  # run one part in this process, and write its rows here
    arguments = parser.parse_args()
    for name in arguments.parts:
        if name not in PARTS:
            parser.error(f"there is no part {name}; there are {', '.join(PARTS)}")
    for name in arguments.models.split(","):
        if name not in ("124m", "500m"):
            parser.error(f"--models {name} must be 124m, 500m or both")
    if arguments.minutes <= 0:
        parser.error(f"--minutes {arguments.minutes} must be above 0")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.rows:
        measure_part(arguments.parts[0], arguments)
        return 0
    parts = [name for name in PARTS if name in (arguments.parts or PARTS)]
    with report_errors([]):  # a GPU that torch does not reach is an error
        skipped = not arguments.dry_run and find_device().type == "cpu"
    if skipped:
        for name in parts:
            print(f"{name}: skipped, since torch finds no GPU (--dry-run runs its code on the CPU)")
        return 0
    end = time.monotonic() + 60 * arguments.minutes
    results: Row = {"machine": {"dry_run": True} if arguments.dry_run else {}, "parts": {}}
    results["machine"] |= describe_machine()
    print(", ".join(f"{key} {value}" for key, value in results["machine"].items()), flush=True)
    for i, name in enumerate(parts):
        left = end - time.monotonic() - START
        share = 1.0 if i + 1 == len(parts) else PARTS[name][2]
        result = run_part(name, arguments, share * left) if left > 0 else {"state": "out of time", "rows": []}
        results["parts"][name] = result
        print(
            f"\n## {name}: {result['state']}, {result.get('seconds', 0)} s{format_tables(result['rows'])}", flush=True
        )
        if "error" in result:
            print(f"\n{result['error']}", flush=True)
        if arguments.out:  # after each part, so that an interruption loses little
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    bad = [row for part in results["parts"].values() for row in part["rows"] if row.get("failed")]
    return int(bool(bad) or any(part["state"] == "failed" for part in results["parts"].values()))


if __name__ == "__main__":
    run_script(main)
