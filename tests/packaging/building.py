"""The project as a package: built from a copy of the tree, and installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import processes

ROOT = Path(__file__).parents[2]
_WITHOUT_THE_PACKAGE = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "hf_tiered_cache"]:
    del sys.modules[name]
"""
_NOT_OURS = (
    ".git",
    ".venv",
    "build",
    "dist",
    "site",
    "kv-store",
    "__pycache__",
    "*.egg-info",
    ".*_cache",
    ".hypothesis",
)


def run(*command, cwd, **environment):
    """Run a program that must succeed and sees nothing of this checkout; return what it printed."""
    process = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=_environment() | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


def run_forked(code, *, cwd):
    """Run code that must succeed and imports the package again, but not PyTorch; return what it printed."""
    command = [sys.executable, "-c", _WITHOUT_THE_PACKAGE + code]
    process = processes.run(command, cwd=cwd, env=_environment(), capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def _environment():
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "COVERAGE"))}
    return inherited | {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Built:
    """Result of `python -m build`, and an environment with only the wheel installed.

    It sees the dependencies of the interpreter that runs the tests, but not its editable install of the project:
    folders that a .pth file names are searched, and their own .pth files are not read.
    """

    folder: Path

    @property
    def sdist(self) -> Path:
        return next((self.folder / "dist").glob("*.tar.gz"))

    @property
    def wheel(self) -> Path:
        return next((self.folder / "dist").glob("*.whl"))

    @property
    def environment(self) -> Path:
        return self.folder / "venv"

    @property
    def bin(self) -> Path:
        return self.environment / "bin"

    @property
    def site(self) -> Path:
        return next(self.environment.glob("lib/python*/site-packages"))

    def make(self) -> None:
        tree = self.folder / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_OURS))
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", self.folder / "dist", tree, cwd=self.folder)
        venv.create(self.environment, with_pip=False, symlinks=True)
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python")
        run(*pip, "install", "--quiet", "--no-deps", "--no-index", self.wheel, cwd=self.folder)
        dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (self.site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
