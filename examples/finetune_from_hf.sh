#!/usr/bin/env bash
# Train a model of transformers on your texts with Muown, and write it as a model of transformers again:
#
#     hf download Qwen/Qwen2-0.5B --local-dir qwen2
#     bash examples/finetune_from_hf.sh qwen2 'texts/**/*.txt' model=qwen2_0_5b model.rope_base=1e6 \
#         tokens=1e7 batch_tokens=32768 seq_len=1024 micro_batch=2 optim.lr=3e-4
#     python -c 'from transformers import pipeline; print(pipeline("text-generation", "runs/finetuned-qwen2/hf")("Once"))'
#
# The folder is what save_pretrained writes: a Qwen2, or a Llama with tied embeddings, as many heads of keys and values as
# of queries, and no biases. `muown-train import` prints the settings model=… that say its sizes, which must be given. The
# same command again continues a run that was interrupted.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: $0 FOLDER TEXTS model=... [SETTING...]" >&2
    exit 2
fi
folder=$1 texts=$2
shift 2
for word in "$@"; do
    case $word in name=* | out=* | init_from=*)
        echo "$word: this script names the run itself, after the folder of the model" >&2
        exit 2 ;;
    esac
done
base=$(basename "$(realpath "$folder")")
base=${base//[^A-Za-z0-9._-]/_}

if [ ! -e "runs/imported-$base" ]; then
    muown-train import "$folder" --out "runs/imported-$base"
fi
muown-train name="finetuned-$base" init_from="runs/imported-$base" \
    data=files data.train="$texts" data.tokenizer="$folder/tokenizer.json" "$@"
muown-train export "runs/finetuned-$base"
