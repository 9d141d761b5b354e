"""Checkpoints written while training goes on: what may happen between save() and publication, and what stays."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from muown_train.runs import checkpoint_files
from muown_train.runs.checkpoint import DTYPES, Checkpoints, HostCopy
from muown_train.runs.checkpoint_reader import read_newest_metadata
from muown_train.runtime.distributed import World
from tests.runs.test_checkpoint import HERE, Box, assert_same, some_state


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def numbers(value: float, elements: int = 1000) -> dict:
    return {"x": Box({"w": torch.full((elements,), float(value))})}


def value_in(folder: Path) -> tuple[int, float] | None:
    """Step and value of the newest checkpoint of `numbers`, of which every element is checked."""
    opened = Checkpoints(folder, HERE).open_newest()
    if opened is None:
        return None
    w = opened.tensors["x/w"][...]
    assert (w == w[0]).all()
    return opened.step, float(w[0])


@pytest.fixture
def gate(monkeypatch):
    """An event without which nothing is written."""
    opened = threading.Event()
    write = checkpoint_files.write_rank

    def waiting(*args):
        assert opened.wait(20)
        return write(*args)

    monkeypatch.setattr(checkpoint_files, "write_rank", waiting)
    yield opened
    opened.set()


def test_what_changes_after_save_does_not_reach_the_checkpoint(tmp_path, gate):
    checkpoints = Checkpoints(tmp_path, HERE, metadata={"id": "a"})
    w, rest = torch.ones(1000), {"rows": [1]}
    checkpoints.save(1, {"x": Box({"w": w, **rest})}, loss=2.5)
    w.zero_()
    rest["rows"].append(2)
    checkpoints.metadata["id"] = "b"
    assert checkpoints.settle() is False and read_newest_metadata(tmp_path) is None
    assert names(tmp_path) == ["partial-step-00000001"]
    gate.set()
    assert checkpoints.settle(wait=True) is True
    assert read_newest_metadata(tmp_path) == {"id": "a"}
    assert json.loads((tmp_path / "step-00000001" / "index.json").read_text())["valid_loss"] == 2.5
    opened = Checkpoints(tmp_path, HERE).open_newest()
    assert opened.step == 1 and (opened.tensors["x/w"][...] == 1).all() and opened.rest["x/rows"] == [1]


def test_without_wait_it_is_published_once_written(tmp_path):
    checkpoints = Checkpoints(tmp_path, HERE)
    checkpoints.save(1, numbers(1))
    checkpoints._writer.join()
    assert checkpoints.settle() and names(tmp_path) == ["step-00000001"]


def test_nothing_pending_needs_no_communication(tmp_path):
    class Silent(World):
        def gather(self, value):
            raise AssertionError("communicates")

    checkpoints = Checkpoints(tmp_path, Silent(0, 2, torch.device("cpu")))
    assert checkpoints.settle() and checkpoints.settle(wait=True)


def test_the_next_save_and_load_settle_the_one_before(tmp_path):
    checkpoints = Checkpoints(tmp_path, HERE)
    for step in (1, 2, 3):
        checkpoints.save(step, numbers(step))
    assert names(tmp_path) == ["partial-step-00000003", "step-00000001", "step-00000002"]
    box = Box({})
    assert checkpoints.load({"x": box}) == 3 and (box.state["w"] == 3).all()
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_the_copy_takes_the_same_memory_again(tmp_path):
    copy = HostCopy(torch.device("cpu"))
    _, data = copy.take({"a": torch.arange(100.0)})
    place = copy.block.data_ptr()
    _, again = copy.take({"a": torch.arange(99, -1, -1.0)})
    assert (
        copy.block.data_ptr() == place and bytes(data) == bytes(again) == torch.arange(99, -1, -1.0).numpy().tobytes()
    )
    _, smaller = copy.take({"a": torch.ones(3)})
    assert copy.block.data_ptr() == place and len(smaller) == 12


def test_files_are_what_the_library_reads_and_writes(tmp_path):
    torch.manual_seed(0)
    tensors = {str(dtype): (torch.randn(3, 5) * 9).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.0), "none": torch.empty(0, 3), "é": torch.randn(4, 6).t()}
    checkpoint_files.write_rank(tmp_path, 0, *HostCopy(torch.device("cpu")).take(tensors), b"{}")
    found = load_file(tmp_path / "rank-00000.safetensors")
    assert_same(found, tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / "theirs")
    assert (tmp_path / "theirs").stat().st_size == pytest.approx(
        (tmp_path / "rank-00000.safetensors").stat().st_size, abs=200
    )


@pytest.mark.parametrize("keys", [["a"], []])
def test_a_rank_may_have_nothing_to_write(tmp_path, keys):
    Checkpoints(tmp_path, HERE).save(1, {"x": Box(dict.fromkeys(keys, 1))}, wait=True)
    opened = Checkpoints(tmp_path, HERE).open_newest()
    assert opened.step == 1 and opened.rest == (dict.fromkeys((f"x/{key}" for key in keys), 1) or {"x": {}})


# --- failing to write ---------------------------------------------------------------------------------------------


def broken(*args):
    raise OSError("no space left")


def test_a_failed_write_is_raised_once_and_leaves_nothing(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, HERE)
    checkpoints.save(1, numbers(1), wait=True)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_files, "write_rank", broken)
        checkpoints.save(2, numbers(2))
        with pytest.raises(OSError, match=r"cannot write a checkpoint to .*no space left"):
            checkpoints.settle(wait=True)
    assert checkpoints.settle(wait=True) and names(tmp_path) == ["step-00000001"]
    checkpoints.save(2, numbers(2), wait=True)
    assert value_in(tmp_path) == (2, 2)


@pytest.mark.parametrize("then", ["save", "load"])
def test_a_failed_earlier_save_does_not_stand_in_the_way(tmp_path, monkeypatch, then):
    said = []
    checkpoints = Checkpoints(tmp_path, HERE, warn=said.append)
    checkpoints.save(1, numbers(1), wait=True)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_files, "write_rank", broken)
        checkpoints.save(2, numbers(2))
        checkpoints._writer.join()
    if then == "save":
        checkpoints.save(3, numbers(3), wait=True)
        assert names(tmp_path) == ["step-00000001", "step-00000003"]
    else:
        assert checkpoints.load({"x": Box({})}) == 1
    assert len(said) == 1 and "the checkpoint after step 2 is lost: cannot write" in said[0]


def test_a_full_disk(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        checkpoints = Checkpoints(tmp_path / "c", HERE)
        for step in (1, 2):
            checkpoints.save(step, numbers(step, 100_000), wait=True)
        checkpoints.save(3, numbers(3, 100_000))
        with pytest.raises(OSError, match="No space left on device"):
            checkpoints.settle(wait=True)
        assert names(tmp_path / "c") == ["step-00000001", "step-00000002"]
        assert value_in(tmp_path / "c") == (2, 2)
        checkpoints.save(3, numbers(3), wait=True)  # a smaller one fits
        assert value_in(tmp_path / "c") == (3, 3)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


# --- killed at any moment -----------------------------------------------------------------------------------------


def child(action) -> int:
    """Run in a forked process; how it ended, as os.waitpid says."""
    pid = os.fork()
    if not pid:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def killed_after(events: int):
    """Kill this process at one of the things that it asks the system for: to open, make, rename or remove a file."""
    left = events

    def count(event: str, args: tuple) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def assert_as_it_was_or_whole(folder: Path, wrote: bool) -> None:
    """Of a process that had written steps 1 and 2 and was to write 3."""
    found = value_in(folder)
    assert found == (3, 3) if wrote else found in [(2, 2), (3, 3)]
    assert not list(folder.glob("damaged-*"))
    checkpoints = Checkpoints(folder, HERE)
    checkpoints.save(found[0] + 1, numbers(found[0] + 1), wait=True)
    assert names(folder) == [f"step-{step:08d}" for step in (found[0], found[0] + 1)]


def two_steps(folder: Path) -> None:
    for step in (1, 2):
        Checkpoints(folder, HERE).save(step, numbers(step), wait=True)


def test_killed_at_every_call_to_the_system(tmp_path):
    for events in range(100):
        folder = tmp_path / str(events)
        two_steps(folder)

        def save(folder=folder, events=events):
            killed_after(events)
            Checkpoints(folder, HERE).save(3, numbers(3), wait=True)

        status = child(save)
        assert status in (0, signal.SIGKILL)
        assert_as_it_was_or_whole(folder, wrote=status == 0)
        if status == 0:
            break
    assert 10 < events < 99


@pytest.mark.parametrize("size", [0, 1, 100, 2000, 4000])
def test_killed_in_the_middle_of_writing_a_file(tmp_path, size):
    two_steps(tmp_path)

    def save():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ends the process at this byte
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        Checkpoints(tmp_path, HERE).save(3, numbers(3), wait=True)

    assert child(save) & 127 == signal.SIGXFSZ
    assert (tmp_path / "partial-step-00000003" / "rank-00000.safetensors").stat().st_size == size
    assert_as_it_was_or_whole(tmp_path, wrote=False)


@pytest.mark.slow
def test_a_program_that_ends_while_writing_ends_at_once(tmp_path):
    code = """if True:
        import sys, torch
        from pathlib import Path
        from types import SimpleNamespace
        from muown_train.runs.checkpoint import DTYPES, Checkpoints, HostCopy
        from muown_train.runtime.distributed import World
        checkpoints = Checkpoints(Path(sys.argv[1]), World(0, 1, torch.device("cpu")))
        state = {"w": torch.ones(50_000_000)}
        checkpoints.save(1, {"x": SimpleNamespace(state_dict=lambda: state)})
        assert checkpoints._writer.is_alive()
    """
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert Checkpoints(tmp_path, HERE).open_newest() is None


# --- what stays ---------------------------------------------------------------------------------------------------

losses = st.one_of(st.none(), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 3).map(float))


@settings(max_examples=60)
@given(
    saved=st.lists(st.tuples(st.integers(1, 3), losses), min_size=1, max_size=8),
    keep=st.integers(1, 3),
    keep_every=st.one_of(st.none(), st.integers(1, 4)),
    keep_best=st.booleans(),
    damaged=st.sets(st.integers(0, 7), max_size=2),
)
def test_what_stays(tmp_path_factory, saved, keep, keep_every, keep_best, damaged):
    folder = tmp_path_factory.mktemp("stays")
    checkpoints = Checkpoints(folder, HERE, keep, keep_every, keep_best)
    step = 0
    good: dict[int, float] = {}  # all that were ever written and stayed readable
    bad = set()
    for i, (increment, loss) in enumerate(saved):
        step += increment
        checkpoints.save(step, {"x": Box({"step": step})}, loss=loss, wait=True)
        good[step] = loss if loss is not None and math.isfinite(loss) else math.inf
        expected = set(sorted(good)[-keep:]) | bad
        if keep_every:
            expected |= {step for step in good if step % keep_every == 0}
        if keep_best and min(good.values()) < math.inf:
            expected.add(min(good, key=lambda step: (good[step], step)))
        assert names(folder) == [f"step-{step:08d}" for step in sorted(expected)]
        good = {step: loss for step, loss in good.items() if step in expected}
        if i in damaged:  # from now on it neither counts nor goes
            (folder / f"step-{step:08d}" / "index.json").write_text("{")
            bad.add(step)
            del good[step]


def test_a_newest_one_that_cannot_be_verified_takes_nothing_with_it(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, HERE, keep=1, warn=lambda text: None)
    checkpoints.save(1, numbers(1), wait=True)
    publish = checkpoint_files.publish

    def published_short(partial, final, index):
        publish(partial, final, index)
        os.truncate(final / "rank-00000.safetensors", 10)

    monkeypatch.setattr(checkpoint_files, "publish", published_short)
    checkpoints.save(2, numbers(2), wait=True)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert value_in(tmp_path) == (1, 1)


def test_steps_are_compared_as_numbers_and_other_names_left_alone(tmp_path):
    (tmp_path / "step-00000001.copy").mkdir()
    checkpoints = Checkpoints(tmp_path, HERE, keep=1)
    for step in (99_999_999, 100_000_000):
        checkpoints.save(step, numbers(step % 10), wait=True)
    assert names(tmp_path) == ["step-00000001.copy", "step-100000000"]
    assert value_in(tmp_path) == (100_000_000, 0)


def test_about_the_newest_that_can_be_read(tmp_path):
    assert read_newest_metadata(tmp_path / "none") is None
    for step in (1, 2, 3):
        Checkpoints(tmp_path, HERE, keep=9, metadata={"step": step}).save(step, some_state(step), wait=True)
    (tmp_path / "step-00000003" / "index.json").write_text("[]")
    assert read_newest_metadata(tmp_path) == {"step": 2}
    (tmp_path / "step-00000002" / "index.json").unlink()
    assert read_newest_metadata(tmp_path) == {"step": 1}
