"""Text from a trained model, as it is made: `python scripts/sample.py RUN "prompt"`.

The text goes to standard output, all else to standard error. A prompt is read as it stands; without one the model
begins a document. A sample ends with the document, or after --tokens. The model reads the rows that it was trained on:
once one is full it starts anew from the last half of it.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

from muown_train.cli.errors import INTERRUPTED, CommandParser, exit_with, report_errors
from muown_train.data.text.tokenizer import HubTokenizer
from muown_train.models.generate import Sampling, stream_text, stream_tokens
from muown_train.runs.saved_run import open_run
from muown_train.runtime import hardware
from muown_train.training.tracking.console import rate


def until(end: int, ids: Iterator[int], made: list[int]) -> Iterator[int]:
    """Ids before `end`; all that came, it too, are added to `made`."""
    for new in ids:
        made.append(new)
        if new == end:
            return
        yield new


def shown(text: str) -> None:
    print(text, end="", flush=True)


def arguments_of(words: list[str]) -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or that of one of its checkpoints")
    parser.add_argument("prompt", nargs="?", default="", help="what the text begins with; - reads standard input")
    parser.add_argument("--tokens", type=int, default=200, help="of a sample at most (default 200)")
    parser.add_argument("--count", type=int, default=1, help="samples (default 1)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, help="draw from so many of the likeliest tokens (default all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the fewest likeliest that have this probability (default 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first sample; the next one's is 1 more (default 0)")
    parser.add_argument("--step", type=int, help="the checkpoint after so many updates (default the newest)")
    parser.add_argument("--precision", help="auto, bfloat16 or float32 (default the run's)")
    parser.add_argument("--device", help="such as cpu or cuda:1 (default a GPU if there is one)")
    arguments = parser.parse_args(words)
    for name in ("tokens", "count"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)} must be 1 or more")
    if not 0 <= arguments.seed < 2**63:
        parser.error(f"--seed {arguments.seed} must be from 0 to 2^63 - 1")
    return arguments


def sample(arguments: argparse.Namespace) -> None:
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    device = hardware.usable_device(arguments.device)
    saved = open_run(arguments.run, arguments.step)
    if arguments.precision:
        saved = saved.with_precision(arguments.precision)
    tokenizer = saved.load_tokenizer()
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    model = saved.load_model(device)
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        if arguments.count > 1:
            shown(f"--- seed {seed} ---\n")
        shown(prompt)
        ids = prompt_ids(tokenizer, prompt)
        made: list[int] = []
        begun = time.monotonic()
        with saved.autocast(device):
            new = stream_tokens(model, ids, arguments.tokens, saved.config.seq_len, sampling, seed, tokenizer.size)
            for piece in stream_text(tokenizer.decode, until(tokenizer.end_of_text, new, made), ids if prompt else ()):
                shown(piece)
        ended = ", the document's end" * (made[-1] == tokenizer.end_of_text)
        shown("\n")
        speed = len(made) / (time.monotonic() - begun)
        print(f"[{len(made)} tokens{ended}, {rate(speed)}]", file=sys.stderr, flush=True)


def prompt_ids(tokenizer: HubTokenizer, prompt: str) -> list[int]:
    """Ids to go on from; those of no prompt are the beginning of a document."""
    return tokenizer.encode_batch([prompt])[0].tolist() if prompt else [tokenizer.end_of_text]


def main(words: Sequence[str]) -> None:
    arguments = arguments_of(list(words))
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # where the terminal has not all letters
    with report_errors([]):
        try:
            sample(arguments)
        except KeyboardInterrupt:
            exit_with("\ninterrupted", INTERRUPTED)
