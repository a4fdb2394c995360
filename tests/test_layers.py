"""Imports point down: no module of the library imports, by whatever way, one that imports it."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_tiered_cache"


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("hf_tiered_cache", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """What a module imports, also in its functions; what only type checkers see does not count."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()

    def visit(nodes):
        for node in nodes:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{base}.{node.module}" if node.module else base
                for alias in node.names:
                    whole = f"{base}.{alias.name}"
                    found.add(whole if whole in known else base)
            visit(ast.iter_child_nodes(node))

    visit(ast.parse(path.read_text()).body)
    return found - {name}


def test_imports_point_down():
    known = modules()
    assert len(known) > 90
    graph = {name: imports(name, path, known) for name, path in known.items() if name != "hf_tiered_cache"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))
