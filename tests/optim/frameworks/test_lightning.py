"""Lightning: its Trainer resumes exactly, with a callback that unfreezes a backbone and adds its parameters."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from muown_train.optim import Combined, Muown, param_groups

from .models import Net, build_data, build_optimizer, check_equal_models

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

lightning = pytest.importorskip("lightning.pytorch")
finetuning = pytest.importorskip("lightning.pytorch.callbacks").BaseFinetuning


class Module(lightning.LightningModule):
    def __init__(self, is_named=True):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.is_named = is_named
        self.seen = []

    def training_step(self, batch, _):
        loss = self.net(*batch)["loss"]
        self.seen.append(len(self.optimizers().param_groups))  # through Lightning's wrapper
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        if self.is_named:
            optimizer = build_optimizer(self)
        else:
            trained = [p for p in self.parameters() if p.requires_grad]
            optimizer = Combined(
                Muown([p for p in trained if p.ndim == 2], lr=0.02),
                torch.optim.AdamW([p for p in trained if p.ndim < 2], lr=0.01),
            )
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


class UnfreezeByRole(finetuning):
    """Unfreezes the backbone in epoch 1 and gives its parameters to the optimizer by their roles."""

    def freeze_before_training(self, module):
        self.freeze(module.net.backbone, train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch >= 1:  # a resumed run freezes at its start
            self.make_trainable(module.net.backbone)
        if epoch == 1:
            matrix, rest = param_groups(module.net.backbone)
            for group in matrix + rest:
                optimizer.add_param_group(group | {"lr": 0.005})


class UnfreezeAsLightningDoes(UnfreezeByRole):
    """Adds one group without names and roles."""

    def finetune_function(self, module, epoch, optimizer):
        if epoch >= 1:
            self.make_trainable(module.net.backbone)
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.backbone, optimizer, lr=0.005)


def fit(folder, epochs, callbacks=(), ckpt_path=None, is_named=True):
    module = Module(is_named)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[*callbacks, lightning.callbacks.LearningRateMonitor()],
        default_root_dir=folder,
        accelerator="cpu",
        logger=lightning.loggers.CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, DataLoader(TensorDataset(*build_data()), batch_size=8), ckpt_path=ckpt_path, weights_only=False)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module, trainer


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("unfreeze", [None, UnfreezeByRole, UnfreezeAsLightningDoes])
@pytest.mark.parametrize("stop", [1, 2])
def test_resume(unfreeze, stop, is_named, tmp_path):
    callbacks = (lambda: [unfreeze()]) if unfreeze else list
    whole, trainer = fit(tmp_path / "whole", 3, callbacks(), is_named=is_named)
    fit(tmp_path / "half", stop, callbacks(), is_named=is_named)
    resumed, other = fit(tmp_path / "half", 3, callbacks(), tmp_path / "half" / "last.ckpt", is_named)
    check_equal_models(whole, resumed)
    assert whole.seen[-1] == resumed.seen[-1] == len(trainer.optimizers[0].param_groups)
    one, two = trainer.optimizers[0], other.optimizers[0]
    assert [type(part).__name__ for part in two.optimizers] == ["Muown", "AdamW"]
    for part, again in zip(one.optimizers, two.optimizers, strict=True):
        assert [len(group["params"]) for group in part.param_groups] == [
            len(group["params"]) for group in again.param_groups
        ]
    if unfreeze is UnfreezeByRole:
        assert len(two.optimizers[0].param_groups) > 1
