"""Weights & Biases as a sink of records. Whatever happens to it, training goes on."""

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from muown_train.runs.metrics import Line
from muown_train.runtime.atomic_files import write_atomic
from muown_train.runtime.redaction import redact, redact_tree
from muown_train.runtime.suggest import suggest_nearest
from muown_train.training.tracking.async_sink import Background

_MODES = ("online", "offline", "disabled")
_ALIASES = {"run": "online", "dryrun": "offline"}  # of WANDB_MODE
_FACTS = ("parameters", "ranks", "device", "git_commit")  # of the manifest


class WandbSink(Background):
    """One W&B run for one training run through any number of restarts, in the background.

    The run's id is kept in its folder. `step` and `tokens` are metrics like others, `step` the axis: W&B drops what
    is logged for a smaller step of its own count than before, as after a resume. W&B's environment variables count
    where a setting is None.

    Args:
        project: by default `muown`.
        entity, group, tags: as in `wandb.init`.
        mode: "online", by default, "offline" or "disabled"; a run that cannot connect goes on offline.
        finish_timeout: seconds that the end of a run waits for W&B at most.
        warn: called with a sentence for the user.

    Raises:
        ValueError: a setting that cannot be.
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
        source = "WANDB_MODE" if mode is None else "tracking.mode"
        if mode is None:
            mode = os.environ.get("WANDB_MODE") or "online"
            mode = _ALIASES.get(mode, mode)
        if mode not in _MODES:
            raise ValueError(f"{source}={mode!r} must be one of {', '.join(_MODES)}{suggest_nearest(mode, _MODES)}")
        if isinstance(tags, str):
            raise ValueError(f"tracking.tags={tags!r} must be a list, such as [{tags}]")
        if finish_timeout < 0:
            raise ValueError(f"tracking.finish_timeout={finish_timeout!r} must be at least 0")
        run = _Run(
            mode,
            {
                "project": project or os.environ.get("WANDB_PROJECT") or "muown",
                "entity": entity,
                "group": group,
                "tags": redact_tree(tags or ()) or None,
            },
            warn=lambda sentence: self.warn(sentence),
        )
        super().__init__(run, "W&B", finish_timeout, late=lambda: f"{run.sync_command()} sends the rest", warn=warn)
        self.run = run

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        """Start the W&B run, some time; its id is in the run's folder on return."""
        with suppress(OSError):  # the thread will say it
            run_id(folder)
        self.run.row = sum(path.read_bytes().count(b"\n") for path in folder.glob("metrics*.jsonl"))
        super().start(folder, config, steps)


class _Run:
    """The W&B run; every call may take long or fail.

    `row` is W&B's own count of what is logged. It must never go back, nor begin again in a part that was recorded
    offline, or lines would hide each other: so it goes on from the number of lines that the record holds, those that
    were rolled back too.
    """

    def __init__(self, mode: str, settings: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self.mode, self.settings, self.warn = mode, settings, warn
        self.folder = Path()  # of W&B's own files
        self.row = 0

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        self.folder = Path(os.environ.get("WANDB_DIR") or folder)
        import wandb  # slow

        wandb.setup(wandb.Settings(silent=True))
        options = {
            "id": run_id(folder),
            "name": os.environ.get("WANDB_NAME") or folder.name,
            "config": redact_tree(config) | {"run": _facts(folder, config)},
        }
        if self.mode == "online":
            try:
                if not wandb.login(prompt=False):
                    raise ConnectionError("not logged in (`wandb login`)")
                self.run = self._open("online", options)
                self.warn(f"W&B: {self.run.url}")
            except Exception as error:  # of many kinds
                reason = redact(" ".join(str(error).split())) or type(error).__name__
                self.warn(f"W&B: {reason}; recording offline, {self.sync_command()} sends it")
                self.run = self._open("offline", options)
        else:
            self.run = self._open(self.mode, options)
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        self.row = max(self.row, self.run.step)

    def lines(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self.run.log(line, step=self.row, commit=True)
            self.row += 1

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.run.summary.update(dict(summary))
        self.run.finish(exit_code=0 if summary else 1)  # without a summary the run was cut off

    def sync_command(self) -> str:
        """What sends to W&B what has not been sent."""
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
                allow_val_change=True,  # of the configuration, on a resume
                console="off",  # otherwise every print waits for W&B
                # the command line would be sent as it is
                x_disable_meta=redact(" ".join(sys.argv)) != " ".join(sys.argv),
            ),
        )


def run_id(folder: Path) -> str:
    """The id of a run at W&B: kept in the run's folder, WANDB_RUN_ID at first if that is set, or a random one.

    Raises:
        OSError: the folder cannot be written.
    """
    file = folder / "wandb_id"
    if not file.exists():
        write_atomic(file, (os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)).encode())
    return file.read_text().strip()


def _facts(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes runs comparable besides their settings: the optimizer by its plain name, and from the manifest."""
    optimizer = {"optimizer": str(config["optim"]["_target_"]).rpartition(".")[2]} if "optim" in config else {}
    try:
        facts = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return optimizer
    return optimizer | {key: facts[key] for key in _FACTS if key in facts}
