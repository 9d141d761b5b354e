"""The table of our models that `transformers` has too. A module for each translates names, shapes and settings."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from muown_train.runs.hf import llama, qwen2


class Layout(Protocol):
    """The interface of the modules that translate a model."""

    TARGET: str  # `_target_` of our model
    MODEL_TYPE: str  # the value of model_type in config.json
    ARCHITECTURE: str  # the class of transformers
    GROUP: str  # an option of our config group `model` with this target

    def to_config(self, settings: Mapping[str, Any]) -> dict[str, Any]: ...

    def to_settings(self, config: Mapping[str, Any]) -> dict[str, Any]: ...

    def export_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def import_weights(self, weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]: ...


LAYOUTS: tuple[Layout, ...] = (llama, qwen2)


def find_layout(target: str) -> Layout:
    """Return the layout of one of our models.

    Raises:
        ValueError: transformers has no such model.
    """
    for layout in LAYOUTS:
        if target == layout.TARGET:
            return layout
    known = " and ".join(layout.TARGET.rpartition(".")[2] for layout in LAYOUTS)
    raise ValueError(f"transformers has no model like {target.rpartition('.')[2]}: only {known} can be exported")


def find_layout_of_config(config: Mapping[str, Any]) -> Layout:
    """Return the layout of a config.json.

    Raises:
        ValueError: it describes a model that this package does not have.
    """
    for layout in LAYOUTS:
        if config.get("model_type") == layout.MODEL_TYPE:
            return layout
    known = " and ".join(layout.MODEL_TYPE for layout in LAYOUTS)
    raise ValueError(f"config.json has model_type={config.get('model_type')!r}: only {known} have a model here")
