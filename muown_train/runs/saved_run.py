"""Open a saved run: the weights of one of its checkpoints, its configuration and its tokenizer.

Only weights are read from a checkpoint, whatever the number of ranks that wrote it. Nothing in the run's folder is
changed, because the run may still be training. `write_run` makes a folder that is read in the same way.
"""

import dataclasses
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from muown_train.config.checks import is_number
from muown_train.config.instantiate import ALLOWED
from muown_train.config.run_name import check_new_folder
from muown_train.config.schema import RunConfig, parse_config
from muown_train.config.stored_files import shorten
from muown_train.data.text.tokenizer import TOKENIZER, HubTokenizer, fingerprint_tokenizer, select_options
from muown_train.models.language_model import LanguageModel, build_model
from muown_train.runs.checkpoint import Checkpoints
from muown_train.runs.checkpoint_reader import OpenCheckpoint, open_checkpoint
from muown_train.runs.manifest import encode_config
from muown_train.runs.state import ModelState
from muown_train.runtime import hardware
from muown_train.runtime.atomic_files import atomic_folder, read_regular, write_atomic
from muown_train.runtime.distributed import World

_FEW_LAYERS = 256


@dataclass(frozen=True)
class SavedRun:
    """A run at one of its checkpoints."""

    folder: Path  # the run's folder
    checkpoint: Path
    step: int
    config: RunConfig  # the configuration that the run was trained with
    data: dict[str, Any]  # metadata of its data
    opened: OpenCheckpoint  # holds the files open, so that the run may remove them

    def load_weights(self) -> dict[str, Tensor]:
        """Return the weights by canonical name, on the CPU, as they were saved."""
        return self.opened.load_weights()

    def load_checked_weights(self) -> dict[str, Tensor]:
        """Return the weights, after a check that they have the names and shapes of the configuration's model.

        Raises:
            ValueError: the weights belong to another model, or the configuration describes none.
        """
        weights = self.load_weights()
        with torch.device("meta"):
            shapes = ModelState(self._build_model())
        try:
            shapes.check(weights)
        except ValueError as error:
            raise ValueError(f"{self.checkpoint}: {error}") from None
        return weights

    def load_model(self, device: torch.device | None = None) -> LanguageModel:
        """Return the model with these weights, in evaluation mode, on `device` (by default the CPU).

        Raises:
            ValueError: see `load_checked_weights`.
        """
        weights = self.load_checked_weights()  # before memory is taken: a stranger's sizes may ask for any amount
        model = self._build_model()
        ModelState(model).load_state_dict(weights)
        return model.to(device).eval()

    def _build_model(self) -> LanguageModel:
        try:
            return build_model(self.config.model, self.config.seq_len)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # a setting is missing or too large
            reason = str(error).splitlines()[0]
            raise ValueError(f"{self.checkpoint} has a model that cannot be made: {reason}") from error

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which forward passes have the run's precision on a device."""
        low = hardware.wants_autocast(self.config.precision, device)
        return torch.autocast(device.type, torch.bfloat16, enabled=low)

    def with_precision(self, precision: str) -> "SavedRun":
        """Return this run with another precision: auto, bfloat16 or float32."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, precision=precision))

    def load_tokenizer(self) -> HubTokenizer:
        """Return the tokenizer of the run's data.

        Raises:
            ValueError: there is none, as with random data, or the file is not the one that the run was trained with.
        """
        file = self.folder / TOKENIZER
        try:
            raw = read_regular(file)
        except OSError as error:
            raise ValueError(
                f"{file} cannot be read ({error.strerror}): random data have no tokenizer; "
                "for a run of an earlier version, copy the file there that it was trained with"
            ) from error
        # an export, and so what is imported from it, may have another file than the data
        recorded = self.data.get("tokenizer_file_hash", self.data.get("tokenizer_hash") if self.config.data else None)
        if recorded is not None and recorded != fingerprint_tokenizer(raw):
            raise ValueError(
                f"{file} is not the tokenizer that the model was trained with, by its hash "
                f"({fingerprint_tokenizer(raw)}, and not {shorten(recorded)}): put that file there"
            )
        tokenizer = HubTokenizer(str(self.data.get("tokenizer", file)), raw, **select_options(self.data))
        entries: Any = self.config.model.get("vocab_size")
        if is_number(entries) and tokenizer.size > entries:
            raise ValueError(
                f"{file} has ids up to {tokenizer.size - 1:,}, and the model has {entries:,} entries: it belongs to "
                "another model"
            )
        return tokenizer


def open_run(path: str | Path, step: int | None = None) -> SavedRun:
    """Open a run at one of its checkpoints; print a warning for each damaged one that is passed over.

    Args:
        path: the folder of the run, or of one checkpoint.
        step: the step after which it was saved; by default that of the newest checkpoint that is whole.

    Raises:
        ValueError: there is no such checkpoint, the requested one is damaged, or its configuration cannot be used. A
            configuration may come from a stranger: it may name what `instantiate.ALLOWED` lists, and nothing else.
    """
    return describe_run(open_checkpoint(Path(path), step))


def describe_run(opened: OpenCheckpoint) -> SavedRun:
    """Return the run that an open checkpoint belongs to.

    Raises:
        ValueError: its configuration cannot be used.
    """
    try:
        # The name may no longer be allowed, and code that the stored configuration trusts is not trusted.
        config = parse_config({**opened.config, "name": None, "trust": []}, "run")
    except ValueError as error:
        raise ValueError(f"{opened.folder} has a configuration that cannot be used: {error}") from None
    target: str = config.model["_target_"]
    layers: Any = config.model.get("layers")
    if is_number(layers) and layers > max(len(opened.weights), _FEW_LAYERS):  # making them takes long
        raise ValueError(
            f"{opened.folder} has the configuration model.layers={layers}, and holds {len(opened.weights)} weights"
        )
    if target in ALLOWED and not target.startswith("muown_train.models."):
        raise ValueError(f"{opened.folder} has the configuration model._target_={target}, which is no model")
    return SavedRun(opened.folder.parent.parent, opened.folder, opened.step, config, opened.data, opened)


def write_run(
    folder: Path,
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    step: int,
    data: Mapping[str, Any],
    tokenizer: bytes | None,
    origin: Mapping[str, Any],
) -> None:
    """Write a folder with one checkpoint of weights alone. Every reader of runs takes it; no run can resume from it.

    Args:
        weights: the weights by canonical name.
        config: the resolved configuration of the run that the weights come from.
        data: metadata of that run's data.
        tokenizer: the content of its tokenizer.json.
        origin: the content of manifest.json: where the weights come from, in JSON.

    Raises:
        ValueError: see `check_new_folder`; or another process writes the folder.
    """
    with atomic_folder(folder, check_new_folder) as partial:
        if tokenizer is not None:
            write_atomic(partial / TOKENIZER, tokenizer)
        write_atomic(partial / "config.yaml", encode_config(config))
        write_atomic(partial / "manifest.json", (json.dumps(dict(origin), indent=1) + "\n").encode())
        metadata = {"config": dict(config), "data": dict(data), "wandb_id": None}
        checkpoints = Checkpoints(partial / "checkpoints", World(0, 1, torch.device("cpu")), metadata=metadata)
        stateful: Any = SimpleNamespace(state_dict=lambda: weights)  # is only written
        checkpoints.save(step, {"model": stateful}, wait=True)
