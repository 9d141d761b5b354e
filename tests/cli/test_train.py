"""From a command to a step: the command line is parsed once, and few frames lie between `main` and `train_step`."""

import sys

from muown_train.cli import main as entry
from muown_train.config import compose, schema
from muown_train.training.trainer import Trainer
from tests.cli.test_main import call, small


def test_at_most_eight_frames_lead_from_main_to_a_step(corpus, tmp_path, monkeypatch):
    frames: list[str] = []
    train_step = Trainer.train_step

    def watch(trainer: Trainer):
        frame = sys._getframe().f_back  # of whoever called train_step
        frames[:] = ["train_step"]
        while frame is not None:
            frames.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")
            if frame.f_code is entry.main.__code__:
                break
            frame = frame.f_back
        return train_step(trainer)

    monkeypatch.setattr(Trainer, "train_step", watch)
    assert call(monkeypatch, *small(corpus, tmp_path, "name=frames", "tokens=256"))[0] is None
    assert frames[-1] == "muown_train.cli.main.main" and len(frames) <= 8, frames


def test_the_command_line_is_composed_and_checked_once(corpus, tmp_path, monkeypatch):
    counts = {"composed": 0, "checked": 0}
    hydra_compose, check = compose.compose, schema.RunConfig.__post_init__

    def count_compose(*args, **options):
        counts["composed"] += 1
        return hydra_compose(*args, **options)

    def count_check(config):
        counts["checked"] += 1
        check(config)

    monkeypatch.setattr(compose, "compose", count_compose)
    monkeypatch.setattr(schema.RunConfig, "__post_init__", count_check)
    assert call(monkeypatch, *small(corpus, tmp_path, "name=once", "tokens=256"))[0] is None
    assert counts == {"composed": 1, "checked": 1}


def test_earlier_names_of_keys_are_taken_with_a_sentence(corpus, tmp_path, monkeypatch):
    words = small(corpus, tmp_path, "name=renamed", "tokens=256", "check_every=7", "model.checkpointed=1")
    status, said = call(monkeypatch, *words)
    assert status is None
    assert "check_every is called replica_check_every now" in said
    assert "model.checkpointed is called model.activation_checkpointing now" in said
    stored = (tmp_path / "renamed" / "config.yaml").read_text()
    assert "replica_check_every: 7" in stored and "activation_checkpointing: 1" in stored
