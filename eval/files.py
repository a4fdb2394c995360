"""Files that evaluations write: only files of evaluations are replaced, each in one step."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hf_tiered_cache.cli.output import replacing

from .errors import EvalError


def check_folder(folder: Path, first_file: str) -> None:
    """Raise EvalError if a folder has files, but not the one that a run writes first."""
    is_new = not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))
    if not is_new and not (folder / first_file).is_file():
        raise EvalError(f"{folder} holds no {first_file}, but other files; choose a new or an empty folder")


def check_file(path: Path, beginning: str) -> None:
    """Raise EvalError if a file exists, is not empty, and does not begin as a regular expression says."""
    if os.path.lexists(path) and not (path.is_file() and re.match(f"(?:{beginning})|$".encode(), path.read_bytes())):
        raise foreign(path)


def check_picture(path: Path, page: Path) -> None:
    """Raise EvalError if a picture exists that a page in its folder, written by an evaluation, does not show."""
    if os.path.lexists(path) and not (page.is_file() and f"]({path.name})" in page.read_text(encoding="utf-8")):
        raise foreign(path)


def write(path: Path, text: str) -> None:
    """Write or replace a file. A full disk, or the end of the process, leaves the previous one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def foreign(path: Path) -> EvalError:
    """Return the error for a file that this program has not written."""
    return EvalError(f"{path} was not written by this program; move it elsewhere")
