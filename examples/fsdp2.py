"""FSDP2: a small Transformer of torch.nn whose parameters are sharded over ranks learns a text, byte by byte.

    torchrun --nproc-per-node=2 examples/fsdp2.py --out runs/fsdp2                # 20 steps
    torchrun --nproc-per-node=3 examples/fsdp2.py --out runs/fsdp2 --steps 40     # 20 more, on another number of ranks

Muown takes the DTensors that fully_shard makes as they are: each rank moves its rows, and a matrix is put together on
one rank for its orthogonalisation alone. The checkpoint is torch.distributed.checkpoint's, which any number of ranks
loads.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from muown_train.optim import Combined, Muown, describe, param_groups

LENGTH = 32


class Transformer(nn.Module):
    def __init__(self, dim=32, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, 256)
        self.head.role = "head"  # which the other optimizer takes
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def draw_rows(text, step, rank, size, rows=12):
    """Return this rank's share of the rows of a step."""
    starts = torch.randint(len(text) - LENGTH, (rows,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + LENGTH + 1] for start in starts[rank::size]]).long()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)

    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    matrix, rest = param_groups(model)  # after fully_shard, which makes the parameters anew
    optimizer = Combined(Muown(matrix, lr=0.01), torch.optim.AdamW(rest, lr=0.01, weight_decay=0.0))
    if rank == 0:
        print(describe(optimizer))

    first, checkpoints = 0, sorted(args.out.glob("step-*"))
    if checkpoints:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "steps": 0}
        dcp.load(saved, checkpoint_id=checkpoints[-1])
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        first = saved["steps"]
    if first >= args.steps:
        if rank == 0:
            print(f"there is nothing to do: {checkpoints[-1]} is there, and --steps {args.steps}")
        return model

    for step in range(first, args.steps):
        rows = draw_rows(text, step, rank, size)
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            dist.all_reduce(loss := loss.detach() / size)
            if rank == 0:
                print(f"step {step + 1}  loss {loss.item():.4f}")
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "steps": args.steps}
    dcp.save(saved, checkpoint_id=args.out / f"step-{args.steps:06d}")
    return model


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
