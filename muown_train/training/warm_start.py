"""Weights that a run starts with: those of another run, of one of its checkpoints, or of a folder of transformers.

Rows of the vocabulary that the model has and the source has not (an export cuts what no token uses) become the mean of
those that there are (Hewitt 2021, "Initializing new word embeddings for pretrained language models"). Logits of the
others stay what they are, and since a mean's exponential is at most the mean of exponentials, k such rows beside n
take at most k / (n + k) of the probability: the loss rises by log(1 + k / n) or less, at every position. Rows of zeros,
or of an initialisation, promise nothing of the kind: their logit is about 0, wherever those of the others are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muown_train.config.instantiate import list_settings
from muown_train.models.language_model import LanguageModel
from muown_train.optim import parameter_roles
from muown_train.runs.checkpoint import ModelState
from muown_train.runs.checkpoint_reader import open_checkpoint
from muown_train.runs.hf.folder import is_folder, read_folder

# settings of a model that its function, on rows that both can take, does not depend on
_MAY_DIFFER = ("vocab_size", "seq_len", "activation_checkpointing", "init_std")


@dataclass
class Start:
    """What `init_from` names."""

    path: str
    model: dict[str, Any]  # settings with `_target_`
    weights: dict[str, Tensor]  # by canonical name
    tokenizer_hash: str | None
    facts: dict[str, Any]  # for the manifest: `path`, `step` of the source, rows `padded`

    def load_into(self, model: LanguageModel, settings: Mapping[str, Any], trust: Sequence[str] = ()) -> None:
        """Give a model these weights.

        Args:
            settings: of the model.
            trust: see `factory`.

        Raises:
            ValueError: it is another model.
        """
        if self.model.get("_target_") != settings["_target_"]:
            kinds = [str(target).rpartition(".")[2] for target in (self.model.get("_target_"), settings["_target_"])]
            raise ValueError(f"init_from={self.path} is a {kinds[0]}, this model is a {kinds[1]}")
        # of the source only what it shares with this run is trusted
        theirs = list_settings(self.model, "model", trust=[settings["_target_"]])
        ours = list_settings(settings, "model", trust=trust)
        for key in (key for key in ours if key in theirs and key not in _MAY_DIFFER):
            # what is null follows from other settings, and shapes tell of a difference
            if None not in (theirs[key], ours[key]) and theirs[key] != ours[key]:
                raise ValueError(f"init_from={self.path} has {key}={theirs[key]}, this run has model.{key}={ours[key]}")
        weights = self._padded(model)
        try:
            ModelState(model).load_state_dict(weights)
        except ValueError as error:
            raise ValueError(f"init_from={self.path} does not fit: {error}") from None

    def _padded(self, model: LanguageModel) -> dict[str, Tensor]:
        """The weights with as many rows of the vocabulary as the model has, the head's bias with them."""
        weights, shapes = dict(self.weights), {name: p.shape for name, p in ModelState(model).parameters.items()}
        for name, (role, _) in parameter_roles(model).items():
            if role not in ("embedding", "head"):
                continue
            for of_vocabulary in (name, name.removesuffix("weight") + "bias"):
                weight = weights.get(of_vocabulary)
                if weight is None or of_vocabulary not in shapes or weight.ndim != len(shapes[of_vocabulary]):
                    continue
                rows = shapes[of_vocabulary][0] - weight.shape[0]
                if rows > 0:
                    mean = weight.double().mean(0, keepdim=True).to(weight.dtype)
                    weights[of_vocabulary] = torch.cat([weight, mean.expand(rows, *weight.shape[1:])])
                    self.facts["padded"] = rows
        return weights

    def refuse_other_tokenizer(self, data: Mapping[str, Any]) -> None:
        """Error if the rows of the vocabulary mean other tokens in this run's data, of which `data` are the facts."""
        if self.tokenizer_hash not in (None, data["tokenizer_hash"]):
            raise ValueError(
                f"init_from={self.path} was trained with another tokenizer than that of the data, {data['tokenizer']}: "
                "give the data its tokenizer.json"
            )


def read_start(path: str) -> Start:
    """Read what `init_from` names: a run's folder, that of a checkpoint, or one of transformers.

    Raises:
        ValueError: it is none of these, or no whole one.
    """
    place = Path(path).expanduser()
    try:
        if is_folder(place):
            theirs = read_folder(place)
            facts = {"path": path, "step": theirs.origin.get("step"), "padded": 0}
            return Start(path, theirs.model, theirs.weights, theirs.tokenizer_hash, facts)
        opened = open_checkpoint(place)
    except ValueError as error:
        raise ValueError(f"init_from={path}: {error}") from None
    facts = {"path": path, "step": opened.step, "padded": 0}
    return Start(path, opened.config["model"], opened.weights(), opened.data.get("tokenizer_hash"), facts)
