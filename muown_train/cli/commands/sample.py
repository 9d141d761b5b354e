"""Write text with a trained model, as it is made: `muown-train sample RUN "prompt"`.

The text goes to standard output, everything else to standard error. A prompt is read as it stands; without one the
model begins a document. A sample ends where the model ends the document, or after --tokens. The model reads rows as
long as those it was trained on: once a row is full, it starts anew from the last half of it.

With --interactive each line of standard input is a prompt, until its end. Ctrl-C ends the present sample; a second one
at once, or while a prompt is awaited, ends the command.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count, islice

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.cli.process import INTERRUPTED, exit_with
from muown_train.runtime.formatting import escape_controls

TWICE = 2.0  # seconds within which a second Ctrl-C ends an interactive command too


def main(words: Sequence[str]) -> None:
    """Run the command with the words that follow its name."""
    arguments = parse_arguments(words)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # the terminal may not have all letters
    with report_errors([]):
        try:
            write_samples(arguments)
        except KeyboardInterrupt:
            exit_with("\ninterrupted", INTERRUPTED)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse and check the words that follow the command's name."""
    parser = CommandParser(__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run, or of one of its checkpoints")
    parser.add_argument("prompt", nargs="?", help="beginning of the text; - reads standard input")
    parser.add_argument("-i", "--interactive", action="store_true", help="ask for prompts, one after the other")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of a sample (default 200)")
    parser.add_argument("--count", type=int, default=1, help="number of samples (default 1)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, help="draw from the likeliest K tokens (default all)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the fewest likeliest tokens that have this probability together (default 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first sample; the next one has 1 more (default 0)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default the newest)")
    parser.add_argument("--precision", help="auto, bfloat16 or float32 (default the run's)")
    parser.add_argument("--device", help="such as cpu or cuda:1 (default a GPU if there is one)")
    arguments = parser.parse_intermixed_args(words)  # the prompt may follow flags that follow RUN
    for name in ("tokens", "count"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)} must be 1 or more")
    if arguments.interactive and arguments.prompt is not None:
        parser.error("--interactive reads prompts from standard input: leave out the prompt")
    if not 0 <= arguments.seed < 2**63:
        parser.error(f"--seed {arguments.seed} must be from 0 to 2^63 - 1")
    return arguments


def write_samples(arguments: argparse.Namespace) -> None:
    """Draw the samples and write them to standard output piece by piece."""
    from muown_train.data.text.tokenizer import begin_document
    from muown_train.models.generate import Sampling, stream_text, stream_tokens
    from muown_train.runs.saved_run import open_run
    from muown_train.runtime import hardware
    from muown_train.runtime.formatting import format_speed

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    device = hardware.find_device(arguments.device)
    saved = open_run(arguments.run, arguments.step)
    if arguments.precision:
        saved = saved.with_precision(arguments.precision)
    tokenizer = saved.load_tokenizer()
    end = tokenizer.end_of_text
    model = saved.load_model(device)
    seeds, interrupted = count(arguments.seed), -math.inf  # the time of the last Ctrl-C
    for prompt in read_prompts(arguments):
        ids = tokenizer.encode_batch([prompt])[0].tolist() if prompt else begin_document(tokenizer)
        try:
            for seed in islice(seeds, arguments.count):
                if arguments.count > 1:
                    write(f"--- seed {seed} ---\n")
                write(prompt)
                drawn: list[int] = []
                started = time.monotonic()
                with saved.autocast(device):
                    tokens = stream_tokens(
                        model, ids, arguments.tokens, saved.config.seq_len, sampling, seed, tokenizer.size
                    )
                    for piece in stream_text(tokenizer.decode, take_until(end, tokens, drawn), ids if prompt else ()):
                        write(piece)
                write("\n")
                note = ", the document's end" * (drawn[-1] == end)
                speed = len(drawn) / (time.monotonic() - started)
                print(f"[{len(drawn)} tokens{note}, {format_speed(speed)}]", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            before, interrupted = interrupted, time.monotonic()
            if not arguments.interactive or interrupted - before < TWICE:
                raise
            write("\n")
            print("[interrupted]", file=sys.stderr, flush=True)


def read_prompts(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the prompts: the one that is given, or with --interactive the lines of standard input as they come."""
    if not arguments.interactive:
        yield sys.stdin.read() if arguments.prompt == "-" else arguments.prompt or ""
        return
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # lets `input` edit lines and bring earlier ones back
        print("each line is a prompt; Ctrl-C ends a sample, Ctrl-D the command", file=sys.stderr, flush=True)
    mark = "> " if is_terminal and sys.stdout.isatty() else ""  # a file of samples holds nothing else
    with suppress(EOFError):
        while True:
            yield input(mark)


def take_until(end: int, tokens: Iterator[int], drawn: list[int]) -> Iterator[int]:
    """Yield the tokens before `end`; add all that were drawn, `end` too, to `drawn`."""
    for token in tokens:
        drawn.append(token)
        if token == end:
            return
        yield token


def write(text: str) -> None:
    """Write text to standard output at once. A model may draw control characters, and a pipe may end at a terminal."""
    print(escape_controls(text), end="", flush=True)
