"""A run as others use it: the weights of one of its checkpoints on one device, its configuration and its tokenizer.

Of a checkpoint only weights are read, whatever the number of ranks that wrote it, and nothing in the run's folder is
changed: the run may still be training. A folder made by `write_run` is read in the same way.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from muown_train.config.compose import new_folder
from muown_train.config.instantiate import ALLOWED
from muown_train.config.schema import TopLevel, top_level
from muown_train.data.text.tokenizer import TOKENIZER, HubTokenizer
from muown_train.models.language_model import LanguageModel
from muown_train.runs.checkpoint import Checkpoints, ModelState
from muown_train.runs.weights import OpenCheckpoint, open_checkpoint, to_stderr
from muown_train.runtime import hardware
from muown_train.runtime.atomic_files import replace, whole_folder
from muown_train.runtime.distributed import World
from muown_train.training.build import make_model


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint of a run."""

    folder: Path  # of the run
    checkpoint: Path
    step: int
    config: dict[str, Any]  # resolved, as the run was trained with it
    top: TopLevel  # its plain keys
    data: dict[str, Any]  # facts about its data
    opened: OpenCheckpoint  # so that the run may remove its files

    def weights(self) -> dict[str, Tensor]:
        """Weights by canonical name, on the CPU, as they were saved."""
        return self.opened.weights()

    def fitting_weights(self) -> dict[str, Tensor]:
        """The same, of the names and shapes that the model of the configuration has.

        Raises:
            ValueError: they are of another model, or the configuration is of none.
        """
        weights = self.weights()
        with torch.device("meta"):
            shapes = ModelState(self._made())
        try:
            shapes.check(weights)
        except ValueError as error:
            raise ValueError(f"{self.checkpoint}: {error}") from None
        return weights

    def model(self, device: torch.device | None = None) -> LanguageModel:
        """The model with these weights, in evaluation mode, on `device` (the CPU).

        Raises:
            ValueError: see `fitting_weights`.
        """
        weights = self.fitting_weights()  # before memory is taken, of which a stranger's sizes may ask for any
        model = self._made()
        ModelState(model).load_state_dict(weights)
        return model.to(device).eval()

    def _made(self) -> LanguageModel:
        try:
            return make_model(self.config, self.top)
        except (TypeError, RuntimeError) as error:  # a setting that is missing, a size beyond the memory
            reason = str(error).splitlines()[0]
            raise ValueError(f"{self.checkpoint} has a model that cannot be made: {reason}") from error

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Forward passes in the run's precision, as on a device of this kind."""
        return torch.autocast(device.type, torch.bfloat16, enabled=hardware.wants_autocast(self.top.precision, device))

    def with_precision(self, precision: str) -> "SavedRun":
        """The same in another precision: auto, bfloat16 or float32."""
        return dataclasses.replace(self, top=dataclasses.replace(self.top, precision=precision))

    def tokenizer(self) -> HubTokenizer:
        """The tokenizer of the run's data.

        Raises:
            ValueError: there is none, as with random data.
        """
        file = self.folder / TOKENIZER
        try:
            return HubTokenizer(str(self.data.get("tokenizer", file)), file.read_bytes())
        except OSError as error:
            raise ValueError(
                f"{file} cannot be read ({error.strerror}): random data have no tokenizer; "
                "to a run of an earlier version copy the file that it was trained with"
            ) from error


def open_run(path: str | Path, step: int | None = None, warn: Callable[[str], None] = to_stderr) -> SavedRun:
    """A checkpoint of a run.

    Args:
        path: the run's folder, or that of one checkpoint.
        step: after which update; by default of the newest checkpoint that is whole.
        warn: called with a sentence for each damaged one that is passed over.

    Raises:
        ValueError: there is none, the one asked for is damaged, or its configuration cannot be used. A configuration
            may come from a stranger: it names what `factory.ALLOWED` lists, and nothing else.
    """
    return run_of(open_checkpoint(Path(path), step, warn))


def run_of(opened: OpenCheckpoint) -> SavedRun:
    """The run that a checkpoint is of.

    Raises:
        ValueError: its configuration cannot be used.
    """
    target = opened.config["model"]["_target_"]
    if target in ALLOWED and not target.startswith("muown_train.models."):
        raise ValueError(f"{opened.folder} has the configuration model._target_={target}, which is no model")
    folder = opened.folder.parent.parent
    config = {**opened.config, "trust": []}
    try:
        top = top_level(config | {"name": None}, "run")  # whatever the folder is called now
    except (TypeError, ValueError) as error:  # a key that is missing, or cannot be
        raise ValueError(f"{opened.folder} has a configuration that cannot be used: {error}") from None
    return SavedRun(folder, opened.folder, opened.step, config, top, opened.data, opened)


class _Weights:
    """Weights as `Checkpoints.save` takes them."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)

    def state_dict(self) -> dict[str, Any]:
        return self.weights

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        raise NotImplementedError("written only")


def write_run(
    folder: Path,
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    step: int,
    data: Mapping[str, Any],
    tokenizer: bytes | None,
    origin: Mapping[str, Any],
) -> None:
    """A folder with one checkpoint of weights alone, for those who read runs; it cannot be trained on.

    Args:
        weights: by canonical name.
        config: of the run that they come from, resolved; data: facts about its data.
        tokenizer: content of its tokenizer.json.
        origin: where the weights come from, in JSON: what manifest.json will hold.

    Raises:
        ValueError: see `new_folder`; or another process writes it.
    """
    with whole_folder(folder, new_folder) as partial:
        if tokenizer is not None:
            replace(partial / TOKENIZER, tokenizer)
        replace(partial / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(config))).encode())
        replace(partial / "manifest.json", (json.dumps(dict(origin), indent=1) + "\n").encode())
        about = {"config": dict(config), "data": dict(data), "wandb_id": None}
        here = World(0, 1, torch.device("cpu"))
        Checkpoints(partial / "checkpoints", here, about=about).save(step, {"model": _Weights(weights)}, wait=True)
