"""Weights & Biases as a sink of records. Whatever happens to it, training goes on."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muown_train.records import Line


class WandbSink:
    """One W&B run for one training run: its id is kept in the run's folder, steps are an axis of their own.

    Args:
        project, entity, group, tags: as in `wandb.init`.
        mode: "online" or "offline"; a run that cannot connect goes on offline.
        warn: called with a sentence for the user.
    """

    def __init__(
        self,
        project: str = "muown",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str = "online",
        warn: Callable[[str], None] = print,
    ) -> None:
        if mode not in ("online", "offline"):
            raise ValueError(f"tracking.mode={mode!r} must be online or offline")
        self.settings: dict[str, Any] = dict(project=project, entity=entity, group=group, tags=list(tags))
        self.mode, self.warn = mode, warn
        self.run: Any = None

    def start(self, folder: Path, config: Mapping[str, Any], steps: int) -> None:
        import wandb

        id_file = folder / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        modes: list[Any] = [self.mode, "offline"]
        for mode in modes[self.mode == "offline" :]:
            if mode == "online" and not (os.environ.get("WANDB_API_KEY") or _in_netrc(wandb)):
                self.warn("W&B: not logged in (`wandb login`), recording offline")
                continue
            try:
                self.run = wandb.init(
                    **self.settings,
                    id=id_file.read_text().strip(),
                    name=folder.name,
                    resume="allow",
                    dir=folder,
                    config=dict(config),
                    mode=mode,
                    settings=wandb.Settings(init_timeout=60, silent=True, x_disable_stats=False),
                )
                self.run.define_metric("*", step_metric="step")
                return
            except Exception as error:  # any trouble of the service: training must not depend on it
                self.warn(f"W&B: {mode} did not start ({error})")

    def lines(self, lines: Sequence[Line]) -> None:
        self._safely(lambda: [self.run.log(line) for line in lines])

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._safely(lambda: (self.run.summary.update(dict(summary)), self.run.finish()))
        self.run = None

    def _safely(self, action: Callable[[], Any]) -> None:
        if self.run is None:
            return
        try:
            action()
        except Exception as error:  # as in start
            self.warn(f"W&B: {error}; no longer recording there")
            self.run = None


def _in_netrc(wandb: Any) -> bool:
    try:
        return bool(wandb.api.api_key)
    except Exception:  # as in start
        return False
