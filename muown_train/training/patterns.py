"""Settings of single parameters, by patterns of their names: groups of parameters that are divided accordingly."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from muown_train.runtime.suggest import nearest

Group = dict[str, Any]
Patterns = Mapping[str, Mapping[str, Any]]


def divided(groups: list[Group], patterns: Patterns, check: Callable[..., None]) -> list[Group]:
    """The groups, each divided by which patterns its parameters match, with their settings.

    Where several patterns match a parameter the later one's settings win. A divided group has "patterns", those that
    it matches with their settings.

    Args:
        groups: as of `optim.param_groups`, their "params" pairs of (canonical name, parameter).
        patterns: shell-style patterns of names, such as `blocks.*.mlp.out.weight`, and settings.
        check: called with the settings of a pattern that matches and, as `section`, what messages call them.
    """
    result: list[Group] = []
    for group in groups:
        parts: dict[tuple[str, ...], Group] = {}
        for name, parameter in group["params"]:
            matching = tuple(pattern for pattern in patterns if fnmatchcase(name, pattern))
            if matching not in parts:
                parts[matching] = {**group, "params": []}
                for pattern in matching:
                    check(patterns[pattern], section=f"optim.patterns.{pattern}")
                    parts[matching] |= patterns[pattern]
                if matching:
                    parts[matching]["patterns"] = {pattern: dict(patterns[pattern]) for pattern in matching}
            parts[matching]["params"].append((name, parameter))
        result += parts.values()
    return result


def check_patterns(patterns: Any, names: list[str]) -> Patterns:
    """The patterns, {} for None.

    Args:
        names: of all parameters.

    Raises:
        ValueError: they are no mapping, or one of them matches no name.
    """
    if patterns is None:
        return {}
    if not isinstance(patterns, Mapping):
        raise ValueError(
            f"optim.patterns={patterns!r} must be a mapping, such as {{blocks.*.mlp.out.weight: {{lr: 1e-3}}}}"
        )
    for pattern in patterns:
        if not any(fnmatchcase(name, str(pattern)) for name in names):
            known = nearest(str(pattern), names) or f"; there are names such as {names[-1]}"
            raise ValueError(f"optim.patterns.{pattern} matches no parameter{known}")
    return patterns
