"""Sources of rows for worker processes; as there, nothing here imports torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from muown_train.data.hub.streaming import StreamRows
from tests.helpers.text_files import ByteTokenizer

UNITS = [[0, 5], [1], [2, 4], [3], [6]]


@dataclass
class Documents:
    """The documents of numbered files; `does` says what happens at the second of file 3."""

    does: str = ""  # raise, raise odd, die, wait or show

    def __call__(self, file, first):
        for k in range(first, 4 + file):
            if file == 3 and k == 1:
                self.misbehave()
            yield f"file {file}, document {k}: {'x' * (file * 7 + k)}"

    def misbehave(self):
        if self.does == "raise":
            raise ConnectionError("file 3 failed")
        if self.does == "raise odd":
            raise Odd(404, "file 3 is not there")
        if self.does == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "wait":
            time.sleep(60)
        if self.does == "show":
            loaded = sorted({"torch", "numpy", "datasets"} & sys.modules.keys())
            raise ValueError(f"{loaded} {os.environ['RAYON_NUM_THREADS']} {os.environ['TOKENIZERS_PARALLELISM']}")


class Odd(ValueError):
    def __init__(self, status, message):
        super().__init__(f"{status}: {message}")


def stream_rows(does="", seq_len=8):
    return StreamRows(Documents(does), UNITS, ByteTokenizer(), seq_len, shuffle=3, seed=1)


class Logged:
    """Rows that log each row that is computed."""

    def __init__(self, rows: StreamRows, log: Path) -> None:
        self.rows, self.log = rows, log
        self.seq_len, self.streams = rows.seq_len, rows.streams
        self.log.touch()

    def take(self, indices):
        with self.log.open("a") as log:
            log.write("row\n" * len(indices))
        return self.rows.take(indices)

    def state_dict(self):
        return self.rows.state_dict()

    def load_state_dict(self, state):
        self.rows.load_state_dict(state)
