"""The groups and the state of several optimizers as those of one: what `Combined` shows of its parts.

The parts stay the owners. `PartGroups` keeps one list of the groups of all parts, and `PartState` is one mapping of
their state; changes made on either side reach the other one.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.base import Group
from ..core.matrix import MatrixOptimizer
from ..core.names import describe_parameter

MAX_NAMES = 5  # parameters that a warning names


class PartGroups:
    """The list of the groups of all parts, with the parts' own dictionaries, and the rule which part takes a new one.

    Frameworks change the list of an optimizer (`groups`) and users that of a part. Nobody tells, so `synchronize`
    compares both with what it last saw. New groups of either side stand at the end of the list, where schedulers expect
    them.
    """

    def __init__(self, parts: Sequence[Optimizer], groups: list[Group]) -> None:
        self.parts = tuple(parts)
        self.groups = groups
        # Of every parameter ever seen. Weak references would keep torch from moving the parameters of FSDP2.
        self._owners: dict[Tensor, Optimizer] = {}
        _check_one_owner(groups)
        self._remember()

    def synchronize(self) -> list[Group]:
        """Carry changes of the list to the parts and changes of the parts to the list, and return the list.

        Raises:
            ValueError: if a change cannot be made; all groups are then as before it.
        """
        if not (_are_same(self.groups, self._seen) and all(map(_are_same, self._list_part_groups(), self._seen_parts))):
            try:
                self._distribute(self.groups)
            except Exception:
                self.groups[:] = self._seen
                raise
        return self.groups

    def replace(self, groups: list[Group]) -> None:
        """Make this list, and not a copy of it, the list of groups."""
        self.synchronize()
        groups = groups if isinstance(groups, list) else list(groups)
        self._distribute(groups)
        self.groups = groups

    def add(self, group: Group) -> None:
        """Add a group to the part that is to take it.

        Raises:
            ValueError: if the part refuses it; nothing has changed then.
        """
        self.synchronize()
        given = dict(group)
        if not isinstance(given["params"], Tensor | set):
            group["params"] = given["params"] = list(given["params"])
        self.groups.append(group)
        try:
            self.synchronize()
        except Exception:
            group.clear()
            group.update(given)
            raise

    def find_owner(self, p: Tensor) -> Optimizer | None:
        """Return the part that has the parameter in a group, or that had it last, or None."""
        self.synchronize()
        for part in self.parts:
            if any(q is p for group in part.param_groups for q in group["params"]):
                return part
        return self._owners.get(p)

    def list_owners(self) -> dict[Tensor, Optimizer]:
        """Return what `find_owner` returns for all parameters."""
        self.synchronize()
        self._remember_owners()
        return dict(self._owners.items())

    def _list_part_groups(self) -> list[list[Group]]:
        return [part.param_groups for part in self.parts]

    def _remember(self) -> None:
        """Keep what is now as what was last seen."""
        self._seen = list(self.groups)
        self._seen_parts = [list(groups) for groups in self._list_part_groups()]
        self._remember_owners()

    def _remember_owners(self) -> None:
        for part in self.parts:
            for p in chain.from_iterable(group["params"] for group in part.param_groups):
                self._owners[p] = part

    def _distribute(self, groups: list[Group]) -> None:
        """Give every group of the list to a part and take the others away; on an error the parts are as last seen."""
        try:
            self._remember_owners()
            _follow(groups, list(chain.from_iterable(self._seen_parts)), list(chain(*self._list_part_groups())))
            places = {id(group): part for part in self.parts for group in part.param_groups}
            for group in groups:
                if id(group) not in places:
                    _unpack_params(group)
            _check_one_owner(groups)
            added = []
            for j, group in enumerate(groups):
                if id(group) not in places:
                    part = places[id(group)] = self._choose_part(group, j)
                    if self._find_owners(group) != {part} or not _has_options(group, part):
                        added.append(group)
            for part in self.parts:
                own = [group for group in groups if places[id(group)] is part]
                if {*map(id, own)} == {*map(id, part.param_groups)}:
                    continue
                part.param_groups[:] = [group for group in own if not _contains(added, group)]
                for group in own:
                    if _contains(added, group):
                        _add_group(part, group)
                part.param_groups[:] = own
            self._drop_foreign_state(added)
        except Exception:
            for part, seen in zip(self.parts, self._seen_parts, strict=True):
                part.param_groups[:] = seen
            raise
        self._seen = list(groups)
        self._seen_parts = [list(own) for own in self._list_part_groups()]
        self._remember_owners()

    def _drop_foreign_state(self, groups: list[Group]) -> None:
        """Remove the state that a part kept of parameters which another part has now."""
        added = {id(group) for group in groups}
        for part in self.parts:
            new = [p for group in part.param_groups if id(group) in added for p in group["params"]]
            for other in self.parts:
                if other is not part:
                    for p in new:
                        other.state.pop(p, None)

    def _find_owners(self, group: Group) -> set[Optimizer | None]:
        """Return the parts that have or last had the parameters of a group, and None if one of them is new."""
        return {self._owners.get(p) for p in group["params"]}

    def _choose_part(self, group: Group, j: int) -> Optimizer:
        """Return the part for a group that is new in the list, see `Combined.add_param_group`."""
        owners = self._find_owners(group)
        known = [part for part in self.parts if part in owners]
        if len(known) == len(owners) == 1 and _has_options(group, known[0]):
            return known[0]  # a framework has taken the group away and now brings it back
        if "role" in group:
            return self._find_part_for_role(group["role"])
        if len(known) > 1:
            kinds = " and of ".join(type(part).__name__ for part in known)
            raise ValueError(f"group {j} has parameters of {kinds}: make it a group for each")
        if known:
            return known[0]
        if fitting := [part for part in self.parts if _has_options(group, part)]:
            return max(fitting, key=lambda part: len(part.defaults))
        part, for_matrices = self._find_part_for_role(None), self._find_part_for_role("matrix")
        names = [describe_parameter(group, i, j) for i, p in enumerate(group["params"]) if p.ndim >= 2]
        if names and part is not for_matrices:
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            warnings.warn(
                f"{', '.join(names[:MAX_NAMES])}{more} went to {type(part).__name__}, since the group has no role: "
                f'give it role="matrix" for {type(for_matrices).__name__} or another role, or hand all parameters '
                "over from the start with param_groups(model, frozen=True)",
                stacklevel=6,
            )
        return part

    def _find_part_for_role(self, role: str | None) -> Optimizer:
        for part in self.parts:
            if role is not None and any(group.get("role") == role for group in part.param_groups):
                return part
        for_matrices = [part for part in self.parts if isinstance(part, MatrixOptimizer | torch.optim.Muon)]
        if role == "matrix":
            return (for_matrices or self.parts)[0]
        return [part for part in self.parts if part not in for_matrices or len(for_matrices) == len(self.parts)][-1]


class PartState(MutableMapping[Any, Any]):
    """The state of all parts by parameter; what is written goes to the part that owns the parameter.

    As with the state of torch's optimizers, reading a parameter that has no state creates an empty one, if a part owns
    the parameter. Copies are plain dictionaries.
    """

    def __init__(self, groups: PartGroups) -> None:
        self._groups = groups

    @property
    def _states(self) -> list[MutableMapping[Any, Any]]:
        return [part.state for part in self._groups.parts]

    def _find(self, key: Any) -> MutableMapping[Any, Any] | None:
        """Return the state of the part that has the key, or that is to have it."""
        for state in self._states:
            if key in state:
                return state
        owner = self._groups.find_owner(key) if isinstance(key, Tensor) else self._groups.parts[0]
        return None if owner is None else owner.state

    def __getitem__(self, key: Any) -> Any:
        state = self._find(key)
        return {} if state is None else state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        state = self._find(key)
        if state is None:
            raise ValueError(
                f"no group has this parameter of shape {tuple(key.shape)}: put it into a group before you set its state"
            )
        state[key] = value

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        for state in self._states:
            state.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return any(key in state for state in self._states)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._states)

    def __len__(self) -> int:
        return sum(map(len, self._states))

    def get(self, key: Any, default: Any = None) -> Any:
        state = self._find(key) if key in self else None
        return default if state is None else state[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self.get(key)
        del self[key]
        return value

    def clear(self) -> None:
        for state in self._states:
            state.clear()

    def replace(self, state: Mapping[Any, Any]) -> None:
        """Make this the state of all parts.

        Raises:
            ValueError: if a parameter is in no group; nothing has changed then.
        """
        shares: dict[int, dict[Any, Any]] = {}
        owners = self._groups.list_owners()
        for key, value in state.items():
            owner = owners.get(key) if isinstance(key, Tensor) else self._groups.parts[0]
            if owner is None:
                raise ValueError(f"the state has a parameter of shape {tuple(key.shape)}, which is in no group")
            shares.setdefault(id(owner), {})[key] = value
        for part in self._groups.parts:
            part.state.clear()
            part.state.update(shares.get(id(part), {}))

    def copy(self) -> defaultdict[Any, Any]:
        return defaultdict(dict, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __repr__(self) -> str:
        return repr(dict(self))


def _are_same(groups: Sequence[Group], others: Sequence[Group]) -> bool:
    """Return whether these are the same dictionaries in the same order; tensors in them are not compared."""
    return len(groups) == len(others) and all(group is other for group, other in zip(groups, others, strict=True))


def _contains(groups: Sequence[Group], group: Group) -> bool:
    return any(other is group for other in groups)


def _follow(groups: list[Group], before: list[Group], now: list[Group]) -> None:
    """Change the list as the groups of the parts have changed: loading, for one, makes all dictionaries anew."""
    gone = [group for group in before if not _contains(now, group)]
    for new in now:
        if _contains(before, new) or _contains(groups, new):
            continue
        params = [id(p) for p in new["params"]]
        old = next((group for group in gone if [id(p) for p in group["params"]] == params), None)
        if old is None or not _contains(groups, old):
            groups.append(new)
        else:
            groups[:] = [new if group is old else group for group in groups]
            gone = [group for group in gone if group is not old]
    groups[:] = [group for group in groups if not _contains(gone, group)]


def _check_one_owner(groups: Sequence[Group]) -> None:
    """Raise ValueError if a parameter is in two groups."""
    owned: set[Tensor] = set()
    for j, group in enumerate(groups):
        for i, p in enumerate(group["params"]):
            if p in owned:
                raise ValueError(f"{describe_parameter(group, i, j)} is in two groups: one optimizer must own it")
            owned.add(p)


def _has_options(group: Group, part: Optimizer) -> bool:
    """Return whether a group has all options of a part, as a group has that was in it."""
    return part.defaults.keys() <= group.keys()


def _unpack_params(group: Group) -> None:
    """Bring "params" into the form that it has in an optimizer: a list of tensors, with "param_names" beside it.

    Raises:
        TypeError: for a set, whose order changes, and for what is no tensor.
        ValueError: if some parameters have a name and others have none.
    """
    params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    if isinstance(params, set):
        raise TypeError("the parameters of a group need an order, which a set does not have: use a list")
    params = list(params)
    names = [p[0] for p in params if isinstance(p, tuple)]
    tensors = [p[1] if isinstance(p, tuple) else p for p in params]
    if names and len(names) < len(params):
        raise ValueError("some parameters of the group have a name and others have none: give all of them a name")
    for p in tensors:
        if not isinstance(p, Tensor):
            raise TypeError(f"an optimizer takes tensors, but one of the parameters is a {type(p).__name__}")
    group["params"] = tensors
    if names:
        group["param_names"] = names


def _add_group(part: Optimizer, group: Group) -> None:
    """Add a group to a part; torch alone would refuse it if it has names of parameters and the others have none."""
    own, is_named = list(part.param_groups), "param_names" in group
    part.param_groups[:] = [_match_names(other, is_named) for other in own]
    try:
        part.add_param_group(group)
    finally:
        part.param_groups[: len(own)] = own


def _match_names(group: Group, is_named: bool) -> Group:
    """Return the group if it has names or not, as wanted, else a copy with empty names or without."""
    if ("param_names" in group) == is_named:
        return group
    return group | {"param_names": []} if is_named else {k: v for k, v in group.items() if k != "param_names"}
