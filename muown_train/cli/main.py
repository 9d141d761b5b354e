"""The command line: `muown-train COMMAND …`, or `muown-train key=value …` to train."""

import importlib
import sys

from muown_train.cli.process import WRONG, check_ranks, exit_with, run_command
from muown_train.cli.terminal import format_output
from muown_train.runtime.extras import explain_import_error

# name -> module with a function `main`, or module:function, and what it does
COMMANDS = {
    "train": ("muown_train.cli.train", "train a model, or go on with a run that stopped (the default)"),
    "prepare": ("muown_train.cli.commands.prepare", "tokenize a data set into shards"),
    "tokenizer": ("muown_train.cli.commands.prepare:main_tokenizer", "train a tokenizer on text files"),
    "evaluate": ("muown_train.cli.commands.evaluate", "measure the loss of runs on a text"),
    "sample": ("muown_train.cli.commands.sample", "write text with a trained model"),
    "average": ("muown_train.cli.commands.average", "average checkpoints of a run"),
    "compare": ("muown_train.cli.commands.compare", "put runs side by side in a table and a figure"),
    "export": ("muown_train.cli.commands.hf:main_export", "write a run as a Hugging Face folder"),
    "import": ("muown_train.cli.commands.hf:main_import", "read a Hugging Face folder as a run"),
    "analyze": ("muown_train.cli.commands.analyze", "measure spectra, ranks and noise of checkpoints"),
    "plan": ("muown_train.cli.commands.plan", "estimate the memory and time of a run"),
    "reproduce": ("muown_train.cli.commands.reproduce", "list, run and report an experiment of the paper"),
    "significance": ("muown_train.cli.commands.significance", "test whether runs are below a loss"),
    "dashboard": ("muown_train.cli.commands.dashboard", "make a dashboard of runs at W&B"),
}


def main() -> int | None:
    """Run the command that the first word names, or train. Any status but 0 is returned or raised as SystemExit."""
    try:
        return _run_command_of_words()
    except ImportError as error:
        sentence = explain_import_error(error)
        if sentence is None:
            raise
        exit_with(f"error: {sentence}", WRONG)


def _run_command_of_words() -> int | None:
    try:
        check_ranks()
    except ValueError:
        from muown_train.cli.errors import report_errors  # imports libraries, before which commands handle signals

        with report_errors([]):
            raise
    words = sys.argv[1:]
    name = words.pop(0) if words and words[0] in COMMANDS else "train"
    sys.argv = [f"muown-train {name}", *words]  # usage texts and manifests show these words
    module, _, function = COMMANDS[name][0].partition(":")
    status: int | None = getattr(importlib.import_module(module), function or "main")(words)
    return status


def run() -> None:
    """Run the command line and end the process with its status."""
    format_output()
    run_command(main)


def run_moved_script(name: str) -> None:
    """Run the command that a script of an earlier version became, and say its name on standard error."""
    print(f"note: {sys.argv[0]} is `muown-train {name}` now", file=sys.stderr)
    sys.argv.insert(1, name)
    run()
