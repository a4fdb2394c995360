"""What is built is built once, for all workers."""

from __future__ import annotations

import shutil

import pytest
from building import Built
from filelock import FileLock


@pytest.fixture(scope="session")
def built(tmp_path_factory, worker_id) -> Built:
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared = shared.parent  # of all workers
    made = Built(shared / "built")
    with FileLock(f"{made.folder}.lock"):
        if not (made.folder / "ready").exists():
            shutil.rmtree(made.folder, ignore_errors=True)  # another worker failed midway, and so shall this one
            made.folder.mkdir()
            made.make()
            (made.folder / "ready").touch()
    return made
