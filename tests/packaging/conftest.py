"""What is built is built once, for all workers."""

from __future__ import annotations

import shutil

import pytest
from building import Built
from filelock import FileLock


@pytest.fixture(scope="session")
def built(tmp_path_factory, worker_id) -> Built:
    pytest.importorskip("packaging", minversion="24.2")  # setuptools builds with it
    shared_folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared_folder = shared_folder.parent  # of all workers
    artifacts = Built(shared_folder / "built")
    with FileLock(f"{artifacts.folder}.lock"):
        if not (artifacts.folder / "ready").exists():
            shutil.rmtree(artifacts.folder, ignore_errors=True)  # another worker failed midway, and so shall this one
            artifacts.folder.mkdir()
            artifacts.make()
            (artifacts.folder / "ready").touch()
    return artifacts
