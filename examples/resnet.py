"""A ResNet-18 in plain PyTorch: its convolutions go to Muown as matrices.

    python examples/resnet.py --out runs/resnet              # 40 steps
    python examples/resnet.py --out runs/resnet --steps 80   # 40 more: it continues from the checkpoint

It prints where each parameter goes, then the loss every ten steps. The images are stripes in one of four directions,
made here; `--width 64` is the full ResNet-18 of 11M parameters.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu

from muown_train.optim import Combined, Muown, describe, param_groups


class BasicBlock(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.shortcut = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x):
        return relu(self.bn2(self.conv2(relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential()
        for i in range(4):
            self.blocks.append(BasicBlock(sizes[i], sizes[i + 1], stride=1 if i == 0 else 2))
            self.blocks.append(BasicBlock(sizes[i + 1], sizes[i + 1], stride=1))
        self.head = nn.Linear(8 * width, classes)
        self.head.role = "head"  # a plain model does not say which layer is its output

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def draw_batch(step, size=16, pixels=32):
    """Return images (size, 3, pixels, pixels) of noisy stripes and their directions (size,), the same for each step."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(4, (size,), generator=generator)
    shifts = 6.28 * torch.rand(size, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(pixels), torch.arange(pixels), indexing="ij")
    directions = torch.stack([x, y, x + y, x - y])[labels]  # (size, pixels, pixels)
    images = torch.sin(0.8 * directions + shifts).unsqueeze(1)
    return images + torch.randn(size, 3, pixels, pixels, generator=generator), labels


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/resnet"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=8)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    net = ResNet18(args.width, classes=4)
    matrix, rest = param_groups(net, conv="matrix")
    optimizer = Combined(Muown(matrix, lr=0.005), torch.optim.AdamW(rest, lr=0.005, weight_decay=0.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    print(describe(optimizer))

    checkpoint, done = args.out / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        done = saved["done"]
        print(f"continues after step {done}")
    if done >= args.steps:
        print(f"there is nothing to do: --steps {args.steps}")

    for step in range(done, args.steps):
        images, labels = draw_batch(step)
        loss = cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0 or step + 1 == args.steps:
            print(f"step {step + 1}  loss {loss.item():.4f}")
            saved = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
            saved = {name: part.state_dict() for name, part in saved.items()} | {"done": step + 1}
            torch.save(saved, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    return net


if __name__ == "__main__":
    main()
