"""Every notebook runs on the reference model, and what is committed of it is fit to be shown."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import processes
import pytest
from extras import need_eval
from transformers.utils.import_utils import is_serve_available

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbclient and ipykernel")
pytest.importorskip("nbclient", reason="notebooks need nbclient and ipykernel")
pytest.importorskip("ipykernel", reason="notebooks need nbclient and ipykernel")
import notebook_cells  # noqa: E402

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
NOTEBOOKS = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
LONGER = ("few_shot", "long_context", "quick_start", "serving")
"""Notebooks that have no plot, or no stored prefix, with shorter prompts."""
SLOWER = ("conversations", "serving")
"""Notebooks that start processes which import everything again."""
REFERENCE = ROOT / "eval" / "reference" / "xs"
REPOSITORY = "hf-tiered-cache/hf-tiered-cache"


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def printed(notebook):
    return "".join(output.text for output in outputs(notebook) if output.output_type == "stream")


def in_a_kernel(path, tmp_path):
    """Run a notebook as `make notebooks` does; returns it with its outputs."""
    spec = importlib.util.spec_from_file_location("make", FOLDER / "make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    return make.execute(path, model=str(REFERENCE))


def in_a_forked_process(path, tmp_path):
    """Run the cells of a notebook without importing PyTorch and transformers again; returns it with its outputs."""
    folder, executed_path = tmp_path / "run", tmp_path / "done.ipynb"
    folder.mkdir()
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NOTEBOOK_MODEL": str(REFERENCE)}
    environment["TMPDIR"] = str(tmp_path / "temporary")
    command = [sys.executable, notebook_cells.__file__, path, executed_path]
    processes.run(command, env=environment, cwd=folder, stdout=processes.DEVNULL, check=True)
    assert not [path.name for path in folder.iterdir() if not path.name.startswith("hf-tiered-notebook-")]
    return nbformat.read(executed_path, as_version=4)


@pytest.fixture
def little_work(monkeypatch):
    """Let notebooks do little work, without a network."""
    monkeypatch.setenv("NOTEBOOK_QUESTIONS", "2")
    monkeypatch.setenv("NOTEBOOK_MIB", "16")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def sentences(tmp_path, monkeypatch):
    """Make a folder with the data sets of `few_shot.ipynb`."""
    columns = {"sst2": ("sentence", "label", 2, "validation"), "trec": ("text", "coarse_label", 6, "test")}
    for name, (text, label, labels, split) in columns.items():
        (tmp_path / name).mkdir()
        rows = [{text: f"The {text} of number {number} is long.", label: number % labels} for number in range(40)]
        for part in ("train", split):
            (tmp_path / name / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("NOTEBOOK_DATA", str(tmp_path))


@pytest.mark.parametrize(
    ("path", "executed"),
    [
        *((path, in_a_forked_process) for path in PATHS if path.stem not in SLOWER),
        *(pytest.param(path, in_a_kernel, marks=pytest.mark.thorough) for path in PATHS),
    ],
    ids=lambda value: getattr(value, "stem", None),
)
def test_it_runs_on_the_reference_model(path, executed, tmp_path, monkeypatch, little_work, sentences):
    if path.stem == "serving" and not is_serve_available():
        pytest.skip("the server needs the extra `serve`")
    if path.stem == "few_shot":
        need_eval()
    monkeypatch.setenv("NOTEBOOK_TOKENS", "512" if path.stem in LONGER else "256")
    notebook = executed(path, tmp_path)
    tokens_restored = [int(number) for number in re.findall(r"(\d+)(?: of \d+)? tokens restored", printed(notebook))]
    assert max(tokens_restored) > 64
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    if path.stem == "few_shot":
        tables = [output.data["text/html"] for output in outputs(notebook) if "text/html" in output.get("data", {})]
        assert tables
        for name in ("labels", "sst2", "trec"):
            assert f"{name}: 2 sentences after prompts of" in printed(notebook)
            assert all(f">{name}</th>" in table for table in tables)


@NOTEBOOKS
def test_what_is_committed_was_run_and_names_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {output.output_type for output in outputs(notebook)}
    assert kinds <= {"stream", "execute_result", "display_data"}
    assert all(output.name == "stdout" for output in outputs(notebook) if output.output_type == "stream")
    assert not re.search(r"/(home|root|tmp|usr|work|Users)/", path.read_text())
    images = [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert all(len(image) * 3 // 4 < 60_000 for image in images)


@NOTEBOOKS
def test_it_changes_no_file_of_the_working_directory(path):
    code = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert '\nos.chdir(tempfile.mkdtemp(prefix="hf-tiered-notebook-"' in code[1]  # the first cell installs
    assert "".join(code).count("chdir") == 1
    assert "rmtree" not in "".join(code)


@NOTEBOOKS
def test_its_badge_opens_this_notebook_in_colab(path):
    first = nbformat.read(path, as_version=4).cells[0].source
    address = f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/examples/notebooks/{path.name}"
    assert f"]({address})" in first
