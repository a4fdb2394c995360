"""What is built from the tree holds all of it, installs into an empty environment, and works there."""

from __future__ import annotations

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from building import ROOT, run, run_forked

from hf_tiered_cache import KVStore

IMPORT_EVERYTHING = """
import importlib.util, pathlib, pkgutil
import hf_tiered_cache
root = pathlib.Path(hf_tiered_cache.__file__)
assert root.parent.parent == pathlib.Path(sys.path[0]), root
for module in pkgutil.walk_packages(hf_tiered_cache.__path__, "hf_tiered_cache."):
    file = importlib.util.find_spec(module.name).origin
    assert pathlib.Path(file).is_relative_to(root.parent), file
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as missing:  # the file of an engine imports its package, which is optional
        if not module.name.startswith("hf_tiered_cache.store.backends.") or missing.name.startswith("hf_tiered_cache"):
            raise
    print(module.name)
"""

QUICK_START = """
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from hf_tiered_cache import KVStore, TieredCache

torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
)
model = Qwen2ForCausalLM(config).eval()
ids = torch.randint(1, 300, (1, 100))
answers = []
with KVStore("store") as store:
    for _ in range(2):
        cache = TieredCache(model, store)
        answers.append(model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False))
assert torch.equal(*answers)
assert torch.equal(answers[0], model.generate(ids, max_new_tokens=8, do_sample=False))
print("restored", cache.stats.tokens_restored)
"""


def modules_of_the_tree() -> set[str]:
    walked = os.walk(ROOT / "hf_tiered_cache", followlinks=True)  # patches/ is a link
    files = {Path(folder, name) for folder, _, names in walked for name in names if not name.endswith(".pyc")}
    return {file.relative_to(ROOT).as_posix() for file in files}


def names_in(sdist: Path) -> set[str]:
    """Return the names of the files of a source distribution, below its only folder."""
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_the_wheel_holds_the_modules_of_the_tree_and_nothing_else(built):
    with zipfile.ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == modules_of_the_tree()
    assert {"hf_tiered_cache/py.typed", "hf_tiered_cache/patches/attach.py"} <= names


def test_the_source_distribution_holds_every_file_of_the_repository(built):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("this is no git checkout")
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    names = names_in(built.sdist)
    outside = {name for name in tracked if name.startswith((".github/", ".gitignore", ".pre-commit"))}
    assert tracked - names == outside
    assert modules_of_the_tree() <= names


@pytest.fixture(scope="module")
def printed(built, tmp_path_factory):
    """Return the lines that the installed package prints, in one process: importing takes seconds."""
    code = f"sys.path.insert(0, {str(built.site)!r})" + IMPORT_EVERYTHING + QUICK_START
    return run_forked(code, cwd=tmp_path_factory.mktemp("elsewhere")).splitlines()


def test_every_module_can_be_imported_from_the_wheel(printed):
    imported = set(printed)
    modules = {name.removesuffix(".py").removesuffix("/__init__") for name in modules_of_the_tree() if ".py" in name}
    expected = {name.replace("/", ".") for name in modules if not name.endswith("py.typed")} - {"hf_tiered_cache"}
    assert expected <= imported
    assert "hf_tiered_cache.patches.attach" in imported


def test_the_installed_package_generates_and_restores(printed):
    assert int(printed[-1].removeprefix("restored ")) > 80


def test_the_installed_command_shows_its_help_and_a_store(built, tmp_path):
    KVStore(tmp_path / "store", host_memory=0).close()
    command = built.bin / "hf-tiered-cache"
    assert command.read_text().startswith(f"#!{built.bin}")
    assert "verify" in run(command, "--help", cwd=tmp_path)
    assert "segment" in run(command, "ls", "store", cwd=tmp_path)


def test_tests_run_from_the_unpacked_source_distribution(built, tmp_path):
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    for file in (ROOT / "eval" / "reference" / "xs").iterdir():  # the model that tests and the demo fall back to
        assert (root / file.relative_to(ROOT)).stat().st_size == file.stat().st_size
    code = f"""
import pytest, hf_tiered_cache
assert hf_tiered_cache.__file__.startswith({str(root)!r}), hf_tiered_cache.__file__
tests = "tests/test_units.py", "tests/store/test_geometry.py::test_json_round_trip", "tests/packaging/test_documents.py"
sys.exit(pytest.main(["-q", *tests, "-p", "no:cacheprovider"]))
"""
    assert " passed" in run_forked(code, cwd=root)
