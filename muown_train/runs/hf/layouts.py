"""Which models of ours are which of `transformers`. A module for each says how names, shapes and settings translate."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from muown_train.runs.hf import llama, qwen2


class Layout(Protocol):
    """What such a module holds."""

    TARGET: str  # of our model
    MODEL_TYPE: str  # in their config.json
    ARCHITECTURE: str  # their class
    GROUP: str  # a model= of ours with this target

    def config(self, settings: Mapping[str, Any]) -> dict[str, Any]: ...

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]: ...

    def exported(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def imported(self, weights: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]: ...


LAYOUTS: tuple[Layout, ...] = (llama, qwen2)


def of_target(target: str) -> Layout:
    """The layout of one of our models.

    Raises:
        ValueError: transformers has no such model.
    """
    for layout in LAYOUTS:
        if target == layout.TARGET:
            return layout
    known = " and ".join(layout.TARGET.rpartition(".")[2] for layout in LAYOUTS)
    raise ValueError(f"transformers has no model like {target.rpartition('.')[2]}: only {known} can be exported")


def of_config(config: Mapping[str, Any]) -> Layout:
    """The layout of a config.json.

    Raises:
        ValueError: none of ours is like it.
    """
    for layout in LAYOUTS:
        if config.get("model_type") == layout.MODEL_TYPE:
            return layout
    known = " and ".join(layout.MODEL_TYPE for layout in LAYOUTS)
    raise ValueError(f"config.json has model_type={config.get('model_type')!r}: only {known} have a model here")
