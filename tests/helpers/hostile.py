"""Files as damage or a stranger may leave them: variants of JSON, of YAML and of safetensors files."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.checkpoints import rewrite_index

DEEP = "[" * 100_000 + "]" * 100_000
# values that replace an entry, as JSON
VALUES = (
    *("null", "true", "-1", "0", "1.5", "NaN", "1e999", str(10**18), "9" * 400, "9" * 5000, '"x"', '"1"', '""', "[]"),
    *("{}", "[[1]]", '{"a": {"b": 1}}', "[" * 60 + "]" * 60, '{"a":' * 900 + "1" + "}" * 900, DEEP),
    *('"\\u001b[2J\\u001b]0;x\\u0007"', '"\\ud800"', '"${oc.env:HOME}"', '"${"', '"' + "a" * 100_000 + '"'),
)
WHOLES = (
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b'"x"',
    DEEP.encode(),
    b'{"a":' * 5000,
    b"\0" * 100,
    b"\xff\xfe{}",
    b"9" * 5000,
)


def list_paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry, of lists the first three."""
    entries = tree.items() if isinstance(tree, dict) else list(enumerate(tree))[:3] if isinstance(tree, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from list_paths(value, (*path, key))


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a tree with another value at a path; without the entry if the value is `put` itself."""
    tree = json.loads(json.dumps(tree))
    node = tree
    for key in path[:-1]:
        node = node[key]
    if value is put:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return tree


def vary_tree(tree: Any, draw: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield JSON texts, each with a description, in which one entry is replaced, removed or renamed."""
    paths = list(list_paths(tree))
    for _ in range(count):
        path = draw.choice(paths)
        value = draw.choice((*VALUES, None, None))
        if value is None:
            yield f"without {path}", json.dumps(put(tree, path, put)).encode()
        else:
            text = json.dumps(put(tree, path, "PLACE")).replace('"PLACE"', value)
            yield f"{path}={value[:40]}", text.encode()


def vary_bytes(content: bytes, draw: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield contents that are cut off, or have a flipped bit, a zeroed or a repeated part."""
    for _ in range(count):
        at, bit = draw.randrange(len(content)), draw.randrange(8)
        way = draw.choice(("cut", "flip", "zeros", "twice"))
        if way == "cut":
            yield f"cut at {at}", content[:at]
        elif way == "flip":
            yield f"bit {bit} of byte {at}", content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
        elif way == "zeros":
            yield f"zeros at {at}", content[:at] + bytes(50) + content[at + 50 :]
        else:
            yield f"twice up to {at}", content[:at] + content


def vary_json(content: bytes, draw: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield variants of a JSON file."""
    yield from ((f"whole file {whole[:20]!r}", whole) for whole in WHOLES)
    yield from vary_tree(json.loads(content), draw, count)
    yield from vary_bytes(content, draw, count // 4)


def vary_lines(content: bytes, draw: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield variants of a file of JSON lines."""
    lines = content.splitlines(keepends=True)
    for _ in range(count):
        at = draw.randrange(len(lines))
        for label, line in vary_tree(json.loads(lines[at]), draw, 1):
            yield f"line {at}: {label}", b"".join([*lines[:at], line + b"\n", *lines[at + 1 :]])
    yield from ((f"a line {whole[:20]!r}", content + whole + b"\n") for whole in WHOLES)
    yield from vary_bytes(content, draw, count // 4)


def vary_yaml(content: bytes, draw: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield variants of a YAML file."""
    aliases = "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(30))
    for whole in (
        *WHOLES,
        b"&a [*a]",
        b"x: &a {y: *a}",
        aliases.encode(),
        b"!!timestamp x",
        b"a: 2024-01-01",
        b"a: !!set {b}",
    ):
        yield f"whole file {whole[:20]!r}", whole
        yield f"with {whole[:20]!r}", content + b"\n" + whole
    yield from vary_tree(yaml.safe_load(content), draw, count)  # JSON is YAML
    yield from vary_bytes(content, draw, count // 4)


def vary_tensors(content: bytes, draw: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield variants of a safetensors file, most of them of its header."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    for number in (0, 1, length - 1, length + 8, len(content), 2**40, 2**63, 2**64 - 1):
        yield f"a header of {number} bytes", number.to_bytes(8, "little") + content[8:]
    variants = [*vary_tree(header, draw, count), *((f"header {whole[:20]!r}", whole) for whole in WHOLES)]
    first = next(iter(header))
    for dtype in ("C64", "F8_E4M3", "F64", "I8", "X"):
        variants.append((dtype, json.dumps(put(header, (first, "dtype"), dtype)).encode()))
    for name in ("", "model/", "model/x", "optimizer/x", "a/b/c", "model/\u001b[2J", "random/0/torch", "x" * 1000):
        renamed = {name if key == first else key: value for key, value in header.items()}
        variants.append((f"{first} is called {name[:20]!r}", json.dumps(renamed).encode()))
    for label, text in variants:
        yield label, len(text).to_bytes(8, "little") + text + data
    yield from vary_bytes(content, draw, count // 4)


def write_in_checkpoint(file: Path, content: bytes) -> None:
    """Write a file of a checkpoint, and into the index the size and the digest that belong to it."""
    file.write_bytes(content)
    described = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite_index(file.parent / "index.json", lambda index: index["files"].update({file.name: described}))


def write_index(file: Path, content: bytes) -> None:
    """Write an index.json with the digest that belongs to it."""
    body = content[1:]
    file.write_bytes(b'{"sha256": "%s",' % hashlib.sha256(body).hexdigest().encode() + body)
