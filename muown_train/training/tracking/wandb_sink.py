"""Send a run's metrics to Weights & Biases. Whatever happens there, training goes on."""

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from muown_train.runs.metrics import Line, Metrics
from muown_train.runtime.atomic_files import try_read_json, write_atomic
from muown_train.runtime.extras import check_installed
from muown_train.runtime.redaction import redact, redact_tree
from muown_train.runtime.suggest import suggest_nearest
from muown_train.training.tracking.async_sink import AsyncSink

_MODES = ("online", "offline", "disabled")
_OLD_MODES = {"run": "online", "dryrun": "offline"}  # further values of WANDB_MODE
# what W&B takes, by the checks of its client (wandb/sdk/wandb_settings.py) and, for names of runs, of its server
MAX_TAG, MAX_NAME, NOT_IN_PROJECT = 64, 128, "/\\#?%:"
_MANIFEST_KEYS = ("parameters", "ranks", "device", "git_commit")


class WandbSink(AsyncSink):
    """Records a training run as one W&B run, through any number of restarts, in the background.

    The run's folder keeps the id of the W&B run. `step` and `tokens` are metrics like others, and `step` is the axis:
    W&B's own count of steps may not go back, as the steps of a run do after a resume. Where a setting is None, W&B's
    environment variable counts.

    Args:
        project: the W&B project, `muown` by default.
        entity, group, tags: as in `wandb.init`.
        mode: "online" (the default), "offline" or "disabled"; a run that cannot connect goes on offline.
        finish_timeout: the most seconds that the end of a run waits for W&B.
        warn: called with a sentence for the user.

    Raises:
        ValueError: a setting is wrong, or W&B's library is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
        finish_timeout: float = 60.0,
        warn: Callable[[str], None] = print,
    ) -> None:
        check_installed("wandb")
        source = "WANDB_MODE" if mode is None else "tracking.mode"
        if mode is None:
            mode = os.environ.get("WANDB_MODE") or "online"
            mode = _OLD_MODES.get(mode, mode)
        if mode not in _MODES:
            raise ValueError(f"{source}={mode!r} must be one of {', '.join(_MODES)}{suggest_nearest(mode, _MODES)}")
        if isinstance(tags, str):
            raise ValueError(f"tracking.tags={tags!r} must be a list, such as [{tags}]")
        for tag in tags or ():
            _check_text("tracking.tags", tag, MAX_TAG)
        for key, value in (("tracking.project", project), ("WANDB_PROJECT", os.environ.get("WANDB_PROJECT"))):
            if value is not None:
                _check_text(key, value, MAX_NAME, NOT_IN_PROJECT)
        for key, value in (("tracking.group", group), ("WANDB_NAME", os.environ.get("WANDB_NAME"))):
            if value is not None:
                _check_text(key, value, MAX_NAME)
        run = _WandbRun(
            mode,
            redact_tree(
                {
                    "project": project or os.environ.get("WANDB_PROJECT") or "muown",
                    "entity": entity or os.environ.get("WANDB_ENTITY"),
                    "group": group or os.environ.get("WANDB_RUN_GROUP"),
                    "tags": list(tags or ()) or None,
                }
            ),
            warn=lambda sentence: self.warn(sentence),
        )
        super().__init__(
            run, "W&B", finish_timeout, late_hint=lambda: f"{run.sync_command()} sends the rest", warn=warn
        )
        self.run = run

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        """Start the thread, which starts the W&B run; on return the run's folder has the id of the W&B run."""
        with suppress(OSError):  # the thread meets the same error and reports it
            get_run_id(folder)
        self.run.count_lines(folder)
        super().start(folder, config, steps)


def _check_text(key: str, value: object, longest: int, without: str = "") -> None:
    """Raise ValueError, naming the setting, for a text that W&B would refuse only while the run is being recorded."""
    if not isinstance(value, str) or len(value) > longest:
        size = f"{len(value)} letters" if isinstance(value, str) else type(value).__name__
        raise ValueError(f"{key}={value!r} must be a text of at most {longest} letters for W&B, got {size}")
    if odd := [letter for letter in without if letter in value]:
        raise ValueError(f"{key}={value!r} must not contain {' '.join(odd)} for W&B")


class _WandbRun:
    """A W&B run. Every call may take long or fail.

    `row` is W&B's own count of logged lines. It must never go back, nor begin again in a part that was recorded
    offline, or lines would hide each other. So it goes on from the number of lines in the run's metrics*.jsonl, which
    include the lines that were rolled back.

    A process that is killed may leave lines that W&B has not got. The count of W&B's server says how many, and offline
    the file `wandb_rows` in the run's folder, which counts what was handed over. They are sent from metrics.jsonl.
    """

    def __init__(self, mode: str, settings: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self.mode, self.settings, self.warn = mode, settings, warn
        self.folder = Path()  # the folder of W&B's own files
        self.row = 0
        self.metrics, self.kept = Path(), 0  # metrics.jsonl, and its lines at the start
        self.progress = Path()  # the file that holds `row`

    def count_lines(self, folder: Path) -> None:
        """Count the lines of a run's record, before training adds further ones."""
        counts = {path.name: path.read_bytes().count(b"\n") for path in folder.glob("metrics*.jsonl")}
        self.metrics, self.progress = folder / "metrics.jsonl", folder / "wandb_rows"
        self.row, self.kept = sum(counts.values()), counts.get("metrics.jsonl", 0)

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        self.folder = Path(os.environ.get("WANDB_DIR") or folder)
        import wandb  # here, since it is slow to import

        wandb.setup(wandb.Settings(silent=True))
        options = {
            "id": get_run_id(folder),
            "name": redact(os.environ.get("WANDB_NAME") or folder.name)[:MAX_NAME],
            "config": redact_tree(config) | {"run": _describe_run(folder, config)},
        }
        if self.mode == "online":
            try:
                if not wandb.login(prompt=False):
                    raise ConnectionError("not logged in (`wandb login`)")
                self.run = self._open("online", options)
                self.warn(f"W&B: {self.run.url}")
            except Exception as error:  # W&B raises many kinds
                reason = redact(" ".join(str(error).split())) or type(error).__name__
                self.warn(f"W&B: {reason}; recording offline, {self.sync_command()} sends it")
                self.mode, self.run = "offline", self._open("offline", options)
        else:
            self.run = self._open(self.mode, options)
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        self._send_missing_lines()

    def write(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self.run.log(line, step=self.row, commit=True)
            self.row += 1
        with suppress(OSError):  # the disk is full: then lines may be sent twice
            self.progress.write_text(str(self.row))

    def _send_missing_lines(self) -> None:
        """Send the lines again that W&B has not got: as many as its count lacks, the last of those that are kept."""
        lines, received = self.row, self.run.step if self.mode == "online" else self._read_progress()
        missing = min(max(0, lines - received), self.kept)
        self.row = max(lines, received)
        if missing:
            self.row = lines - missing
            self.write(Metrics(self.metrics.parent).read()[: self.kept][-missing:])
            self.row = max(lines, self.row)

    def _read_progress(self) -> int:
        """Return the number of rows that were handed over; without the file, that of all lines."""
        try:
            return int(self.progress.read_text())
        except (OSError, ValueError):
            return self.row

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.run.summary.update(dict(summary))
        self.run.finish(exit_code=0 if summary else 1)  # a run that was cut off has no summary

    def sync_command(self) -> str:
        """Return the command that sends what W&B has not received."""
        return f"`wandb sync {self.folder}/wandb/*run-*`"

    def _open(self, mode: Any, options: Mapping[str, Any]) -> Any:
        import wandb

        return wandb.init(
            **self.settings,
            **options,
            resume="allow",
            dir=self.folder,
            mode=mode,
            settings=wandb.Settings(
                init_timeout=60,
                silent=True,
                allow_val_change=True,  # a resumed run may have other settings
                console="off",  # otherwise every print waits for W&B
                # W&B would send the command line with the secrets in it.
                x_disable_meta=redact(" ".join(sys.argv)) != " ".join(sys.argv),
            ),
        )


def get_run_id(folder: Path) -> str:
    """Return the id of a run at W&B from the run's folder; the first time make it, from WANDB_RUN_ID or at random.

    Raises:
        OSError: the folder cannot be written.
    """
    file = folder / "wandb_id"
    if not file.exists():
        write_atomic(file, (os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)).encode())
    return file.read_text().strip()


def _describe_run(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what W&B needs besides the settings to compare runs: the optimizer's name, and parts of the manifest."""
    optimizer = {"optimizer": str(config["optim"]["_target_"]).rpartition(".")[2]} if "optim" in config else {}
    manifest = try_read_json(folder / "manifest.json")
    return optimizer | {key: manifest[key] for key in _MANIFEST_KEYS if key in manifest}
