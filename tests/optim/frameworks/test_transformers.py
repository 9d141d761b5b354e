"""Hugging Face's Trainer with `optimizers=(optimizer, None)`: it resumes exactly."""

import pytest
import torch

from .models import build_data, build_model, build_optimizer, check_equal_models

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs, self.labels = build_data()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, i):
        return {"inputs": self.inputs[i], "labels": self.labels[i]}


def train(folder, resume=None, steps=12):
    model = build_model()
    optimizer = build_optimizer(model)
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        save_steps=5,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer


def test_resume(tmp_path):
    whole, trainer = train(tmp_path)
    resumed, again = train(tmp_path, resume=str(tmp_path / "checkpoint-5"))
    check_equal_models(whole, resumed)
    assert trainer.state.log_history[-2]["loss"] == again.state.log_history[-2]["loss"]
    assert trainer.get_learning_rates() == again.get_learning_rates()
    trained = build_model()
    assert not any(torch.equal(p, q) for p, q in zip(whole.parameters(), trained.parameters(), strict=True))
