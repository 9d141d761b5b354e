"""The average of a run's checkpoints as a run of its own: `python scripts/average.py runs/NAME --last 5`.

Only weights are averaged, in float64; each keeps its dtype. The result, RUN-average or RUN-ema=DECAY beside the run, is
read by whatever reads runs (evaluate, sample, export) and cannot be trained on. A run keeps more than its two newest
checkpoints with keep_every=N or keep_checkpoints=N.
"""

from collections.abc import Sequence
from pathlib import Path

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.config.run_name import check_new_folder


def main(words: Sequence[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--steps", metavar="A,B,…", help="of the checkpoints to average (default: all that are whole)")
    which.add_argument("--last", type=int, metavar="N", help="the newest N checkpoints")
    parser.add_argument("--ema", type=float, metavar="DECAY", help="exponential moving average in their order: "
                        "A = DECAY A + (1 - DECAY) W, beginning with the first (default: the mean)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the result; it must not exist, or be empty")
    arguments = parser.parse_args(words)
    run, decay, steps = arguments.run, arguments.ema, parser.parse_steps(arguments.steps)
    if arguments.last is not None and arguments.last < 2:
        parser.error(f"--last {arguments.last} must be 2 or more")
    if decay is not None and not 0 <= decay < 1:
        parser.error(f"--ema {decay:g} must be at least 0 and below 1, such as 0.9")
    with report_errors([]):
        named = run if run.name not in ("", "..") else run.resolve()  # `.` has a name too
        out = arguments.out or named.with_name(f"{named.name}-{'average' if decay is None else f'ema={decay:g}'}")
        check_new_folder(out)
        if run.resolve() in out.resolve().parents:
            raise ValueError(f"{out} is in the run's own folder: give one beside it with --out")

        from muown_train.runs.averaging import averaged, chosen, coefficients
        from muown_train.runs.saved_run import describe_run, write_run

        checkpoints = chosen(run, steps, arguments.last)
        shares = coefficients(len(checkpoints), decay)
        saved = describe_run(checkpoints[-1])
        try:
            tokenizer = saved.load_tokenizer().raw
        except ValueError:  # random data have none
            tokenizer = None
        taken = [checkpoint.step for checkpoint in checkpoints]
        for step, share in zip(taken, shares, strict=True):
            print(f"step {step:>{len(str(taken[-1]))}}  {share:.4f}")
        weights = averaged(checkpoints, shares)
        config = {**saved.config.to_dict(), "name": out.name, "out": str(out.parent)}
        origin = {
            "average_of": {"run": str(run), "steps": taken, "shares": shares, "ema": decay},
            "parameters": sum(weight.numel() for weight in weights.values()),
        }
        write_run(out, weights, config, saved.step, saved.data, tokenizer, origin)
    what = "mean" if decay is None else f"exponential moving average, decay {decay:g},"
    print(f"{out}: {what} of {len(taken)} checkpoints, {origin['parameters']:,} parameters")
