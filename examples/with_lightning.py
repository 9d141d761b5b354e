"""Lightning with Muown: a callback unfreezes the backbone of a conv net later, and the run can be resumed.

    python examples/with_lightning.py --out runs/lightning               # 3 epochs
    python examples/with_lightning.py --out runs/lightning --epochs 6    # 3 more: it continues from last.ckpt

It prints where each parameter goes at the start and after unfreezing, and the loss of each epoch. The backbone is
random here; yours would be pretrained. The images are stripes in one of four directions, made here.
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from muown_train.optim import Combined, Muown, describe, param_groups


def make_data(rows=128, pixels=16):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (rows,), generator=generator)
    shifts = 6.28 * torch.rand(rows, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(pixels), torch.arange(pixels), indexing="ij")
    images = torch.sin(0.8 * torch.stack([x, y, x + y, x - y])[labels] + shifts).unsqueeze(1)
    return TensorDataset(images + 0.5 * torch.randn(rows, 1, pixels, pixels, generator=generator), labels)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        )
        self.hidden = nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)
        self.head.role = "head"

    def forward(self, images):
        return self.head(self.hidden(self.backbone(images).mean((2, 3))).relu())

    def train_dataloader(self):
        # Lightning restores no random numbers; the order of this sampler depends on the epoch alone
        data = make_data()
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(data, batch_size=16, sampler=sampler)

    def training_step(self, batch, _):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch}  loss {self.trainer.callback_metrics['loss']:.4f}")

    def configure_optimizers(self):
        matrix, rest = param_groups(self, conv="matrix")  # what is frozen comes later
        optimizer = Combined(Muown(matrix, lr=0.01), torch.optim.AdamW(rest, lr=0.01, weight_decay=0.0))
        print(describe(optimizer))
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4)}


class UnfreezeBackbone(BaseFinetuning):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, module):
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch >= self.epoch:  # not ==: a resumed run freezes again at its start
            self.make_trainable(module.backbone)
        if epoch == self.epoch:  # a checkpoint of a later epoch brings the groups along
            matrix, rest = param_groups(module.backbone, conv="matrix")
            for group in matrix + rest:  # the role of a group says which part takes it
                params = [(f"backbone.{name}", p) for name, p in group["params"]]
                optimizer.add_param_group(group | {"params": params, "lr": 0.003})
            print(describe(optimizer))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args(argv)

    pl.seed_everything(0, workers=True)
    module = Classifier()
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        callbacks=[UnfreezeBackbone(epoch=1), ModelCheckpoint(args.out, save_last=True)],
        default_root_dir=args.out,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = args.out / "last.ckpt"
    trainer.fit(module, ckpt_path=last if last.exists() else None)
    return module


if __name__ == "__main__":
    main()
