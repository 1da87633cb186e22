"""The folder tree is the way of the data: a file imports only from its own folder and from folders above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradveil

LEVELS = (
    "core", "domains", "assets", "data", "models", "generators", "engine", "defenses", "bounds", "threat", "client",
    "attacks", "federated", "metrics", "auditing", "report", "lab", "cli",
)  # fmt: skip
SOURCE = Path(gradveil.__file__).parent
ONLY_FOR_PEOPLE = {"typer", "rich"}
NOT_ON_ACCELERATORS = {
    "typer", "rich", "jinja2", "flwr", "ray", "cma", "botorch", "dp_accounting", "cryptography",
}  # fmt: skip
"""Not there, or slow to load: what needs one imports it when it is needed."""
COMMANDS = "lab/commands"
"""The lab's part of the command line: it may import what ``cli`` may."""
ADAPTERS = {"federated/flower": {"flwr"}}
"""Folders that are nothing without what they adapt to, and that nothing else imports."""


def imported(source: str, *, at_once: bool = False) -> set[str]:
    """Every module that a source names in an import, at any depth of the code, or only what loading it imports."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(ast.parse(source)) if at_once else ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the level"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def forbidden(folder: str, source: str) -> set[str]:
    """Imports of this source that its folder may not have."""
    top = "cli" if folder == COMMANDS else folder.partition("/")[0]
    level = LEVELS.index(top)
    banned = {"torch"} if top == "report" else set()
    banned |= ONLY_FOR_PEOPLE if top != "cli" else set()
    missing = NOT_ON_ACCELERATORS if level < LEVELS.index("auditing") else set()
    missing = missing - ADAPTERS.get(folder, set())
    below = {f"gradveil.{name}" for name in LEVELS[level + 1 :]}
    named = imported(source)
    return {name for name in named if name.partition(".")[0] in banned or ".".join(name.split(".")[:2]) in below} | {
        name for name in imported(source, at_once=True) if name.partition(".")[0] in missing
    }


FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_a_file_imports_only_from_above(path: Path) -> None:
    assert forbidden(path.relative_to(SOURCE).parent.as_posix(), path.read_text()) == set()


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path.relative_to(SOURCE).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_folder_has_a_level() -> None:
    assert {path.relative_to(SOURCE).parts[0] for path in FILES} <= set(LEVELS)


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("attacks", "from gradveil.auditing.sources import Private"),
        ("attacks", "from gradveil.metrics import score"),
        ("core", "import gradveil.threat.model"),
        ("client", "from gradveil import attacks"),
        ("models", "def late():\n    import gradveil.cli.main"),
        ("attacks", "import cma"),
        ("federated", "import flwr"),
        ("metrics", "from rich.console import Console"),
        ("report", "import torch"),
        ("auditing", "from gradveil.lab.sweeps import run_study"),
        ("lab/sweeps", "from gradveil.cli.progress import clock"),
        ("lab/bench", "import typer"),
    ],
)
def test_a_forbidden_import_is_caught(folder: str, line: str) -> None:
    assert forbidden(folder, line)


@pytest.mark.parametrize("module", ["auditing.audit", "auditing.verdict", "auditing.store", "metrics.table", "report"])
def test_what_reports_need_loads_no_torch(module: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; import gradveil.{module}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_nothing_imports_an_adapter() -> None:
    """Everything else works without what they adapt to."""
    for path in FILES:
        for folder in ADAPTERS:
            module = f"gradveil.{folder.replace('/', '.')}"
            inside = path.is_relative_to(SOURCE / folder)
            assert inside or not any(name.startswith(module) for name in imported(path.read_text())), path


def test_an_attack_cannot_name_the_truth() -> None:
    """No module that attacks import, at any distance, defines or names what holds the private data of an audit."""
    allowed = LEVELS[: LEVELS.index("attacks") + 1]
    for path in FILES:
        if path.relative_to(SOURCE).parts[0] in allowed:
            names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
            assert not names & {"Private", "truth", "ground_truth", "Judge"}, path
