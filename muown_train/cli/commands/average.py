"""Average checkpoints of a run: `muown-train average runs/NAME --last 5`.

Only weights are averaged, in float64; each keeps its dtype. The result is a run of its own beside the run, called
RUN-average or RUN-ema=DECAY. Commands that read runs (evaluate, sample, export) take it, but no run can resume from it.
A run keeps more than its two newest checkpoints with keep_every=N or keep_checkpoints=N.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.config.run_name import check_new_folder
from muown_train.runtime.formatting import escape_controls


def main(words: Sequence[str]) -> None:
    """Run the command with the words that follow its name."""
    parser = CommandParser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--steps", metavar="A,B,…", help="steps of the checkpoints to average (default: all whole ones)")
    which.add_argument("--last", type=int, metavar="N", help="average the newest N checkpoints")
    parser.add_argument("--ema", type=float, metavar="DECAY", help="exponential moving average in the order of steps: "
                        "A = DECAY A + (1 - DECAY) W, beginning with the first (default: the mean)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the result; it must not exist, or be empty")
    arguments = parser.parse_args(words)
    steps = parser.parse_steps(arguments.steps)
    if arguments.last is not None and arguments.last < 2:
        parser.error(f"--last {arguments.last} must be 2 or more")
    if arguments.ema is not None and not 0 <= arguments.ema < 1:
        parser.error(f"--ema {arguments.ema:g} must be at least 0 and below 1, such as 0.9")
    with report_errors([]):
        write_average(arguments, steps)


def write_average(arguments: argparse.Namespace, steps: list[int] | None) -> None:
    """Average the checkpoints and write the result; print the share of each."""
    run, decay = arguments.run, arguments.ema
    named = run if run.name not in ("", "..") else run.resolve()  # `.` has no name of its own
    out = arguments.out or named.with_name(f"{named.name}-{'average' if decay is None else f'ema={decay:g}'}")
    check_new_folder(out)
    if run.resolve() in out.resolve().parents:
        raise ValueError(f"{out} is in the run's own folder: give one beside it with --out")

    from muown_train.runs.averaging import average_weights, compute_shares, open_checkpoints
    from muown_train.runs.saved_run import describe_run, write_run

    checkpoints = open_checkpoints(run, steps, arguments.last)
    shares = compute_shares(len(checkpoints), decay)
    saved = describe_run(checkpoints[-1])
    try:
        tokenizer = saved.load_tokenizer().raw
    except ValueError:  # a run on random data has none
        tokenizer = None
    steps = [checkpoint.step for checkpoint in checkpoints]
    for step, share in zip(steps, shares, strict=True):
        print(f"step {step:>{len(str(steps[-1]))}}  {share:.4f}")
    weights = average_weights(checkpoints, shares)
    parameters = sum(weight.numel() for weight in weights.values())
    config = saved.config.to_dict() | {"name": out.name, "out": str(out.parent)}
    origin = {"average_of": {"run": str(run), "steps": steps, "shares": shares, "ema": decay}, "parameters": parameters}
    write_run(out, weights, config, saved.step, saved.data, tokenizer, origin)
    kind = "mean" if decay is None else f"exponential moving average, decay {decay:g},"
    print(escape_controls(f"{out}: {kind} of {len(steps)} checkpoints, {parameters:,} parameters"))
