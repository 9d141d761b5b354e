"""The role of each parameter of a model (matrix, embedding, head or vector), and how its matrices are stored.

A model declares properties that cannot be seen from outside, on the module that holds the parameter:

    role = "head"                    the weight is an output layer (or has another role)
    row_blocks = (768, 768, 768)     the weight is several matrices stacked along its rows
    layout = "experts"               the weight (E, out, in) is a batch of matrices; "conv": (out, in, k, ...) is one
    transposed = True                each matrix is stored (in, out)

A module with several parameters can declare a dictionary by their names in it: role = {"cls_token": "vector"}. Rows
are always outputs: `row_blocks` of a matrix that is stored (in, out) divide its columns.

Nothing is guessed from a shape or a name but what `parameter_roles` lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from torch import nn

from .core.checks import check_blocks, check_choice
from .core.names import canonical_name
from .known_modules import (
    find_head_modules,
    find_token_tables,
    get_conv_groups,
    is_conv,
    is_conv1d_of_transformers,
    is_conv_of_output_rows,
    is_experts,
)
from .row_shards.placement import release_gathered

__all__ = ["Blocks", "Layout", "ParamRole", "Role", "canonical_name", "param_groups", "parameter_roles"]

Role = Literal["matrix", "embedding", "head", "vector"]
Layout = Literal["conv", "experts"]
Blocks = tuple[int, ...]

_CONV_ADVICE = (
    'call param_groups(model, conv="matrix") to give the weights of convolutions to the matrix optimizer, or set '
    'role = "vector" on their modules to give them to the other one'
)
_LAYOUT_ADVICE = (
    'set role = "vector" on the module, for an optimizer that can take it, or layout = "experts" if it is a batch of '
    "matrices (experts, out, in), with transposed = True if they are stored (experts, in, out)"
)


class ParamRole(NamedTuple):
    """The role of a parameter and, if it is a matrix, the rows of its blocks and how it is stored."""

    role: Role
    blocks: Blocks | None = None
    layout: Layout | None = None
    transposed: bool = False


def parameter_roles(model: nn.Module, conv: Literal["matrix"] | None = None) -> dict[str, ParamRole]:
    """Return the role of each parameter of the model, by canonical name, in the model's order.

    The first of these rules that applies decides. A parameter used in several places counts once, with all its places.

    1. Parameters of 0 and 1 dimensions are vectors.
    2. Weights of nn.Embedding and nn.EmbeddingBag are embeddings, tied or not, and so are the tables of PEFT that hold
       a vector for each token (`lora_embedding_A`, `trainable_tokens_delta`).
    3. A `role` that the module declares is taken. For the role "matrix" rules 5 to 7 say how it is stored.
    4. Weights of output layers are heads. If the model has `get_output_embeddings()` and it returns a module, these are
       the weights inside it. Otherwise, if the model has a `base_model_prefix` as those of transformers have, these are
       the weights outside the base model of that name: `score`, `classifier`, `qa_outputs` and others. Wrappers (PEFT,
       DistributedDataParallel, torch.compile) are looked through. Adapters of PEFT are no heads: LoRA's `lora_A` and
       `lora_B` are matrices even on an output layer.
    5. Batches of experts are matrices of layout "experts": 3-D parameters of a module that declares this layout, or
       that has both `is_transposed` and a `num_experts` equal to the first dimension, as the Mixture-of-Experts modules
       of transformers 5 have. 2-D parameters of such a module are a vector of each expert, and thus vectors.
    6. Other 2-D parameters are matrices. Those of transformers' Conv1D (GPT-2) are `transposed`.
    7. Weights of convolutions are matrices of layout "conv" if `conv` is "matrix", or if the module declares
       layout = "conv" or role = "matrix". A convolution of g > 1 groups is g blocks of rows. Under conv="matrix",
       weights of depthwise convolutions are vectors, since no two of their rows read the same channel, and so are those
       of transposed convolutions, whose rows would be inputs.

    For canonical names see `canonical_name`.

    Args:
        conv: "matrix" makes matrices of the weights of convolutions. Without it their modules must declare a role.

    Raises:
        ValueError: listing every parameter of more than two dimensions that no rule covers, and every declaration that
            is unknown or does not fit its parameter, with what to do.
    """
    return {name: role for name, _, role in _read_roles(model, conv)}


def param_groups(
    model: nn.Module,
    blocks: bool = True,
    *,
    conv: Literal["matrix"] | None = None,
    frozen: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split the model's parameters into groups for torch optimizers: those of the matrices, and those of the rest.

    Use them as `Combined(Muown(matrix), AdamW(rest))` or as `AdamW(matrix + rest)`. Every parameter that requires a
    gradient is in exactly one group, as a pair (canonical name, parameter), in the model's order. `describe` shows
    what became of a model. Of a model that FSDP2 has sharded, these are the DTensors.

    Args:
        model: any module; see `parameter_roles`.
        blocks: False treats a fused matrix as one, as the Muon baseline of the paper did.
        conv: "matrix" makes matrices of the weights of convolutions; see `parameter_roles`.
        frozen: True takes parameters that do not require a gradient too, so that they can be unfrozen later. An
            optimizer leaves them alone for as long as they have no gradient.

    Returns:
        matrix: one group for each way of storing a matrix: {"params", "role": "matrix", "blocks": tuple or None}, with
            "layout" and "transposed" where they differ from None and False.
        rest: one group for each other role that occurs: {"params", "role"}.

        Neither is an empty list, which torch's optimizers refuse: in its place there is a group without parameters.
    """
    release_gathered(model)
    matrix: dict[ParamRole, dict[str, Any]] = {}
    rest: dict[Role, dict[str, Any]] = {}
    for name, parameter, role in _read_roles(model, conv, lambda parameter: frozen or parameter.requires_grad):
        if role.role == "matrix":
            role = role if blocks else role._replace(blocks=None)
            group = matrix.setdefault(role, {"params": [], **_list_options(role)})
        else:
            group = rest.setdefault(role.role, {"params": [], "role": role.role})
        group["params"].append((name, parameter))
    return (
        list(matrix.values()) or [_make_empty_group() | _list_options(ParamRole("matrix"))],
        list(rest.values()) or [_make_empty_group() | {"role": "vector"}],
    )


def _make_empty_group() -> dict[str, Any]:
    """Return a group without parameters that may stand beside groups whose parameters have names."""
    return {"params": [], "param_names": []}


def _list_options(matrix: ParamRole) -> dict[str, Any]:
    """Return the options of a group of matrices; those that have always been there come first, the rest if needed."""
    options: dict[str, Any] = {"role": matrix.role, "blocks": matrix.blocks}
    if matrix.layout is not None:
        options["layout"] = matrix.layout
    if matrix.transposed:
        options["transposed"] = True
    return options


class _Problem(ValueError):
    """What is wrong with one parameter, and what to do about it ("" if that is plain)."""

    def __init__(self, fault: str, advice: str = "") -> None:
        super().__init__(fault)
        self.fault, self.advice = fault, advice


DECLARATIONS = ("role", "row_blocks", "layout", "transposed")  # attributes of modules


class _Place(NamedTuple):
    """A module that holds a parameter, and the parameter's name in it."""

    module: nn.Module
    key: str


class _Reader(NamedTuple):
    """What the rules know of the model as a whole."""

    heads: set[nn.Module]
    token_tables: set[nn.Module]
    conv: Literal["matrix"] | None

    def read_role(self, name: str, parameter: nn.Parameter, places: list[_Place]) -> ParamRole:
        """Return the role of a parameter by the rules that `parameter_roles` lists."""
        modules = [place.module for place in places]
        declared = _get_declared(name, "role", places)
        if declared is not None and declared not in get_args(Role):
            raise _Problem(f"{name}: its module declares role {declared!r}, not one of {', '.join(get_args(Role))}")
        if parameter.ndim < 2:
            return ParamRole("vector")
        if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) or module in self.token_tables for module in modules):
            return ParamRole("embedding")
        if declared is None and not self.heads.isdisjoint(modules):
            return ParamRole("head")
        if declared not in (None, "matrix"):
            return ParamRole(declared)
        layout = _read_layout(name, parameter, places)
        if parameter.ndim == 2:
            if layout == "experts" and declared is None:
                return ParamRole("vector")
            return _read_matrix(name, parameter, places, None)
        if layout is None and any(map(is_conv, modules)) and (declared == "matrix" or self.conv == "matrix"):
            if declared is None and not any(map(is_conv_of_output_rows, modules)):
                return ParamRole("vector")
            layout = "conv"
        if layout is None:
            lacking = "role" if declared is None else "layout"
            raise _Problem(
                f"{name} has {parameter.ndim} dimensions, shape {tuple(parameter.shape)}, and its module gives it no "
                f"{lacking}",
                _CONV_ADVICE if any(map(is_conv, modules)) else _LAYOUT_ADVICE,
            )
        return _read_matrix(name, parameter, places, layout)


def _read_roles(
    model: nn.Module,
    conv: Literal["matrix"] | None,
    is_wanted: Callable[[nn.Parameter], bool] = lambda parameter: True,
) -> list[tuple[str, nn.Parameter, ParamRole]]:
    """Return the canonical name, the parameter and its role for all wanted parameters, in the model's order."""
    check_choice("conv", conv, (None, "matrix"))
    places: dict[nn.Parameter, list[_Place]] = {}
    problems: list[_Problem] = []
    for module_name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for key, parameter in own.items():
            places.setdefault(parameter, []).append(_Place(module, key))
        problems += _find_misspelt(module_name or "the model", module, own)
    reader = _Reader(find_head_modules(model), find_token_tables(model), conv)
    result: dict[str, tuple[str, nn.Parameter, ParamRole]] = {}
    for full_name, parameter in model.named_parameters():
        if not is_wanted(parameter):
            continue
        name = canonical_name(full_name)
        try:
            if name in result:
                raise _Problem(f"two parameters are called {name} once the names of wrappers are removed")
            result[name] = (name, parameter, reader.read_role(name, parameter, places[parameter]))
        except _Problem as problem:
            problems.append(problem)
    if problems:
        raise ValueError(_join_problems(problems))
    return list(result.values())


def _join_problems(problems: list[_Problem]) -> str:
    """Return the message for all problems of a model: those with the same advice together."""
    if len(problems) == 1:
        return problems[0].fault + (f": {problems[0].advice}" if problems[0].advice else "")
    faults: dict[str, list[str]] = {}
    for problem in problems:
        faults.setdefault(problem.advice, []).append(problem.fault)
    lines = [f"{len(problems)} parameters of the model cannot be given to an optimizer:"]
    for advice, same in faults.items():
        lines += [f"  {fault}" for fault in same] + ([f"  -> {advice}"] if advice else [])
    return "\n".join(lines)


def _read_layout(name: str, parameter: nn.Parameter, places: list[_Place]) -> Layout | None:
    """Return the layout that the modules declare, or that of the experts that they are known to hold."""
    layout = _get_declared(name, "layout", places)
    if layout is None and parameter.ndim in (2, 3) and any(is_experts(module, parameter) for module, _ in places):
        layout = "experts"
    if parameter.ndim == 2:
        return "experts" if layout == "experts" else None
    if layout is not None and layout not in get_args(Layout):
        raise _Problem(f"{name}: its module declares layout {layout!r}, not one of {', '.join(get_args(Layout))}")
    if layout == "experts" and parameter.ndim != 3:
        raise _Problem(
            f'{name}: its module declares layout "experts", which is (experts, out, in), but its shape is '
            f"{tuple(parameter.shape)}"
        )
    return layout  # type: ignore[no-any-return]


def _read_matrix(name: str, parameter: nn.Parameter, places: list[_Place], layout: Layout | None) -> ParamRole:
    """Return the role of a matrix with this layout, with its orientation and its blocks."""
    modules = [module for module, _ in places]
    transposed = False
    if layout != "conv":
        declared = _get_declared(name, "transposed", places)
        if declared not in (None, True, False):
            raise _Problem(f"{name}: its module declares transposed {declared!r}, not True or False")
        if declared is not None:
            transposed = declared
        elif layout == "experts":
            transposed = any(getattr(module, "is_transposed", False) is True for module in modules)
        else:
            transposed = any(map(is_conv1d_of_transformers, modules))
    blocks = _get_declared(name, "row_blocks", places)
    if blocks is None and layout == "conv":
        groups = max(map(get_conv_groups, modules))
        blocks = (parameter.shape[0] // groups,) * groups if groups > 1 else None
    matrix = parameter.detach()[0] if layout == "experts" else parameter.detach()
    try:
        check_blocks(name, matrix.mT if transposed else matrix, blocks, key="row_blocks")
    except ValueError as error:
        raise _Problem(str(error)) from None
    return ParamRole("matrix", None if blocks is None else tuple(blocks), layout, transposed)


def _find_misspelt(name: str, module: nn.Module, own: dict[str, nn.Parameter]) -> list[_Problem]:
    """Return a problem for each declaration of a module by names of parameters, if it names one that it does not hold.

    A module without parameters may have attributes of these names for purposes of its own.
    """
    declared = {attribute: getattr(module, attribute, None) for attribute in DECLARATIONS if own}
    return [
        _Problem(
            f"{name} declares {attribute} of {', '.join(map(repr, unknown))}, and "
            f"its own parameters are {', '.join(own)}"
        )
        for attribute, value in declared.items()
        if isinstance(value, dict) and (unknown := [key for key in value if key not in own])
    ]


def _get_declared(name: str, attribute: str, places: list[_Place]) -> Any:
    """Return the attribute that the modules holding a parameter declare, or None if they declare none."""
    declared = []
    for module, key in places:
        value = getattr(module, attribute, None)
        if isinstance(value, dict):
            value = value.get(key)
        if value is not None:
            declared.append(value)
    if any(value != declared[0] for value in declared):
        raise _Problem(f"{name} is shared by modules that declare different {attribute}: {declared}")
    return declared[0] if declared else None
