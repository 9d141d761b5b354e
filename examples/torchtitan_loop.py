"""Muown in the manner of torchtitan: groups of parameters by patterns, an optimizer per model part, DCP, FSDP2.

    torchrun --nproc-per-node=2 examples/torchtitan_loop.py --out runs/titan                # 20 steps
    torchrun --nproc-per-node=2 examples/torchtitan_loop.py --out runs/titan --steps 40     # 20 more

The model has torchtitan's names of parameters. What a torchtitan user adds to an optimizer's configuration are the
lines of PARAM_GROUPS and `resolve_optimizer`, which finds Muown by its name.
"""

import argparse
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import muown_train.optim
from muown_train.optim import Combined

DIM, HIDDEN, LENGTH = 32, 64, 32
QKV = (DIM, DIM // 2, DIM // 2)  # the rows of each part of the fused matrix
PARAM_GROUPS = [  # the first pattern that matches a name decides
    {"pattern": r"attention\.wqkv", "optimizer": "Muown", "role": "matrix", "blocks": QKV},
    {"pattern": r"attention\.wo|feed_forward", "optimizer": "Muown", "role": "matrix"},
    {"pattern": r"norm", "optimizer": "AdamW", "role": "vector", "weight_decay": 0.0},
    {"pattern": r"tok_embeddings", "optimizer": "AdamW", "role": "embedding"},
    {"pattern": r"output", "optimizer": "AdamW", "role": "head", "weight_decay": 0.1},
]
OPTIONS = {"Muown": {"lr": 0.01}, "AdamW": {"lr": 0.01, "betas": (0.9, 0.95)}}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def resolve_optimizer(name):
    """Return an optimizer's class by its name, ours or torch's."""
    return getattr(muown_train.optim, name, None) or getattr(torch.optim, name)


def build_optimizer(model):
    """Return one optimizer of a model part, with a part for each kind."""
    groups = [{**group, "params": []} for group in PARAM_GROUPS]
    for name, p in model.named_parameters():
        group = next(group for group in groups if re.search(group["pattern"], name))
        group["params"].append((name, p))
    kinds = dict.fromkeys(group["optimizer"] for group in groups)
    parts = [[group for group in groups if group["optimizer"] == kind] for kind in kinds]
    return Combined(*(resolve_optimizer(kind)(part, **OPTIONS[kind]) for kind, part in zip(kinds, parts, strict=True)))


class OptimizersContainer:
    """The optimizers of several model parts as one, whose state dict has the names of parameters as keys."""

    def __init__(self, model_parts):
        self.model_parts = model_parts
        self.optimizers = [build_optimizer(part) for part in model_parts]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self):
        pairs = zip(self.model_parts, self.optimizers, strict=True)
        return {key: value for pair in pairs for key, value in get_optimizer_state_dict(*pair, options=FLAT).items()}

    def load_state_dict(self, state_dict):
        for pair in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(*pair, state_dict, options=FLAT)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv = nn.Linear(DIM, 2 * DIM, bias=False)  # four heads of queries, two of keys and of values
        self.wo = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.wqkv(x).view(B, T, 8, DIM // 4).transpose(1, 2).split([4, 2, 2], dim=1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, DIM))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(DIM), Attention()
        self.ffn_norm, self.feed_forward = nn.RMSNorm(DIM), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(256, DIM)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(layers)})
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, 256, bias=False)

    def forward(self, tokens, targets):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        logits = self.output(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def draw_rows(text, step, rank, size, rows=12):
    """Return this rank's share of the rows of a step."""
    starts = torch.randint(len(text) - LENGTH, (rows,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + LENGTH + 1] for start in starts[rank::size]]).long()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/titan"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)

    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    optimizers = OptimizersContainer([model])
    if rank == 0:
        print(muown_train.optim.describe(optimizers.optimizers[0]))

    first, checkpoints = 0, sorted(args.out.glob("step-*"))
    if checkpoints:
        saved = {"model": model.state_dict(), "optimizer": optimizers.state_dict(), "steps": 0}
        dcp.load(saved, checkpoint_id=checkpoints[-1])
        model.load_state_dict(saved["model"])
        optimizers.load_state_dict(saved["optimizer"])
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
        optimizers.step()
        optimizers.zero_grad()
        if (step + 1) % 10 == 0:
            dist.all_reduce(loss := loss.detach() / size)
            if rank == 0:
                print(f"step {step + 1}  loss {loss.item():.4f}")
    saved = {"model": model.state_dict(), "optimizer": optimizers.state_dict(), "steps": args.steps}
    dcp.save(saved, checkpoint_id=args.out / f"step-{args.steps:06d}")
    return model


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
