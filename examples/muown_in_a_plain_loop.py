"""Muown in a plain loop of PyTorch: a small Transformer learns a text, byte by byte.

    python examples/muown_in_a_plain_loop.py --out runs/plain               # 100 steps
    python examples/muown_in_a_plain_loop.py --out runs/plain --steps 200   # 100 more: it continues from the checkpoint

It prints where each parameter goes, then the loss every ten steps. The text is that of a module of Python; `--text`
takes another file.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from muown_train.optim import Combined, Muown, describe, param_groups

LENGTH = 64


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.qkv.row_blocks = (dim, dim, dim)  # three matrices in one, which move separately
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, dim=64, layers=2, heads=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, dim), nn.Embedding(LENGTH, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.head = nn.Linear(dim, 256, bias=False)
        self.head.role = "head"  # an output layer, which AdamW takes

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.blocks(x))


def draw_rows(text, step, rows=16):
    """Return rows (rows, LENGTH + 1) of the text, the same for each step."""
    starts = torch.randint(len(text) - LENGTH, (rows,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + LENGTH + 1] for start in starts]).long()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/plain"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    args = parser.parse_args(argv)
    if not args.text.is_file() or args.text.stat().st_size <= LENGTH:
        parser.error(f"--text {args.text} must be a file of more than {LENGTH} bytes")
    args.out.mkdir(parents=True, exist_ok=True)
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)

    torch.manual_seed(0)
    model = Transformer()
    matrix, rest = param_groups(model)
    optimizer = Combined(Muown(matrix, lr=0.01), torch.optim.AdamW(rest, lr=0.01, weight_decay=0.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    print(describe(optimizer))

    checkpoint, done = args.out / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        done = saved["done"]
        print(f"continues after step {done}")
    if done >= args.steps:
        print(f"there is nothing to do: --steps {args.steps}")
        return model

    for step in range(done, args.steps):
        rows = draw_rows(text, step)
        loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0 or step + 1 == args.steps:
            print(f"step {step + 1}  loss {loss.item():.4f}")

    saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    saved = {name: part.state_dict() for name, part in saved.items()} | {"done": args.steps}
    torch.save(saved, checkpoint.with_suffix(".tmp"))
    os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    return model


if __name__ == "__main__":
    main()
