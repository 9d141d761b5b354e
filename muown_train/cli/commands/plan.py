"""What a run will cost, before it costs anything: `python scripts/plan.py model=500m --device H100-80GB --ranks 8`.

Prints parameters, updates, the memory of each GPU and whether it suffices, and how long the run takes. The settings are
those of `python -m muown_train`; nothing is trained or downloaded, and no GPU is needed. Time is an estimate of
`muown_train/roofline.py`, or follows from an MFU that you know (`--mfu`).
"""

from collections.abc import Sequence

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.runtime.hardware import GPUS
from muown_train.training.plan import of_memory, of_parameters, of_time, planned


def main(words: Sequence[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as of python -m muown_train")
    parser.add_argument("--device", default="H100-80GB", help=f"{', '.join(GPUS)} (default H100-80GB)")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs (default 1)")
    parser.add_argument("--mfu", type=float, help="a known one, from 0 to 1; by default a roofline")
    arguments = parser.parse_intermixed_args()
    if arguments.mfu is not None and not 0 < arguments.mfu <= 1:
        parser.error(f"--mfu {arguments.mfu:g} must be above 0 and at most 1")
    with report_errors(arguments.settings):
        plan = planned(arguments.settings, arguments.device, arguments.ranks)
        lines = [*of_parameters(plan), *of_memory(plan), *of_time(plan, arguments.mfu)]
    print("\n".join(lines))
