"""Run every notebook of this folder, and write its outputs into it.

    python examples/notebooks/make.py                      # all, or those named
    python examples/notebooks/make.py --check              # only see that they run; nothing is written
    python examples/notebooks/make.py --model eval/reference/xs

Each runs in a temporary folder, with the code of this repository. Which model it takes it says itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
_IGNORED = "ignore:IProgress not found,ignore:`past_key_values` is deprecated"
"""Warnings of tqdm, and of transformers 5.24 about a name that all supported versions know; they would name folders."""


def execute(path: Path, model: str | None = None, timeout: float = 600) -> NotebookNode:
    """Run a notebook; returns it with its outputs.

    Args:
        path: The notebook.
        model: A folder, or a name on the hub, in place of the notebook's own.
        timeout: Seconds that one cell may take.
    """
    notebook = nbformat.read(path, as_version=4)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONWARNINGS": _IGNORED}
    if model is not None:
        environment["NOTEBOOK_MODEL"] = str(Path(model).resolve()) if Path(model).exists() else model
    with tempfile.TemporaryDirectory() as folder:
        environment["TMPDIR"] = folder
        client = NotebookClient(
            notebook, timeout=timeout, record_timing=False, resources={"metadata": {"path": folder}}
        )
        client.execute(env=environment)
    return notebook


def main() -> int:
    """Run the notebooks, and write them unless only checked; return whether one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: every notebook of this folder")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--model", help="a folder, or a name on the hub, in place of the notebooks' own")
    arguments = parser.parse_args()
    failed = False
    for path in arguments.notebooks or sorted(HERE.glob("*.ipynb")):
        try:
            notebook = execute(path, arguments.model)
        except CellExecutionError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            failed = True
            continue
        if not arguments.check:
            nbformat.write(notebook, path)
        print(f"{path.name}: {'runs' if arguments.check else 'written'}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
