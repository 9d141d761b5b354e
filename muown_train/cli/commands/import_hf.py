"""Read a model of Hugging Face's transformers as a run: `python scripts/import_hf.py DIR --out runs/NAME`.

DIR holds config.json, model.safetensors and tokenizer.json, as save_pretrained or scripts/export_hf.py write them, of a
Llama with tied embeddings, as many heads of keys and values as of queries and no biases, or of a Qwen2. What is written
holds weights, configuration and tokenizer: all that reads runs reads it, and init_from= trains on from it.
"""

from collections.abc import Sequence
from pathlib import Path

from muown_train.cli.errors import CommandParser, report_errors


def main(words: Sequence[str]) -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to read")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run to write")
    arguments = parser.parse_args(words)
    with report_errors([]):
        from muown_train.runs.hf.import_hf import import_folder, suggest_overrides

        print(f"{arguments.folder} -> {arguments.out}", flush=True)
        imported = import_folder(arguments.folder, arguments.out)
        words = suggest_overrides(imported.model)
    print(f"  {imported.model['_target_'].rpartition('.')[2]}, {imported.parameters:,} parameters")
    if not imported.tokenizer:
        print("  no tokenizer.json there: it can be trained on, and neither sampled nor exported")
    print(f"  to train on: python -m muown_train init_from={arguments.out} {' '.join(words)} data=…")
