"""Script for a forked process: runs the cells of a notebook in this process, and writes the notebook with its outputs.

    python notebook_cells.py NOTEBOOK OUT

A kernel would be another process, which imports everything again. So would Python processes that cells run: they are
forked, too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import processes
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbformat.v4 import new_output


class Shell(InteractiveShell):
    """Shell of a program without windows."""

    def enable_gui(self, gui: str | None = None) -> None:
        """Accept the event loop of inline figures, which is none."""


def run(command: list[str], *, _run: Any = subprocess.run, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a process as `subprocess.run` does. Fork it if it is a Python process."""
    return (processes.run if command[0] == sys.executable else _run)(command, **options)


def main(path: Path, out: Path) -> None:
    """Run all cells, up to the first that fails."""
    subprocess.run = run
    notebook = nbformat.read(path, as_version=4)
    shell = Shell.instance()
    shell.run_line_magic("matplotlib", "inline")
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        with shell.display_trap, capture_output() as captured:  # entered first, it leaves values to the latter
            result = shell.run_cell(cell.source, store_history=True)
        result.raise_error()
        cell.outputs = [new_output("stream", name="stdout", text=captured.stdout)]
        cell.outputs += [new_output("display_data", data=rich.data) for rich in captured.outputs]
    nbformat.write(notebook, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
