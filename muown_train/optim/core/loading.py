"""State dicts of optimizers: they hold data alone, and are matched with an optimizer by the names of parameters."""

from __future__ import annotations

from itertools import chain
from typing import Any

from .names import canonical_name

SHARE = "share"  # the key by which a state dict says of which rank, of how many, it is the share
Group = dict[str, Any]
StateDict = dict[str, Any]


def check_group_sizes(own: list[Group], saved: list[Group]) -> None:
    """Raise ValueError unless the saved groups have as many parameters as the optimizer's own."""
    sizes, saved_sizes = ([len(group["params"]) for group in groups] for groups in (own, saved))
    if sizes != saved_sizes:
        raise ValueError(f"the saved optimizer has groups of {saved_sizes} parameters, this one of {sizes}")


def match_by_name(own: list[Group], state_dict: StateDict) -> StateDict:
    """Return a state dict whose groups are those of the optimizer, in the optimizer's order.

    Where every group has names of parameters on both sides, and no name twice, they decide, in canonical form (see
    `canonical_name`): the saved groups may be in another order, or divided otherwise. Else the order decides.

    Raises:
        ValueError: if it is the share of a rank alone, if a parameter has no partner, if a group takes parameters of
            saved groups whose options differ, or, where the order decides, if the groups differ in size.
    """
    if SHARE in state_dict:
        rank, size = state_dict[SHARE]
        raise ValueError(
            f"the saved state is the share of rank {rank} of {size}, and this optimizer is not sharded: load what "
            "gather_state_dict returns, or call shard() first and load the share on that rank"
        )
    saved = state_dict["param_groups"]
    names, saved_names = (list(chain.from_iterable(map(_list_names, groups))) for groups in (own, saved))
    saved_ids = list(chain.from_iterable(group["params"] for group in saved))
    is_named = len(names) == sum(len(group["params"]) for group in own) and len(saved_names) == len(saved_ids)
    if not is_named or len(set(names)) < len(names) or len(set(saved_names)) < len(saved_names):
        check_group_sizes(own, saved)
        return state_dict
    ids = dict(zip(saved_names, saved_ids, strict=True))
    sides = ("the saved optimizer", set(ids)), ("this optimizer", set(names))
    for (holder, held), (other, others) in (sides, sides[::-1]):
        if missing := others - held:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"{holder} does not have parameter {min(missing)!r}{more}, which {other} has")
    groups = []
    for j, group in enumerate(own):
        members = [ids[name] for name in _list_names(group)]
        options = [_get_options(other) for other in saved if not set(members).isdisjoint(other["params"])]
        if any(other != options[0] for other in options):
            raise ValueError(f"group {j} holds parameters that were saved in groups with different options")
        if not options:  # an empty group
            options = [_get_options(group)]
        groups.append(options[0] | {"params": members, "param_names": list(group.get("param_names", ()))})
    return state_dict | {"param_groups": groups}


def name_functions(state_dict: StateDict) -> StateDict:
    """Return the state dict with the name of each function among the options of its groups in place of it.

    A function cannot be loaded with `weights_only=True`, and a lambda not even saved.
    """
    groups = [
        {key: get_function_name(value) if callable(value) else value for key, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    return state_dict | {"param_groups": groups}


def get_function_name(function: Any) -> str:
    """Return the name of a user's function in state dicts: its module and its name there."""
    kind = type(function)
    owner = function if hasattr(function, "__qualname__") else kind
    return f"{owner.__module__}.{owner.__qualname__}"


def _list_names(group: Group) -> list[str]:
    return [canonical_name(name) for name in group.get("param_names", ())]


def _get_options(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
