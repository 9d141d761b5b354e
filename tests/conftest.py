"""What several test files share."""

import os
import random
import signal
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("default", deadline=None)  # others may have the cores for a while
hypothesis.settings.load_profile("default")

os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side, and so do processes that they start

# What is started in the background of a script, as CI may be, ignores Ctrl-C, and what is started by nohup a hang-up.
# Processes that tests start would inherit that, and those that wait for such a signal would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """The name of the argument for bytes, where pytest shows them: compressed ones hold the time, and the processes
    that share the tests must give them the same names.
    """
    return argname if isinstance(val, bytes) else None


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch  # after the line above

    torch.set_num_threads(1)  # small tensors, and bit-equality needs the same number everywhere


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of 120 short texts with some structure to learn; prepared data go to its `cache`.

    What small runs of default settings prepare is there already, so that no run says that it prepares it.
    """
    folder = tmp_path_factory.mktemp("corpus")
    words = random.Random(0)
    nouns = [a + b for a in ("ka", "lo", "mi", "ru", "te") for b in ("ban", "dor", "fil", "gos", "hum")]
    for i in range(120):
        sentences = (
            f"The {words.choice(nouns)} of {words.choice(nouns)} has {words.randint(2, 99)} {words.choice(nouns)}s."
            for _ in range(30)
        )
        (folder / f"{i:03d}.txt").write_text(" ".join(sentences))
    from muown_train.data.sources import RunInfo, files
    from muown_train.runtime.progress import discard_line

    files(f"{folder}/*.txt", run=RunInfo(32, 0, 200, folder / "cache", vocab_size=4096, progress=discard_line))
    return folder
