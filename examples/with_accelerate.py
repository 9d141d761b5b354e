"""A loop with Hugging Face's accelerate: a small Mixtral of random weights learns a text, byte by byte.

    python examples/with_accelerate.py --out runs/accelerate               # 2 epochs
    python examples/with_accelerate.py --out runs/accelerate --epochs 4    # 2 more: it continues from the last state
    accelerate launch examples/with_accelerate.py --out runs/accelerate    # the same under accelerate's launcher

It prints where each parameter goes, then the loss of each epoch. The matrices of the experts, stored as
(experts, out, in), go to Muown one by one.
"""

import argparse
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader

from muown_train.optim import Combined, Muown, describe, param_groups


def read_rows(path, rows=256, length=64):
    tokens = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
    return tokens[: rows * length].view(rows, length)


def build_model():
    config = transformers.MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    args = parser.parse_args(argv)

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = build_model()
    matrix, rest = param_groups(model)
    optimizer = Combined(Muown(matrix, lr=0.005), torch.optim.AdamW(rest, lr=0.005, weight_decay=0.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    loader = DataLoader(read_rows(args.text), batch_size=8, shuffle=True)
    accelerator.print(describe(optimizer))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    states = sorted(args.out.glob("epoch-*"))
    if states:
        accelerator.load_state(states[-1])
        accelerator.print(f"continues from {states[-1]}")
    for epoch in range(len(states) + 1, args.epochs + 1):
        total = torch.zeros((), device=accelerator.device)
        for rows in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=rows, labels=rows).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach()
        accelerator.print(f"epoch {epoch}  loss {total.item() / len(loader):.4f}")
        accelerator.save_state(args.out / f"epoch-{epoch:04d}")
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main()
