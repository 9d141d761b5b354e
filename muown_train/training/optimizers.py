"""Build the optimizer of a run from the `optim` section of its configuration, or say which setting is wrong."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from muown_train.config.checks import check_bool
from muown_train.config.instantiate import bind_target, check_settings
from muown_train.optim import Combined, param_groups, shard
from muown_train.runtime.distributed import World, group_ranks_by_node
from muown_train.runtime.suggest import suggest_nearest

_Settings = Mapping[str, Any]
_ParamGroup = dict[str, Any]

# What messages of torch.optim call an option, as a regular expression, where it is not the option's own name.
_TORCH_WORDS = {
    "lr": "learning rate",
    "betas": "beta parameter",
    "eps": r"epsilon\d?",
    "weight_decay": "weight decay",
    "etas": "eta values",
    "d": "clipping threshold d",
    "adjust_lr_fn": "adjust learning rate function",
}


def build_optimizer(optim: _Settings, model: nn.Module, trust: Sequence[str] = ()) -> Combined:
    """Give the matrices to the optimizer of `optim` and the other parameters to that of `optim.rest`.

    Args:
        optim: the resolved section, with its settings for single roles (`rest.embedding`, `rest.head`, `rest.vector`)
            and for parameters by name (`patterns`).
        trust: see `bind_target`.

    Raises:
        ValueError: a setting is unknown or wrong; the message names it as the user gave it.
    """
    settings = dict(optim)
    rest, patterns = settings.pop("rest", None), settings.pop("patterns", None)
    row_blocks = check_bool("optim.row_blocks", settings.pop("row_blocks", True))
    if not isinstance(rest, Mapping):
        raise ValueError(f"optim.rest={rest!r} must be the settings of an optimizer")
    rest = dict(rest)
    roles = {role: rest.pop(role, None) or {} for role in ("embedding", "head", "vector")}
    for_matrices = bind_target(settings, "optim", ["params"], trust)
    for_rest = bind_target(rest, "optim.rest", ["params"], trust)
    for role, own in roles.items():
        check_settings(own, for_rest, f"optim.rest.{role}", given=["params"])
    matrices, others = param_groups(model, blocks=row_blocks)
    others = [group | roles[group["role"]] for group in others]
    patterns = check_patterns(patterns, [name for group in matrices + others for name, _ in group["params"]])
    parts = []
    for section, optimizer, groups in (("optim", for_matrices, matrices), ("optim.rest", for_rest, others)):
        groups = split_param_groups(groups, patterns, partial(check_settings, target=optimizer, given=["params"]))
        for group in groups:
            sections = {section: optimizer.keywords, f"{section}.{group['role']}": roles.get(group["role"], {})}
            sections |= {f"optim.patterns.{name}": own for name, own in group.get("patterns", {}).items()}
            _check_values(optimizer.func, sections, group)
        parts.append(_construct(optimizer, groups, section))
    return Combined(*parts)


def split_param_groups(
    groups: list[_ParamGroup], patterns: Mapping[str, _Settings], check: Callable[..., object]
) -> list[_ParamGroup]:
    """Split groups by which patterns their parameters match, and add the settings of those patterns.

    Where several patterns match a parameter the later one's settings win. A group that patterns match has them with
    their settings as "patterns".

    Args:
        groups: groups as `optim.param_groups` returns them: "params" are pairs (canonical name, parameter).
        patterns: settings by shell-style patterns of names, such as `blocks.*.mlp.out.weight`.
        check: a function that is called with the settings of each pattern that matches and, as `section`, the name of
            these settings in messages.
    """
    result: list[_ParamGroup] = []
    for group in groups:
        parts: dict[tuple[str, ...], _ParamGroup] = {}
        for name, parameter in group["params"]:
            matches = tuple(pattern for pattern in patterns if fnmatchcase(name, pattern))
            if matches not in parts:
                parts[matches] = {**group, "params": []}
                for pattern in matches:
                    check(patterns[pattern], section=f"optim.patterns.{pattern}")
                    parts[matches] |= patterns[pattern]
                if matches:
                    parts[matches]["patterns"] = {pattern: dict(patterns[pattern]) for pattern in matches}
            parts[matches]["params"].append((name, parameter))
        result += parts.values()
    return result


def check_patterns(patterns: Any, names: list[str]) -> Mapping[str, _Settings]:
    """Return `optim.patterns`, {} where it is None.

    Args:
        names: the canonical names of all parameters.

    Raises:
        ValueError: it is no mapping, or one of its patterns matches no name.
    """
    if patterns is None:
        return {}
    if not isinstance(patterns, Mapping):
        raise ValueError(
            f"optim.patterns={patterns!r} must be a mapping, such as {{blocks.*.mlp.out.weight: {{lr: 1e-3}}}}"
        )
    for pattern in patterns:
        if not any(fnmatchcase(name, str(pattern)) for name in names):
            hint = suggest_nearest(str(pattern), names) or f"; there are names such as {names[-1]}"
            raise ValueError(f"optim.patterns.{pattern} matches no parameter{hint}")
    return patterns


def _check_values(optimizer: Callable[..., Optimizer], sections: Mapping[str, _Settings], group: _ParamGroup) -> None:
    """Refuse a value by the section that holds it.

    An optimizer of torch checks the arguments of its constructor but no options of a group. So the settings of a group
    are given to the constructor, section by section, with a parameter of one element.

    Args:
        sections: the settings of one group by section; later sections win.
        group: the group, of whose parameters the dimensions and the layout count.
    """
    settings: dict[str, Any] = {}
    ones = nn.Parameter(torch.ones([1] * group["params"][0][1].ndim))
    layout = {key: group[key] for key in ("layout", "transposed") if key in group}
    for section, own in sections.items():
        settings |= own
        _construct(partial(optimizer, **settings), [{"params": [ones], **layout}], section)


def _construct(optimizer: partial[Any], params: list[Any], section: str) -> Optimizer:
    """Call an optimizer's constructor; its errors name the setting in the section, or the section."""
    try:
        result: Optimizer = optimizer(params)
    except ValueError as error:
        message = str(error)
        option = _find_option(message, optimizer.keywords)
        if option is None:
            raise ValueError(f"{section}: {message}") from error
        if message.startswith(option):
            raise ValueError(f"{section}.{message}") from error
        raise ValueError(f"{section}.{option}: {message}") from error
    return result


def _find_option(message: str, options: Iterable[str]) -> str | None:
    """Return the option that an optimizer's error message begins with, if any: ours by its name, torch's by a word."""
    for option in options:
        words = f"(?:{option}|{_TORCH_WORDS.get(option, option)})"
        if re.match(rf"(?:invalid |tensor )?{words}(?=:? )", message, re.IGNORECASE):
            return option
    return None


def shard_optimizer(optimizer: Combined, scope: str, world: World) -> None:
    """Spread the optimizer's work over ranks; a collective call.

    The ranks of a node have fast links. If only they share the work, every node computes all of it, and no weights
    cross the network between nodes, whose time would be longer than that of the work that is saved.

    Args:
        scope: "node": the ranks of each node share it, or all ranks if some nodes have more than others, since what is
            computed in other batches is rounded otherwise; "all"; or "none".
    """
    if scope == "none" or world.size == 1:
        return
    nodes = group_ranks_by_node(world) if scope == "node" else []
    if len(nodes) <= 1 or len({len(ranks) for ranks in nodes}) > 1:
        shard(optimizer)
    elif len(nodes[0]) > 1:
        group, _ = dist.new_subgroups_by_enumeration(nodes, timeout=world.timeout)  # type: ignore[no-untyped-call]
        shard(optimizer, group)
