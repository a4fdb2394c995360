"""Imports point down: no file imports one that imports it, and packages have an order."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = "hf_tiered_cache"
PACKAGE = Path(__file__).parent.parent / ROOT
FEATURES = ("selection", "passages", "conversations")
ORDER = (
    ("errors",),
    ("units", "plugins", "patches"),
    ("stats",),
    ("store",),
    ("identity", "tiers"),
    ("restore",),
    ("remote",),
    FEATURES,
    ("layers", "reasons"),
    ("methods",),
    ("cache",),
    ("operations", "batching"),
    ("kvstore",),
    ("tiered_cache",),
    ("integrations",),
    ("cli",),
)
"""Packages and modules of the root, lowest first. Those of one line do not import each other."""
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def modules() -> dict[str, Path]:
    paths = {}
    for path in PACKAGE.rglob("*.py"):
        parts = (ROOT, *path.relative_to(PACKAGE).with_suffix("").parts)
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports(name: str, path: Path, paths: dict[str, Path]) -> set[str]:
    """Return the imports of a module, including those in functions and those for type checkers."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            base = f"{base}.{node.module}" if node.module else base
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                names.add(submodule if submodule in paths else base)
    return names - {name}


def graph() -> dict[str, set[str]]:
    paths = modules()
    return {name: imports(name, path, paths) for name, path in paths.items() if name != ROOT}


def test_imports_point_down():
    imports_of = graph()
    assert len(imports_of) > 90
    try:
        TopologicalSorter(imports_of).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_packages_have_an_order():
    """This lets a feature package be read, and removed, without the others."""
    wrong = []
    for name, imported in graph().items():
        own = name.split(".")[1]
        for imported_name in imported - {ROOT}:
            package = imported_name.split(".")[1]
            if own != package and LEVEL[package] >= LEVEL[own]:
                wrong.append(f"{name} imports {imported_name}")
    assert not wrong


def test_the_root_holds_few_files():
    assert {path.stem for path in PACKAGE.glob("*.py")} <= {*LEVEL, "__init__"}
    assert len(list(PACKAGE.glob("*.py"))) <= 8
