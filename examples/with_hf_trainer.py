"""Hugging Face's Trainer with Muown: a small GPT-2 of random weights learns a text, byte by byte.

    python examples/with_hf_trainer.py --out runs/trainer               # 40 steps
    python examples/with_hf_trainer.py --out runs/trainer --steps 80    # 40 more: it continues from the last checkpoint

It prints where each parameter goes, then Trainer's lines, such as {'loss': '5.2', 'learning_rate': '0.005', ...}. The
text is that of a module of Python; `--text FILE` takes another one.
"""

import argparse
from pathlib import Path

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

from muown_train.optim import Combined, Muown, describe, param_groups

LR = 0.005


class Bytes(torch.utils.data.Dataset):
    """A text as rows of bytes. Trainer shifts the labels."""

    def __init__(self, path, length=64):
        tokens = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def build_model(width=64, layers=2):
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=width, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    for block in model.transformer.h:  # c_attn is three matrices; param_groups sees that GPT-2 stores all transposed
        block.attn.c_attn.row_blocks = (width, width, width)
    return model


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    args = parser.parse_args(argv)

    model = build_model()
    matrix, rest = param_groups(model)
    optimizer = Combined(Muown(matrix, lr=LR), torch.optim.AdamW(rest, lr=LR, weight_decay=0.0))
    scheduler = transformers.get_constant_schedule_with_warmup(optimizer, num_warmup_steps=10)
    print(describe(optimizer))

    arguments = transformers.TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        logging_steps=10,
        save_steps=10,
        report_to="none",
        disable_tqdm=True,
    )
    # with None in place of the scheduler, Trainer makes the one that `lr_scheduler_type` names, for `max_steps`
    trainer = transformers.Trainer(model, arguments, train_dataset=Bytes(args.text), optimizers=(optimizer, scheduler))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if args.out.exists() else None)
    return model


if __name__ == "__main__":
    main()
