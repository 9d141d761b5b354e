"""Start a run with the weights of another run, of one of its checkpoints, or of a folder of transformers.

Rows of the vocabulary that the model has and the source lacks (an export cuts rows that no token uses) become the mean
of the source's rows (Hewitt 2021, "Initializing new word embeddings for pretrained language models"). The logits of
the other rows stay as they are. Since the exponential of a mean is at most the mean of exponentials, k such rows beside
n take at most k / (n + k) of the probability: the loss rises by log(1 + k / n) or less, at every position. Rows of
zeros, or of an initialisation, guarantee no such bound: their logit is about 0, wherever those of the others are.
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
from muown_train.runs.checkpoint_reader import open_checkpoint
from muown_train.runs.hf.folder import is_transformers_folder, read_transformers_folder
from muown_train.runs.state import ModelState

# On rows of tokens that both models can take, what a model computes does not depend on these settings.
_MAY_DIFFER = ("vocab_size", "seq_len", "activation_checkpointing", "init_std")


@dataclass
class InitialWeights:
    """The model and the weights that `init_from` names."""

    path: str
    model: dict[str, Any]  # settings with `_target_`
    weights: dict[str, Tensor]  # weights by canonical name
    tokenizer_hash: str | None
    metadata: dict[str, Any]  # an entry of the manifest: `path`, `step` of the source, `padded` rows

    def load_into(self, model: LanguageModel, settings: Mapping[str, Any], trust: Sequence[str] = ()) -> None:
        """Copy these weights into a model.

        Args:
            settings: the model's section of the configuration.
            trust: see `bind_target`.

        Raises:
            ValueError: the weights are of another model.
        """
        if self.model.get("_target_") != settings["_target_"]:
            kinds = [str(target).rpartition(".")[2] for target in (self.model.get("_target_"), settings["_target_"])]
            raise ValueError(f"init_from={self.path} is a {kinds[0]}, this model is a {kinds[1]}")
        # The source may name no other target than this run does.
        theirs = list_settings(self.model, "model", trust=[settings["_target_"]])
        ours = list_settings(settings, "model", trust=trust)
        for key in (key for key in ours if key in theirs and key not in _MAY_DIFFER):
            # A setting that is null follows from others; a difference in it shows in the shapes of weights.
            if None not in (theirs[key], ours[key]) and theirs[key] != ours[key]:
                raise ValueError(f"init_from={self.path} has {key}={theirs[key]}, this run has model.{key}={ours[key]}")
        weights = self._pad_vocabulary(model)
        try:
            ModelState(model).load_state_dict(weights)
        except ValueError as error:
            raise ValueError(f"init_from={self.path} does not fit: {error}") from None

    def _pad_vocabulary(self, model: LanguageModel) -> dict[str, Tensor]:
        """Return the weights with as many rows of the vocabulary as the model has, also in the head's bias."""
        weights, shapes = dict(self.weights), {name: p.shape for name, p in ModelState(model).parameters.items()}
        for name, (role, *_) in parameter_roles(model).items():
            if role not in ("embedding", "head"):
                continue
            for each in (name, name.removesuffix("weight") + "bias"):
                weight = weights.get(each)
                if weight is None or each not in shapes or weight.ndim != len(shapes[each]):
                    continue
                rows = shapes[each][0] - weight.shape[0]
                if rows > 0:
                    mean = weight.double().mean(0, keepdim=True).to(weight.dtype)
                    weights[each] = torch.cat([weight, mean.expand(rows, *weight.shape[1:])])
                    self.metadata["padded"] = rows
        return weights

    def check_tokenizer(self, data: Mapping[str, Any]) -> None:
        """Refuse weights whose rows of the vocabulary stand for other tokens than this run's data.

        Args:
            data: the metadata of the data.

        Raises:
            ValueError: the tokenizers differ.
        """
        if self.tokenizer_hash not in (None, data["tokenizer_hash"]):
            raise ValueError(
                f"init_from={self.path} was trained with another tokenizer than that of the data, {data['tokenizer']}: "
                "give the data its tokenizer.json"
            )


def read_initial_weights(path: str) -> InitialWeights:
    """Read the weights that `init_from` names: a folder of a run, of a checkpoint, or of transformers.

    Raises:
        ValueError: the path is none of these, or is incomplete.
    """
    folder = Path(path).expanduser()
    try:
        if is_transformers_folder(folder):
            source = read_transformers_folder(folder)
            metadata = {"path": path, "step": source.origin.get("step"), "padded": 0}
            return InitialWeights(path, source.model, source.weights, source.tokenizer_hash, metadata)
        opened = open_checkpoint(folder)
    except ValueError as error:
        raise ValueError(f"init_from={path}: {error}") from None
    metadata = {"path": path, "step": opened.step, "padded": 0}
    return InitialWeights(
        path, opened.config["model"], opened.load_weights(), opened.data.get("tokenizer_hash"), metadata
    )
