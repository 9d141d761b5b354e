"""Write a run's model as Hugging Face's transformers load it: `python scripts/export_hf.py runs/NAME`.

The folder, RUN/hf by default, holds weights (safetensors), configuration, tokenizer and a model card with the run's
facts; AutoModelForCausalLM and AutoTokenizer load it. An earlier export there is replaced; a folder with any other file
is refused.
"""

from collections.abc import Sequence
from pathlib import Path

from muown_train.cli.errors import CommandParser, report_errors


def main(words: Sequence[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run, or of one of its checkpoints")
    parser.add_argument("--out", type=Path, help="folder of the export (default RUN/hf)")
    parser.add_argument("--step", type=int, help="after which update (default the newest checkpoint)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (float32)")
    arguments = parser.parse_args(words)
    with report_errors([]):
        import torch

        from muown_train.runs.hf.export import export_run
        from muown_train.runs.saved_run import open_run

        saved = open_run(arguments.run, arguments.step)
        out = arguments.out or saved.folder / "hf"
        print(f"{saved.folder} after update {saved.step:,} -> {out}", flush=True)
        facts = export_run(saved, out, getattr(torch, arguments.dtype))
    cut = f" ({facts['cut']} padded rows cut off)" * bool(facts["cut"])
    print(f"  {facts['architecture']}, {facts['parameters']:,} parameters, vocabulary {facts['vocabulary']:,}{cut}")
    print(
        f"  {arguments.dtype}, {facts['bytes'] / 1e6:,.1f} MB: {', '.join(sorted(path.name for path in out.iterdir()))}"
    )
