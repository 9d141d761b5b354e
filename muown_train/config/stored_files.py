"""Check what files of runs hold: they may be damaged, edited or a stranger's. Each file has a table of kinds.

A table maps patterns of keys to kinds of values. A key that stands in no table may hold anything, since other versions
of the program may have written it.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

from muown_train.config.checks import is_number
from muown_train.runtime.atomic_files import parse_json

MAX_HEADER = 100_000_000  # bytes of the header of a safetensors file, as in the library
# bytes of an element, by the name of the dtype in safetensors, of all dtypes that a checkpoint may hold
ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 1),
    **dict.fromkeys(("I16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "F32"), 4),
    **dict.fromkeys(("I64", "F64"), 8),
}

Kind = tuple[str, Callable[[Any], bool]]  # the kind of a value in words, and whether a value is of it


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def allow_null(kind: Kind) -> Kind:
    """Return the kind of values that are of another kind, or null."""
    return f"{kind[0]} or null", lambda value: value is None or kind[1](value)


def list_of(kind: Kind, length: int | None = None) -> Kind:
    """Return the kind of lists whose items are of a kind; of `length` items, if it is given."""
    many = "" if length is None else f"{length} items, each "
    return (
        f"a list of {many}{kind[0]}",
        lambda value: isinstance(value, list) and length in (None, len(value)) and all(kind[1](item) for item in value),
    )


TEXT: Kind = ("text", lambda value: isinstance(value, str))
COUNT: Kind = ("a whole number of at least 0 and less than 2^63", _is_count)
WORD: Kind = ("a whole number of at least 0 and less than 2^32", lambda value: _is_count(value) and value < 2**32)
NUMBER: Kind = ("a number", is_number)
MAPPING: Kind = ("a mapping", lambda value: isinstance(value, dict))

# a checkpoint's index.json, without `step` and `format`, which are compared with what they must be
INDEX: dict[str, Kind] = {"valid_loss": allow_null(NUMBER), "about|files": MAPPING}
ABOUT: dict[str, Kind] = {
    "config|data": MAPPING,
    "init_from|origin": allow_null(MAPPING),
    "wandb_id": allow_null(TEXT),
}
FILE: dict[str, Kind] = {"bytes": COUNT, "sha256": TEXT}
# a checkpoint's rank-*.json: state by flat key
STATE: dict[str, Kind] = {
    r"(?s)model/.*": ("in a safetensors file", lambda value: False),
    r"trainer/(step|tokens|rollbacks)|data/rows|data/streams/\d+/\w+": COUNT,
    r"trainer/seconds": ("a number of at least 0", lambda value: is_number(value) and value >= 0),
    r"data/skipped": list_of(list_of(COUNT, 2)),
    r"data/streams": ("an empty mapping", lambda value: value == {}),
    r"random/\d+/numpy/bit_generator": ("MT19937", lambda value: value == "MT19937"),
    r"random/\d+/numpy/state/key": list_of(WORD, 624),
    r"random/\d+/numpy/state/pos": ("a place among 624 words", lambda value: _is_count(value) and value <= 624),
    r"random/\d+/numpy/has_gauss": ("0 or 1", lambda value: _is_count(value) and value <= 1),
    r"random/\d+/numpy/gauss": NUMBER,
    r"random/\d+/python": ("the state of Python's generator", lambda value: _is_python_state(value)),
}

# an entry of rank-*.json beside the state: [first row, rows of the whole] by key, of tensors that the file has in part
ROWS = "rows"

# keys that belong together: a checkpoint that has one of them has all
TOGETHER = {
    "trainer/": ("step", "tokens", "seconds", "rollbacks"),
    r"random/\d+/": (
        *("torch", "python", "numpy/bit_generator"),
        *("numpy/state/key", "numpy/state/pos", "numpy/has_gauss", "numpy/gauss"),
    ),
}


def _is_python_state(value: Any) -> bool:
    """Return whether a value is [3, [624 words and a place among them], the next normal number or null]."""
    if not (isinstance(value, list) and len(value) == 3 and value[0] == 3 and isinstance(value[1], list)):
        return False
    *words, place = value[1] or [None]
    return list_of(WORD, 624)[1](words) and _is_count(place) and place <= 624 and allow_null(NUMBER)[1](value[2])


def check_entries(tree: Any, kinds: Mapping[str, Kind], where: str = "") -> dict[str, Any]:
    """Return a JSON object whose entries are of the kinds that a table gives.

    Args:
        kinds: kinds by a pattern of whole keys.
        where: what stands before a key in messages, such as `about.`.

    Raises:
        ValueError: it is no object, or an entry is of another kind; the message names it, without the file.
    """
    if not isinstance(tree, dict):
        raise ValueError(f"it holds a {type(tree).__name__}, not an object")
    for key, value in tree.items():
        for pattern, (words, is_kind) in kinds.items():
            if re.fullmatch(pattern, key) and not is_kind(value):
                raise ValueError(f"it has {where}{key}={shorten(value)}, which must be {words}")
    return tree


def shorten(value: Any) -> str:
    """Return a stored value for a message, of which a stranger's may be of any length."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def check_index(index: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint's index.json, after a check of its entries.

    Raises:
        ValueError: see `check_entries`.
    """
    check_entries(index, INDEX)
    about = check_entries(index.get("about", {}), ABOUT, "about.")
    check_entries(about.get("origin") or {}, {"step": COUNT}, "about.origin.")
    for name, file in index.get("files", {}).items():
        check_entries(file, FILE, f"files.{name}.")
    return index


def check_state(state: Any) -> dict[str, Any]:
    """Return the state in a checkpoint's rank-*.json, after a check of what this version writes there.

    Raises:
        ValueError: see `check_entries`; or a key cannot be that of a state.
    """
    return check_entries(state, STATE)


def check_rows(rows: Any) -> dict[str, list[int]]:
    """Return the entry `rows` of a checkpoint's rank-*.json, after a check of its values.

    Raises:
        ValueError: see `check_entries`.
    """
    return check_entries(rows, {"(?s).*": list_of(COUNT, 2)}, f"{ROWS}.")


class Layout(NamedTuple):
    """Where a tensor of a checkpoint lies: wholly in one file, or by rows in several."""

    dtype: str  # its name in safetensors
    shape: list[int]  # of the whole
    parts: list[tuple[int, int, str]]  # first row, the one after the last, and the file that has them, in order


def join_rows(
    tensors: Mapping[str, Mapping[str, tuple[str, list[int]]]], rows: Mapping[str, Mapping[str, list[int]]]
) -> dict[str, Layout]:
    """Return where each tensor of a checkpoint lies, after a check that its parts make the whole of it.

    Args:
        tensors: for each file dtype and shape of the tensors that it holds, as `check_tensors` returns them.
        rows: for each file what `check_rows` returns; a tensor that is not named there is whole.

    Raises:
        ValueError: rows are missing, in two files or beyond the end, or files disagree on dtype or shape of the whole.
    """
    layouts: dict[str, Layout] = {}
    for file, held in tensors.items():
        named = rows.get(file, {})
        if absent := named.keys() - held.keys():
            raise ValueError(f"{file} names rows of {shorten(min(absent))}, and has no such tensor")
        for key, (dtype, shape) in held.items():
            if key in named and not shape:
                raise ValueError(f"{file} names rows of {shorten(key)}, which is a scalar")
            count = shape[0] if shape else 1  # a scalar counts as one row
            first, whole = named.get(key, (0, count))
            described = dtype, [whole, *shape[1:]] if key in named else shape
            layout = layouts.setdefault(key, Layout(*described, []))
            if described != layout[:2]:
                raise ValueError(
                    f"{shorten(key)} has dtype {dtype} and shape {described[1]} in {file}, and dtype {layout.dtype} "
                    f"and shape {layout.shape} in {layout.parts[0][2]}"
                )
            layout.parts.append((first, first + count, file))
    for key, layout in layouts.items():
        layout.parts.sort()
        _check_parts(key, layout)
    return layouts


def _check_parts(key: str, layout: Layout) -> None:
    """Check that each part of a tensor begins where the one before it ends, and the last one ends with the whole."""
    rows, end = layout.shape[0] if layout.shape else 1, 0
    for first, stop, file in [*layout.parts, (rows, rows, "")]:
        if first > end:
            raise ValueError(f"rows {end} to {first - 1} of {shorten(key)} are missing")
        if first < end and not file:
            raise ValueError(f"{shorten(key)} has rows up to {end - 1}, and is said to have {rows}")
        if first < end:
            raise ValueError(f"row {first} of {shorten(key)} is in two files")
        end = stop


def check_keys(state: Mapping[str, Any]) -> None:
    """Check that the flat keys of a checkpoint's state make a tree, and that none is missing among its counters.

    Raises:
        ValueError: a key stands above another that is no empty mapping, as `a` above `a/b`, or a key is missing.
    """
    for key in state:
        parts = key.split("/")
        for length in range(1, len(parts)):
            above = "/".join(parts[:length])
            if above in state and state[above] != {}:
                raise ValueError(f"it has both {above!r} and {key!r}")
        for pattern, names in TOGETHER.items():
            found = re.match(pattern, key)
            if found and (missing := [name for name in names if found[0] + name not in state]):
                raise ValueError(f"it has no {found[0]}{missing[0]}")


def check_tensors(file: BinaryIO, size: int) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape of each tensor in a checkpoint's safetensors file, after a check of its header.

    Args:
        file: the open file, at its beginning.
        size: bytes of the file.

    Raises:
        ValueError: the header is damaged, or does not describe what follows.
    """
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise ValueError(f"it says that its header has {length:,} bytes")
    entries = parse_json(file.read(length))
    if not isinstance(entries, dict):
        raise ValueError("its header is no JSON object")
    entries.pop("__metadata__", None)
    end = 0
    for key, place in sorted(((key, _check_tensor(key, entry)) for key, entry in entries.items()), key=lambda p: p[1]):
        if place[0] != end:
            raise ValueError(f"its tensor {key!r} does not begin where the one before it ends")
        end = place[1]
    if end != size - 8 - length:
        raise ValueError(f"its tensors have {end:,} bytes, and it holds {size - 8 - length:,}")
    return {key: (entry["dtype"], entry["shape"]) for key, entry in entries.items()}


def _check_tensor(key: str, entry: Any) -> list[int]:
    """Return where a tensor begins and ends, as the header of a safetensors file says."""
    if not isinstance(entry, dict):
        raise ValueError(f"its header describes the tensor {key!r} by {shorten(entry)}")
    parts: tuple[Any, Any, Any] = (entry.get("dtype"), entry.get("shape"), entry.get("data_offsets"))
    dtype, shape, place = parts
    if not (isinstance(dtype, str) and dtype in ELEMENT_BYTES):
        raise ValueError(f"its tensor {key!r} has the dtype {shorten(dtype)}: only {', '.join(ELEMENT_BYTES)} are read")
    if not list_of(COUNT)[1](shape) or not list_of(COUNT, 2)[1](place):
        raise ValueError(f"its tensor {key!r} has shape={shorten(shape)} and data_offsets={shorten(place)}")
    size = ELEMENT_BYTES[dtype]
    for length in shape:
        size = min(size * length, 2**63)  # a stranger's product may have any number of digits
    if place[0] + size != place[1]:
        raise ValueError(f"its tensor {key!r} has shape={shorten(shape)} and data_offsets={shorten(place)}")
    positions: list[int] = place
    return positions
