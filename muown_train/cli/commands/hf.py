"""Exchange models with Hugging Face's transformers: `muown-train export RUN`, `muown-train import FOLDER --out RUN`."""

from collections.abc import Sequence
from pathlib import Path

from muown_train.cli.errors import CommandParser, report_errors
from muown_train.runtime.formatting import escape_controls
from muown_train.runtime.redaction import redact

_EXPORT = """Write a run as a folder that Hugging Face's transformers load: `muown-train export runs/NAME`.

The folder, RUN/hf by default, holds weights (safetensors), configuration, tokenizer and a model card that describes the
run; AutoModelForCausalLM and AutoTokenizer load it. An earlier export there is replaced; a folder with any other file
is refused.

--push also uploads it to a repository of the Hugging Face hub, which is made if it is not there: a private one, unless
--public is given. It needs a token that may write, from `hf auth login` or in HF_TOKEN.
"""
_IMPORT = """Read a folder of Hugging Face's transformers as a run: `muown-train import FOLDER --out runs/NAME`.

FOLDER holds config.json, model.safetensors and tokenizer.json, as save_pretrained or muown-train export write them.
The model is a Qwen2, or a Llama with tied embeddings, as many heads of keys and values as of queries, and no biases.
The run holds weights, configuration and tokenizer: every command that reads runs takes it, and init_from= trains on
from it.
"""


def main_export(words: Sequence[str]) -> None:
    """Run `muown-train export` with the words that follow its name."""
    parser = CommandParser(_EXPORT)
    parser.add_argument("run", metavar="RUN", help="folder of a run, or of one of its checkpoints")
    parser.add_argument("--out", type=Path, help="folder of the export (default RUN/hf)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default the newest)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (float32)")
    parser.add_argument("--push", metavar="OWNER/NAME", help="repository of the Hugging Face hub to upload it to")
    parser.add_argument("--public", action="store_true", help="let anyone read the repository, if --push makes it")
    arguments = parser.parse_args(words)
    if arguments.public and arguments.push is None:
        parser.error("--public says who may read the repository of --push OWNER/NAME: give that too")
    with report_errors([]):
        from muown_train.runs.hf.push import check_push, push_folder

        if arguments.push is not None:
            check_push(arguments.push)
        import torch

        from muown_train.runs.hf.export import export_run
        from muown_train.runs.saved_run import open_run
        from muown_train.runs.status import read_status

        saved = open_run(arguments.run, arguments.step)
        out = arguments.out or saved.folder / "hf"
        state = read_status(saved.folder).get("state", "finished")  # imported models and averages have no status
        note = f" (the run has not finished: {state})" * (state != "finished")
        print(escape_controls(f"{saved.folder} after step {saved.step:,}{note} -> {out}"), flush=True)
        summary = export_run(saved, out, getattr(torch, arguments.dtype))
        names = ", ".join(sorted(path.name for path in out.iterdir()))
        cut = f" ({summary['cut']} padded rows cut off)" * bool(summary["cut"])
        vocabulary = f"vocabulary {summary['vocabulary']:,}{cut}"
        print(f"  {summary['architecture']}, {summary['parameters']:,} parameters, {vocabulary}")
        print(f"  {arguments.dtype}, {summary['bytes'] / 1e6:,.1f} MB: {names}", flush=True)
        if arguments.push is not None:
            message = redact(f"{saved.folder.name} after step {saved.step:,}")
            url = push_folder(out, arguments.push, not arguments.public, message)
            print(escape_controls(f"  pushed to {url}"))


def main_import(words: Sequence[str]) -> None:
    """Run `muown-train import` with the words that follow its name."""
    parser = CommandParser(_IMPORT)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder to read")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run to write")
    arguments = parser.parse_args(words)
    with report_errors([]):
        from muown_train.runs.hf.import_hf import import_folder, suggest_overrides

        print(f"{arguments.folder} -> {arguments.out}", flush=True)
        imported = import_folder(arguments.folder, arguments.out)
        overrides = suggest_overrides(imported.model)
    print(f"  {imported.model['_target_'].rpartition('.')[2]}, {imported.parameters:,} parameters")
    if imported.tokenizer is None:
        print("  no tokenizer.json there: the run can be trained on, but neither sampled nor exported")
    print(escape_controls(f"  to train on: muown-train init_from={arguments.out} {' '.join(overrides)} data=…"))
