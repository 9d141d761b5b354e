"""Which parameters are matrices, embeddings, heads or vectors, and where fused matrices divide.

A model says what cannot be seen from outside, on the module that holds the parameter:

    role = "head"                    the weight is an output layer (or has another role)
    row_blocks = (768, 768, 768)     the weight is several matrices stacked along its rows

Nothing is guessed from a shape or a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

from torch import nn

Role = Literal["matrix", "embedding", "head", "vector"]
Blocks = tuple[int, ...]


class ParamRole(NamedTuple):
    """What a parameter is, and the rows of its blocks if it is a fused matrix."""

    role: Role
    blocks: Blocks | None


def parameter_roles(model: nn.Module) -> dict[str, ParamRole]:
    """The role of each parameter of the model, by canonical name, in the model's order.

    Weights of nn.Embedding are embeddings, tied or not; the weight of `model.get_output_embeddings()`, where
    the model has that, is a head; other 2-D parameters are matrices; 0-D and 1-D ones vectors. A module's
    `role` and `row_blocks` come before this, except that an embedding stays one and vectors stay vectors. A
    parameter used in several places counts once. Canonical names are without the `module.` of
    DistributedDataParallel and the `_orig_mod.` of torch.compile.

    Raises:
        ValueError: for a parameter of more than two dimensions whose module declares no role, an unknown
            role, or blocks that do not fit the rows.
    """
    return {name: role for name, _, role in _named_roles(model)}


def param_groups(model: nn.Module, blocks: bool = True) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Groups of the model's parameters for torch optimizers: those of the matrices, and those of the rest.

    `Combined(Muown(matrix), AdamW(rest))`, or `AdamW(matrix + rest)`. Every parameter that requires a
    gradient is in exactly one group, as a pair (canonical name, parameter), in the model's order.

    Args:
        model: any module; see `parameter_roles`.
        blocks: False treats fused matrices as one, as the Muon baseline of the paper did.

    Returns:
        matrix: one group for each way of dividing rows: {"params", "role": "matrix", "blocks": tuple or
            None}.
        rest: one group for each other role that occurs: {"params", "role"}.
    """
    matrix: dict[Blocks | None, dict[str, Any]] = {}
    rest: dict[Role, dict[str, Any]] = {}
    for name, parameter, (role, rows) in _named_roles(model):
        if not parameter.requires_grad:
            continue
        if role == "matrix":
            rows = rows if blocks else None
            group = matrix.setdefault(rows, {"params": [], "role": role, "blocks": rows})
        else:
            group = rest.setdefault(role, {"params": [], "role": role})
        group["params"].append((name, parameter))
    return list(matrix.values()), list(rest.values())


def canonical_name(name: str) -> str:
    """A parameter's name without what wrappers add: `_orig_mod` anywhere, `module` in front."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def _named_roles(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParamRole]]:
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(module)
    output = _output_module(model)
    seen: set[str] = set()
    for full_name, parameter in model.named_parameters():
        name = canonical_name(full_name)
        if name in seen:
            raise ValueError(f"two parameters are called {name} once the names of wrappers are removed")
        seen.add(name)
        role = _role(name, parameter, holders[parameter], output)
        yield name, parameter, ParamRole(role, _row_blocks(name, parameter, holders[parameter]))


def _role(name: str, parameter: nn.Parameter, holders: list[nn.Module], output: nn.Module | None) -> Role:
    declared = _declared(name, "role", holders)
    if declared is not None and declared not in get_args(Role):
        raise ValueError(f"{name}: its module declares role {declared!r}, not one of {', '.join(get_args(Role))}")
    if parameter.ndim < 2:
        return "vector"
    if parameter.ndim > 2 and declared in (None, "matrix"):
        raise ValueError(
            f"{name} has {parameter.ndim} dimensions, shape {tuple(parameter.shape)}, and its module gives "
            'it no role: set one on the module, as in role = "vector", for an optimizer that can take it'
        )
    if any(isinstance(holder, nn.Embedding) for holder in holders):
        return "embedding"
    if declared is not None:
        return declared  # type: ignore[no-any-return]
    return "head" if output in holders else "matrix"


def _row_blocks(name: str, parameter: nn.Parameter, holders: list[nn.Module]) -> Blocks | None:
    declared = _declared(name, "row_blocks", holders)
    if declared is None or parameter.ndim != 2:
        return None
    whole = isinstance(declared, Iterable) and all(isinstance(rows, int) and rows > 0 for rows in declared)
    if not whole or sum(declared) != parameter.shape[0]:
        raise ValueError(
            f"{name}: row_blocks must be positive whole numbers that sum to its {parameter.shape[0]} rows, "
            f"got {declared!r}"
        )
    return tuple(declared)


def _declared(name: str, attribute: str, holders: list[nn.Module]) -> Any:
    """What the modules that hold a parameter declare; None if none does."""
    declared = [value for holder in holders if (value := getattr(holder, attribute, None)) is not None]
    if any(value != declared[0] for value in declared):
        raise ValueError(f"{name} is shared by modules that declare different {attribute}: {declared}")
    return declared[0] if declared else None


def _output_module(model: nn.Module) -> nn.Module | None:
    """The output layer that the model, or what is inside its wrappers, names as such."""
    for module in model.modules():
        if callable(get := getattr(module, "get_output_embeddings", None)):
            output = get()
            return output if isinstance(output, nn.Module) else None
    return None
