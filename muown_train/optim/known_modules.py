"""Modules of torch, transformers and PEFT whose parameters need more than their shape to be understood.

Nothing is imported but torch: a module of another library is recognised by attributes that this page names. Those are

    output layers      `get_output_embeddings` and `base_model_prefix` of transformers' models
    adapters           `adapter_layer_names` of PEFT's layers
    batches of experts `num_experts` and `is_transposed` of transformers' Mixture-of-Experts modules
    Conv1D             the class of that name in transformers, which stores its weight (in, out)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

# PEFT's parameters that hold a vector for each token: A of LoRA on nn.Embedding (r, tokens), and single trained rows.
_TOKEN_TABLES = ("lora_embedding_A", "trainable_tokens_delta")


def find_head_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose weights are output layers of the model, or of models inside it.

    A model that names its output layer by `get_output_embeddings()` has all modules inside that layer as heads: PEFT's
    `modules_to_save` wraps the layer and keeps the trained weight in an inner module. A model of transformers that
    names none has as heads what lies outside its base model, `getattr(model, model.base_model_prefix)`, such as `score`
    and `classifier`. Adapters are no heads.

    Wrappers are looked through: the first module on each way from `model` downwards that gives an answer counts.
    """
    adapters = _find_adapters(model, lambda name: name != "modules_to_save")
    return _collect_heads(model) - adapters


def find_token_tables(model: nn.Module) -> set[nn.Module]:
    """Return the modules of PEFT that hold a vector for each token, as an embedding does."""
    return _find_adapters(model, lambda name: name in _TOKEN_TABLES)


def is_conv(module: nn.Module) -> bool:
    """Return whether the module is one of torch's convolutions, transposed or not."""
    return isinstance(module, _ConvNd)


def get_conv_groups(module: nn.Module) -> int:
    """Return the number of groups of a convolution, 1 for other modules."""
    return module.groups if isinstance(module, _ConvNd) else 1


def is_conv_of_output_rows(module: nn.Module) -> bool:
    """Return whether a convolution's weight (out, in / groups, k, ...) is one matrix, or one in each group.

    That of a transposed convolution has inputs as rows, and the rows of a depthwise one read a channel each.
    """
    is_depthwise = isinstance(module, _ConvNd) and module.groups == module.in_channels > 1
    return isinstance(module, _ConvNd) and not is_depthwise and not isinstance(module, _ConvTransposeNd)


def is_conv1d_of_transformers(module: nn.Module) -> bool:
    """Return whether the module is a linear layer of transformers that stores its weight (in, out)."""
    return hasattr(module, "nf") and any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def is_experts(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether the module holds the weights of all experts of a layer, and the parameter is a part of them.

    It must say both how many experts it has (`num_experts`, the parameter's first dimension) and how their matrices
    are stored (`is_transposed`), which cannot be seen from their shape.
    """
    return (
        isinstance(getattr(module, "is_transposed", None), bool)
        and getattr(module, "num_experts", None) == parameter.shape[0]
    )


def _collect_heads(module: nn.Module) -> set[nn.Module]:
    output = _call_get_output(module)
    if isinstance(output, nn.Module):
        return set(output.modules())
    # The class is asked, not the object: PEFT's wrappers pass attributes of the model inside on as their own.
    prefix = getattr(type(module), "base_model_prefix", None)
    base = getattr(module, prefix, None) if isinstance(prefix, str) and prefix else None
    if isinstance(base, nn.Module) and base is not module:
        return set(module.modules()) - set(base.modules())
    return set[nn.Module]().union(*map(_collect_heads, module.children()))


def _call_get_output(module: nn.Module) -> Any:
    get = getattr(module, "get_output_embeddings", None)
    return get() if callable(get) else None


def _find_adapters(model: nn.Module, is_wanted: Callable[[str], bool]) -> set[nn.Module]:
    """Return all modules inside the attributes that PEFT's layers list as adapters, by the name of the attribute."""
    found: set[nn.Module] = set()
    for module in model.modules():
        names = getattr(module, "adapter_layer_names", ())
        for name in filter(is_wanted, names if isinstance(names, tuple) else ()):
            if isinstance(adapter := getattr(module, name, None), nn.Module):
                found.update(adapter.modules())
    return found
