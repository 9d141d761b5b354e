"""What pip installs: each extra brings what is imported, and the wheel works where nothing else is installed."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import muown_train
from muown_train.config.extras import EXTRAS
from tests.helpers.paths import ROOT
from tests.helpers.runs import SMALL

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROVIDED = PROJECT["optional-dependencies"]
# what an editable install or a clone offers beside the package
IN_SDIST = {".ci", "configs", "docs", "examples", "muown_train", "scripts", "slurm", "tests"}
IN_SDIST |= {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml"}


def list_names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def list_libraries(folder: Path) -> set[str]:
    """Return the first names of the modules that code imports, but for Python's own and this project's."""
    names = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(str(node.module))
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"muown_train"}


def test_every_imported_library_is_brought_by_the_extra_that_its_error_names():
    assert list_libraries(ROOT / "muown_train" / "optim") == {"torch"}
    assert list_libraries(ROOT / "muown_train") <= set(EXTRAS)
    distributions = importlib.metadata.packages_distributions()
    brought = {extra: list_names([*PROJECT["dependencies"], *PROVIDED[extra]]) for extra in set(EXTRAS.values())}
    for library, extra in EXTRAS.items():
        if library == "lm_eval" and library not in distributions:  # it is not among the packages of the tests
            continue
        assert {canonicalize_name(name) for name in distributions[library]} & brought[extra], library


def test_every_extra_that_a_text_names_exists():
    folders = [ROOT / name for name in (".ci", ".github", "configs", "docs", "examples", "muown_train", "slurm")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    named = set()
    for file in [*files, *ROOT.glob("*.md"), ROOT / "pyproject.toml"]:
        text = file.read_bytes().decode(errors="ignore")
        for extras in re.findall(r"(?:muown-train|[\"' ]\.)\[([a-z]+(?:,[a-z]+)*)\]", text):
            named |= {(file.relative_to(ROOT).as_posix(), extra) for extra in extras.split(",")}
    assert ("README.md", "train") in named
    assert sorted((file, extra) for file, extra in named if extra not in PROVIDED) == []
    assert [extra for extra in PROVIDED if not extra.isalpha()] == []  # pip of before 23.3 finds no other


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert f"\n## [{muown_train.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {muown_train.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_exact_versions_of_ci_satisfy_the_bounds():
    text = (ROOT / ".ci" / "constraints.txt").read_text()
    assert "://" not in text  # it names no host
    pins = {canonicalize_name(pin.name): pin.specifier for pin in map(Requirement, re.findall(r"^\w.*", text, re.M))}
    for line in [*PROJECT["dependencies"], *(line for extra in PROVIDED.values() for line in extra)]:
        requirement = Requirement(line)
        if requirement.name != "muown-train":
            (pin,) = pins[canonicalize_name(requirement.name)]
            assert pin.operator == "==" and requirement.specifier.contains(pin.version), line


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_what_is_built_holds_what_it_should(built):
    sdist, wheel = built
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], check=True)
    base = f"muown_train-{muown_train.__version__}"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    configs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    assert {f"muown_train/{name}" for name in configs} < names
    assert {"muown_train/py.typed", "muown_train/optim/muown.py", f"{base}.dist-info/licenses/LICENSE"} < names
    assert {name.split("/")[0] for name in names} == {"muown_train", f"{base}.dist-info"}
    with tarfile.open(sdist) as archive:
        top = {name.split("/")[1] for name in archive.getnames()}
    assert top - {"PKG-INFO", ".gitignore", ".github", "mkdocs.yml"} == IN_SDIST


def find_distributions(
    requirements: Iterable[str], extras: Iterable[str] = ()
) -> dict[str, importlib.metadata.Distribution]:
    """Return the installed distributions that requirements bring, with what these require in turn."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen = set()
    waiting = [(text, tuple(extras)) for text in requirements]
    while waiting:
        text, extras = waiting.pop()
        requirement = Requirement(text)
        marker = requirement.marker
        if (text, extras) in seen or (marker and not any(marker.evaluate({"extra": e}) for e in ("", *extras))):
            continue
        seen.add((text, extras))
        found[requirement.name] = distribution = importlib.metadata.distribution(requirement.name)
        waiting += [(inner, tuple(requirement.extras)) for inner in distribution.requires or ()]
    return found


def make_environment(folder: Path, wheel: Path, *extras: str) -> Path:
    """Return the programs of an environment with a wheel, and of the libraries that are installed here those alone
    that its metadata asks for.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    metadata = zipfile.Path(wheel) / f"muown_train-{muown_train.__version__}.dist-info"
    requirements = importlib.metadata.PathDistribution(metadata).requires or ()
    for distribution in find_distributions(requirements, extras).values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(distribution.locate_file(name))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    return folder / "bin"


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=environment, check=check, capture_output=True, text=True)


@pytest.mark.slow
def test_the_optimizer_needs_torch_alone(built, tmp_path):
    programs = make_environment(tmp_path / "env", built[1])
    code = """
import sys, torch, muown_train
from muown_train.optim import Muown
model = torch.nn.Linear(4, 3)
optimizer = Muown([model.weight], lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(muown_train.__version__, "numpy" in sys.modules)
"""
    said = run(programs / "python", "-c", code, cwd=tmp_path)
    assert said.stdout == f"{muown_train.__version__} False\n"

    for command in ([programs / "muown-train"], [programs / "python", "-m", "muown_train"]):
        for words in ([], ["compare", "--help"]):
            done = run(*command, *words, cwd=tmp_path, check=False)
            assert done.returncode == 2 and done.stdout == ""
            assert re.fullmatch(
                r"error: the library \w+ cannot be imported \(No module named '\w+'\): "
                r"`pip install 'muown-train\[train\]'` installs it\n",
                done.stderr,
            )


@pytest.mark.slow
def test_the_framework_runs_anywhere_with_what_its_extra_brings(built, corpus, tmp_path):
    programs = make_environment(tmp_path / "env", built[1], "train")
    where = run(programs / "python", "-c", "import muown_train.config.compose as c; print(c.CONFIG_DIR)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(tmp_path / "env")
    places = (f"data.train={corpus}/*.txt", f"cache={corpus}/cache")
    run(programs / "muown-train", *SMALL, *places, "name=a", "tokens=512", cwd=tmp_path)
    run(programs / "muown-train", "compare", "runs/a", cwd=tmp_path)
    run(programs / "muown-train", "export", "runs/a", cwd=tmp_path)
    shown = run(programs / "muown-train", "--cfg", "job", "model=qwen2_0_5b", cwd=tmp_path).stdout
    assert "Qwen2" in shown
    done = run(programs / "muown-train", *SMALL, *places, "tracking=tensorboard", cwd=tmp_path, check=False)
    assert done.returncode == 2 and "`pip install 'muown-train[tensorboard]'` installs it" in done.stderr
