"""Estimate what a run costs before it starts: `muown-train plan model=500m --device H100-80GB --ranks 8`.

Prints parameters, steps, the memory of each GPU and whether it suffices, and how long the run takes, with what is
assumed (`muown_train/analysis/cost/step_time.py` says where it comes from), or by an MFU that you know (`--mfu`).
Settings are the same as for training, and one more:

    network=25       GB/s of a GPU's way to other nodes; by default the device's usual one

Nothing is trained or downloaded, and no GPU is needed.
"""

from collections.abc import Sequence

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.runtime.hardware import GPUS
from muown_train.training.plan import describe_memory, describe_parameters, describe_time, make_plan


def parse_number(word: str, unit: str) -> float:
    """Return the number of a word such as network=25.

    Raises:
        ValueError: it has none; the message names the unit.
    """
    key, _, text = word.partition("=")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key}={text} must be a positive number{unit}") from None


def main(words: Sequence[str]) -> None:
    """Print the plan of a run."""
    parser = CommandParser(__doc__)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the run, as for training")
    parser.add_argument("--device", default="H100-80GB", help=f"one of {', '.join(GPUS)} (default H100-80GB)")
    parser.add_argument("--ranks", type=int, default=1, help="number of GPUs (default 1)")
    parser.add_argument("--mfu", type=float, help="an MFU of whole steps that you know, from 0 to 1")
    arguments = parser.parse_intermixed_args(list(words))
    if arguments.mfu is not None and not 0 < arguments.mfu <= 1:
        parser.error(f"--mfu {arguments.mfu:g} must be above 0 and at most 1")
    with report_errors(arguments.settings):
        own = [word for word in arguments.settings if word.startswith("network=")]
        network = parse_number(own[-1], " of GB/s") if own else None
        settings = [word for word in arguments.settings if word not in own]
        plan = make_plan(settings, arguments.device, arguments.ranks, network)
        lines = [*describe_parameters(plan), *describe_memory(plan), *describe_time(plan, arguments.mfu)]
    print("\n".join(lines))
