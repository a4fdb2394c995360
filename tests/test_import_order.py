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
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = (ROOT, *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return the imports of a module, including those in functions and those for type checkers."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            base = f"{base}.{node.module}" if node.module else base
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in known else base)
    return found - {name}


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(name, path, known) for name, path in known.items() if name != ROOT}


def test_imports_point_down():
    known = graph()
    assert len(known) > 90
    try:
        TopologicalSorter(known).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_packages_have_an_order():
    """This lets a feature package be read, and removed, without the others."""
    wrong = []
    for name, imported in graph().items():
        own = name.split(".")[1]
        for other in imported - {ROOT}:
            theirs = other.split(".")[1]
            if own != theirs and LEVEL[theirs] >= LEVEL[own]:
                wrong.append(f"{name} imports {other}")
    assert not wrong


def test_the_root_holds_few_files():
    assert {path.stem for path in PACKAGE.glob("*.py")} <= {*LEVEL, "__init__"}
    assert len(list(PACKAGE.glob("*.py"))) <= 8
