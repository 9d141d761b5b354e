"""The package is ten rooms whose imports run downwards (CONTRIBUTING and the architecture page draw them)."""

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import muown_train
from tests.helpers.paths import ROOT

# a room imports from those below it; data and models do not import each other
ROOMS = [
    ["cli"],
    ["experiments"],
    ["training"],
    ["analysis"],
    ["runs"],
    ["data", "models"],
    ["config"],
    ["runtime"],
    ["optim"],
]
PACKAGE = ROOT / "muown_train"
MOST_FILES = 12


def name_module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_module(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def list_imports(module: str) -> set[str]:
    """Return the modules of the package that a module imports, anywhere in its code."""
    file = MODULES[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                imported.add(full if full in MODULES else base)
    return {name for name in imported if name in MODULES and name != module}


def get_room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_imports_between_rooms_run_downwards(capsys):
    level = {room: i for i, rooms in enumerate(ROOMS) for room in rooms}
    arrows: Counter[tuple[str, str]] = Counter()
    for module in MODULES:
        for imported in list_imports(module):
            arrows[get_room(module), get_room(imported)] += 1
    arrows = Counter({(a, b): n for (a, b), n in arrows.items() if a != b and a != "__main__" and b})
    with capsys.disabled():
        print(f"\n{len(arrows)} arrows between rooms:")
        for (a, b), count in sorted(arrows.items(), key=lambda item: (level[item[0][0]], level[item[0][1]])):
            print(f"  {a:<11} -> {b:<11} {count:>3}")
    assert [arrow for arrow in arrows if level[arrow[0]] >= level[arrow[1]]] == []


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: list_imports(module) for module in MODULES if MODULES[module].name != "__init__.py"}
    for module, imported in graph.items():  # a package stands for nothing but its modules
        graph[module] = {name for name in imported if name in graph}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_nothing_lies_beside_the_rooms():
    rooms = {room for rooms in ROOMS for room in rooms}
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} == rooms
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
    _, *rest = ast.parse((PACKAGE / "__init__.py").read_text()).body
    assert ast.unparse(rest) == f"__version__ = {muown_train.__version__!r}"  # it imports nothing


@pytest.mark.parametrize("top", ["muown_train", "tests", "scripts"])
def test_no_folder_has_more_than_twelve_modules(top):
    folders = Counter(file.parent for file in (ROOT / top).rglob("*.py"))
    most = MOST_FILES if top == "muown_train" else 2 * MOST_FILES
    assert {folder.relative_to(ROOT).as_posix(): n for folder, n in folders.items() if n > most} == {}


@pytest.mark.parametrize("top", ["muown_train", "scripts"])
def test_no_file_is_longer_than_a_reader_can_hold(top):
    lengths = {file: len(file.read_text().splitlines()) for file in (ROOT / top).rglob("*.py")}
    assert {file.relative_to(ROOT).as_posix(): n for file, n in lengths.items() if n > 410} == {}
