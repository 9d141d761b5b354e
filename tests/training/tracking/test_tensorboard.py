"""TensorBoard: what it reads back is what training did, through a restart and a rollback."""

import importlib.util
import json
import math

import pytest

from muown_train.training.tracking.tensorboard_sink import TensorBoardSink

pytest.importorskip("tensorboard")


def record(folder, batches) -> list[str]:
    said: list[str] = []
    sink = TensorBoardSink(finish_timeout=30, warn=said.append)
    sink.start(folder, {"optim": {"lr": 0.01}, "hub": {"token": "hf_" + "x" * 30}}, 12)
    for first, last, loss in batches:
        steps = range(first, last + 1)
        lines = [{"step": i, "tokens": 8 * i, "train/loss": loss + i, "data/hash": "ab"} for i in steps]
        lines[0]["sample"] = f"a sample of {first}"
        sink.write(lines)
    sink.finish({"valid/loss": 1.0})
    return said


def test_read_back_after_a_restart_and_a_rollback(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert record(tmp_path, [(0, 3, 100), (4, 7, 100)]) == []
    # goes on after step 5, and in this process is taken back to step 8
    assert record(tmp_path, [(6, 8, 200), (9, 11, 200), (9, 12, 300)]) == []
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert sorted(events.Tags()["scalars"]) == ["tokens", "train/loss"]
    expected = {i: (100 if i < 6 else 200 if i < 9 else 300) + i for i in range(13)}
    assert {event.step: event.value for event in events.Scalars("train/loss")} == expected
    assert len(events.Scalars("train/loss")) == 13
    samples = {event.step: event.tensor_proto.string_val[0] for event in events.Tensors("sample/text_summary")}
    assert samples[6] == b"```\na sample of 6\n```"
    config = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert json.loads(config.strip("`\n")) == {"optim": {"lr": 0.01}, "hub": {"token": "***"}}


def test_flags_and_numbers_that_are_none(tmp_path):
    said: list[str] = []
    sink = TensorBoardSink(warn=said.append)
    sink.start(tmp_path, {}, 2)
    sink.write([{"step": 1, "train/loss": math.nan, "train/skipped": True, "train/skipped_updates": 1}])
    sink.finish({})
    assert said == [] and list((tmp_path / "tensorboard").glob("events.*"))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    (sentence,) = record(tmp_path, [(0, 3, 1)])
    assert sentence.startswith("TensorBoard: ") and sentence.endswith("no longer recording there")


def test_without_the_package_one_sentence(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    with pytest.raises(ValueError, match=r"^the library tensorboard is not .*\[tensorboard\]'`"):
        TensorBoardSink()
