"""A text that shows which optimizer moves which parameters of a model, and as which matrices."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

_COLUMNS = 80
_NO_BREAK = "\N{NO-BREAK SPACE}"

Group = dict[str, Any]
_Name = tuple[str | tuple[int, ...], ...]  # the parts of a name; a tuple of numbers stands for each of them


class _Kind(NamedTuple):
    """What a line of the table counts."""

    role: str
    optimizer: str
    storage: str


class _Line(NamedTuple):
    """Parameters of one group that differ in the numbers of their names alone."""

    name: _Name
    shape: tuple[int, ...]
    is_frozen: bool
    number: int


def describe(groups: torch.optim.Optimizer | Iterable[Group | Iterable[Group]]) -> str:
    """Return a text that says where each parameter goes: `print(describe(optimizer))`.

    A table gives the share of all parameters by role, optimizer and storage of the matrices. Then each group lists the
    names and shapes of its parameters, where layers that differ in their numbers alone share a line. No line is longer
    than 80 columns.

    Args:
        groups: an optimizer, where `Combined` shows its parts; the groups of one, or what `param_groups` returns.
    """
    named = list(_iterate_groups(groups))
    sizes: dict[_Kind, int] = {}
    for optimizer, group in named:
        for p in _get_tensors(group):
            kind = _find_kind(optimizer, group, p)
            sizes[kind] = sizes.get(kind, 0) + p.numel()
    total = sum(sizes.values())
    matrix = sum(size for kind, size in sizes.items() if kind.role == "matrix")
    lines = [f"matrix {_format_share(matrix, total)} of {_format_count(total)} parameters", ""]
    lines += _format_table(sizes, total)
    for i, (optimizer, group) in enumerate(named):
        if not _get_tensors(group):
            continue
        words = [group.get("role", ""), optimizer, *_list_storage(group), _format_blocks(group.get("blocks"))]
        lines += ["", *_wrap(f"group {i}: {', '.join(word for word in words if word) or 'no role'}", indent=4)]
        lines += [text for line in _fold_layers(group) for text in _wrap(f"  {_format_line(line)}", indent=6)]
    return "\n".join(lines)


def _iterate_groups(groups: torch.optim.Optimizer | Iterable[Group | Iterable[Group]]) -> Iterator[tuple[str, Group]]:
    """Yield the groups in order, each with the name of its optimizer, or "" if there is none."""
    if isinstance(groups, torch.optim.Optimizer):
        owners = {
            id(group): name for part in getattr(groups, "optimizers", ()) for name, group in _iterate_groups(part)
        }
        yield from ((owners.get(id(group), type(groups).__name__), group) for group in groups.param_groups)
        return
    for item in groups:
        if isinstance(item, dict):
            yield "", item
        else:
            yield from _iterate_groups(item)


def _get_tensors(group: Group) -> list[Tensor]:
    """Return the parameters of a group, whose "params" may be pairs (name, parameter) or a single tensor."""
    params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    return [p[1] if isinstance(p, tuple) else p for p in params]


def _get_names(group: Group) -> list[str]:
    """Return the names of a group's parameters, "unnamed" for those that have none."""
    if isinstance(group["params"], Tensor):
        return ["unnamed"]
    own = group.get("param_names") or ["unnamed"] * len(group["params"])
    return [p[0] if isinstance(p, tuple) else name for p, name in zip(group["params"], own, strict=True)]


def _find_kind(optimizer: str, group: Group, p: Tensor) -> _Kind:
    words = _list_storage(group)
    if group.get("blocks"):
        words.append(f"{len(group['blocks'])} row blocks")
    if not p.requires_grad:
        words.append("frozen")
    return _Kind(group.get("role", "none"), optimizer, ", ".join(words))


def _list_storage(group: Group) -> list[str]:
    """Return the words for how the matrices of a group are stored and treated, where this is not the default."""
    words = [group["layout"]] if group.get("layout") else []
    if group.get("transposed"):
        words.append("transposed")
    if group.get("reparameterize") is False:
        words.append("not reparameterized")
    return words


def _format_table(sizes: dict[_Kind, int], total: int) -> list[str]:
    rows = [["parameters", "share", "role", "optimizer", "stored as"]]
    rows += [[f"{size:,}", _format_share(size, total), *kind] for kind, size in sizes.items()]
    if not any(kind.optimizer for kind in sizes):
        rows = [[*row[:3], row[4]] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[:2], widths, strict=False)]
        words = [cell.ljust(width) for cell, width in zip(row[2:-1], widths[2:], strict=True)]
        lines += _wrap("  ".join([*numbers, *words, row[-1]]).rstrip(), indent=sum(widths) + 2 * len(widths))
    return lines


def _format_line(line: _Line) -> str:
    name = ".".join(part if isinstance(part, str) else _format_numbers(part) for part in line.name)
    shape = str(line.shape).replace(" ", _NO_BREAK)
    words = [name, f"x{line.number}" if line.number > 1 else "", shape, "frozen" if line.is_frozen else ""]
    return "  ".join(word for word in words if word)


def _fold_layers(group: Group) -> list[_Line]:
    """Return the parameters of a group, those together that differ in the numbers of their names alone."""
    lines = []
    for name, p in zip(_get_names(group), _get_tensors(group), strict=True):
        parts = tuple((int(part),) if part.isdecimal() else part for part in name.split("."))
        lines.append(_Line(parts, tuple(p.shape), not p.requires_grad, 1))
    for i in reversed(range(max((len(line.name) for line in lines), default=0))):
        lines = _fold_part(lines, i)
    return lines


def _fold_part(lines: list[_Line], i: int) -> list[_Line]:
    """Return the lines, those together that differ in the numbers at part i of their names alone."""
    folded: dict[tuple[Any, ...], _Line] = {}
    for line in lines:
        part = line.name[i] if i < len(line.name) else None
        numbers = part if isinstance(part, tuple) else ()
        rest = (line.name[:i], part if not numbers else None, line.name[i + 1 :], line.shape, line.is_frozen)
        if (first := folded.get(rest)) is None:
            folded[rest] = line
            continue
        name = first.name
        if numbers:
            name = (*name[:i], tuple(sorted({*name[i], *numbers})), *name[i + 1 :])
        folded[rest] = first._replace(name=name, number=first.number + line.number)
    return list(folded.values())


def _format_numbers(numbers: tuple[int, ...]) -> str:
    """Return the numbers with runs as ranges: (0, 1, 2, 5) as "{0..2,5}", (0, 1, 2) as "0..2"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    words = [f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return words[0] if len(words) == 1 else "{" + ",".join(words) + "}"


def _format_blocks(blocks: Iterable[int] | None) -> str:
    """Return the words for row blocks: (4, 4, 4) as "row blocks 3 x 4", (8, 2, 2) as "row blocks 8 + 2 + 2"."""
    rows = list(blocks or ())
    if not rows:
        return ""
    return f"row blocks {len(rows)} x {rows[0]}" if len({*rows}) == 1 else f"row blocks {' + '.join(map(str, rows))}"


def _format_share(part: int, total: int) -> str:
    return f"{100 * part / max(total, 1):.1f} %"


def _format_count(count: int) -> str:
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * unit:  # three digits of a slightly smaller number round to the unit
            return f"{count / unit:.3g}{letter}"
    return str(count)


def _wrap(text: str, indent: int) -> list[str]:
    """Return the lines of a text, all but the first with this indent."""
    indent = min(indent, _COLUMNS // 2)
    lines = textwrap.wrap(text, _COLUMNS, subsequent_indent=" " * indent, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]
