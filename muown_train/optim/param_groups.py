"""The role of each parameter of a model (matrix, embedding, head or vector), and the blocks of fused matrices.

A model declares properties that cannot be seen from outside, on the module that holds the parameter:

    role = "head"                    the weight is an output layer (or has another role)
    row_blocks = (768, 768, 768)     the weight is several matrices stacked along its rows

Nothing is guessed from a shape or a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from torch import nn

from .core.checks import check_blocks

Role = Literal["matrix", "embedding", "head", "vector"]
Blocks = tuple[int, ...]


class ParamRole(NamedTuple):
    """The role of a parameter, and the rows of its blocks if it is a fused matrix."""

    role: Role
    blocks: Blocks | None


def parameter_roles(model: nn.Module) -> dict[str, ParamRole]:
    """Return the role of each parameter of the model, by canonical name, in the model's order.

    Weights of nn.Embedding are embeddings, tied or not; the weight of `model.get_output_embeddings()`, where the model
    has that method, is a head; other 2-D parameters are matrices; 0-D and 1-D parameters are vectors. A module's `role`
    and `row_blocks` take precedence, except that an embedding stays an embedding and vectors stay vectors. A parameter
    used in several places counts once. For canonical names see `canonical_name`.

    Raises:
        ValueError: for a parameter of more than two dimensions whose module declares no role, an unknown role, or
            blocks that do not fit the rows.
    """
    return {name: role for name, _, role in _iterate_roles(model)}


def param_groups(model: nn.Module, blocks: bool = True) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split the model's parameters into groups for torch optimizers: those of the matrices, and those of the rest.

    Use them as `Combined(Muown(matrix), AdamW(rest))` or as `AdamW(matrix + rest)`. Every parameter that requires a
    gradient is in exactly one group, as a pair (canonical name, parameter), in the model's order.

    Args:
        model: any module; see `parameter_roles`.
        blocks: False treats a fused matrix as one, as the Muon baseline of the paper did.

    Returns:
        matrix: one group for each way of dividing rows: {"params", "role": "matrix", "blocks": tuple or None}.
        rest: one group for each other role that occurs: {"params", "role"}.
    """
    matrix: dict[Blocks | None, dict[str, Any]] = {}
    rest: dict[Role, dict[str, Any]] = {}
    for name, parameter, (role, rows) in _iterate_roles(model):
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
    """Return a parameter's name without the parts that wrappers add.

    torch.compile adds `_orig_mod.` anywhere in the name, DistributedDataParallel `module.` in front.
    """
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def _iterate_roles(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParamRole]]:
    """Yield the canonical name, the parameter and its role, in the model's order."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(module)
    output = _find_output_module(model)
    seen: set[str] = set()
    for full_name, parameter in model.named_parameters():
        name = canonical_name(full_name)
        if name in seen:
            raise ValueError(f"two parameters are called {name} once the names of wrappers are removed")
        seen.add(name)
        role = _find_role(name, parameter, holders[parameter], output)
        yield name, parameter, ParamRole(role, _find_row_blocks(name, parameter, holders[parameter]))


def _find_role(name: str, parameter: nn.Parameter, holders: list[nn.Module], output: nn.Module | None) -> Role:
    declared = _get_declared(name, "role", holders)
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


def _find_row_blocks(name: str, parameter: nn.Parameter, holders: list[nn.Module]) -> Blocks | None:
    declared = _get_declared(name, "row_blocks", holders)
    if declared is None or parameter.ndim != 2:
        return None
    check_blocks(name, parameter, declared, key="row_blocks")
    return tuple(declared)


def _get_declared(name: str, attribute: str, holders: list[nn.Module]) -> Any:
    """Return the attribute that the modules holding a parameter declare, or None if they declare none."""
    declared = [value for holder in holders if (value := getattr(holder, attribute, None)) is not None]
    if any(value != declared[0] for value in declared):
        raise ValueError(f"{name} is shared by modules that declare different {attribute}: {declared}")
    return declared[0] if declared else None


def _find_output_module(model: nn.Module) -> nn.Module | None:
    """Return the output layer that the model, or the model inside its wrappers, names as such."""
    for module in model.modules():
        if callable(get := getattr(module, "get_output_embeddings", None)):
            output = get()
            return output if isinstance(output, nn.Module) else None
    return None
