"""Write a run's metrics for TensorBoard: `tensorboard --logdir runs` compares runs."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muown_train.config.extras import check_installed
from muown_train.runs.metrics import Line
from muown_train.runtime.redaction import redact_tree
from muown_train.training.tracking.async_sink import AsyncSink


class TensorBoardSink(AsyncSink):
    """Writes the numbers and samples of every line to RUN/tensorboard, in the background.

    Args:
        finish_timeout: the most seconds that the end of a run waits for TensorBoard.
        warn: called with a sentence for the user.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, finish_timeout: float = 60.0, warn: Callable[[str], None] = print) -> None:
        check_installed("tensorboard")
        super().__init__(_EventFiles(), "TensorBoard", finish_timeout, warn=warn)


class _EventFiles:
    """Files of events. A restart or a rollback begins a new file, which hides the same steps in older files."""

    def __init__(self) -> None:
        self.writer: Any = None
        self.step = math.inf  # the step of the last line

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        self.folder, self.config = folder / "tensorboard", redact_tree(config)

    def write(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if line["step"] <= self.step:
                self._open(line["step"])
            self.step = line["step"]
            for key, value in line.items():
                if isinstance(value, int | float) and key != "step":
                    self.writer.add_scalar(key, value, self.step)
                elif key == "sample":
                    self.writer.add_text(key, f"```\n{value}\n```", self.step)
        self.writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self.writer is not None:
            self.writer.close()

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self.writer is not None:
            self.writer.close()
        self.writer = SummaryWriter(str(self.folder), purge_step=step)
        self.writer.add_text("config", f"```\n{json.dumps(self.config, indent=1, default=str)}\n```", step)
