"""Evaluations replace only files that evaluations have written, each in one step."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import typer
from matplotlib.figure import Figure
from typer.testing import CliRunner

from eval import choosing, leaderboard, report
from eval.errors import EvalError
from eval.files import check_file, check_folder, write
from eval.reference.train import prepare
from eval.run import _begin as begin
from eval.runner import FULL, Run, Variant
from eval.tasks import TASKS

REFERENCE = Path(__file__).parents[2] / "eval" / "reference" / "xs"


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(main, *arguments):
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def row(task):
    figure = {"mean": 50, "low": 40, "high": 60}
    metrics = {"task": task, "variant": FULL, "budget": None, "metric": "accuracy", "examples": 2}
    return metrics | {"score": figure, "top1": figure, "kl": figure}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Return the folder of a run with two tasks. Pictures are empty."""
    for name in ("draw_task", "draw_overview"):
        monkeypatch.setattr(report, name, lambda *_: Figure(figsize=(1, 1)))
    config = {"model": "m", "dtype": "float32", "seed": 1, "prefix_tokens": 64, "max_length": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for task in ("sst2", "trec"):
        (tmp_path / task / FULL).mkdir(parents=True)
        (tmp_path / task / FULL / "metrics.json").write_text(json.dumps(row(task)))
    return tmp_path


def test_a_report_replaces_only_files_of_a_report(results):
    names = ("README.md", "metrics.json", "overview.png", "sst2.png", "trec.png")
    for name in names:
        (results / name).write_text("my notes")
        before = contents(results)
        failed_result = run(report.main, results)
        assert failed_result.exit_code == 2 and f"{name} was not written by this program" in failed_result.output
        assert contents(results) == before
        (results / name).unlink()
    for _ in range(2):
        result = run(report.main, results)
        assert result.exit_code == 0, result.output
    assert sorted(path.name for path in results.iterdir() if path.is_file()) == sorted((*names, "config.json"))


def test_a_run_begins_in_a_new_or_an_empty_folder_or_goes_on(tmp_path):
    out, config = tmp_path / "out", {"model": "m", "seed": 1}
    for name in ("notes.txt", "versions.json", "sst2"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("my notes")
        with pytest.raises(EvalError, match="choose a new or an empty folder"):
            begin(folder, config)
        assert contents(folder) == {Path(name): b"my notes"}
    for _ in range(2):
        begin(out, config)
    assert json.loads((out / "config.json").read_text()) == config
    for name, text in (("versions.json", "my notes"), *(("config.json", text) for text in ("", "{", "[1]", "7"))):
        previous = (out / name).read_text()
        (out / name).write_text(text)
        before = contents(out)
        with pytest.raises(EvalError, match=f"{name} (was not written by this program|is damaged)"):
            begin(out, config)
        assert contents(out) == before
        (out / name).write_text(previous)


def test_predictions_are_cut_only_within_their_last_line(tmp_path):
    task, variant = TASKS["sst2"], Variant(FULL)
    evaluation = Run(None, None, [variant], tmp_path, tmp_path / "stores", 128)
    for number in range(2):
        evaluation._append(task, variant, {"id": f"{number}", "prediction": "a\u2028b"})
    path = tmp_path / "sst2" / FULL / "predictions.jsonl"
    content = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        line_ends = [end for end in ends if end <= length]
        assert len(evaluation._read_predictions(task, variant)) == len(line_ends)
        assert path.read_bytes() == content[: max(line_ends, default=0)]
    for text in ("my notes", "my\nnotes", '{"id": "0"}\nmy notes', '{"name": "0"}\n'):
        path.write_text(text)
        with pytest.raises(EvalError, match="was not written by this program"):
            evaluation._read_predictions(task, variant)
        assert path.read_text() == text


def test_a_leaderboard_replaces_only_a_leaderboard(results, tmp_path):
    page = tmp_path / "page.md"
    for text, status in (("# Leaderboard\n\nof chess\n", 2), ("", 0), (None, 0)):
        page.write_text(text) if text is not None else None
        before = page.read_text()
        result = run(leaderboard.main, results, "--out", page)
        assert result.exit_code == status, result.output
        assert (page.read_text() == before) == (status == 2 or text is None)
    assert inspect.signature(leaderboard.main).parameters["out"].default.is_absolute()


def test_a_picture_that_the_page_does_not_show_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "table", lambda page: "| a |\n")
    monkeypatch.setattr(choosing, "draw", lambda: Figure(figsize=(1, 1)))
    page, picture = tmp_path / "page.md", tmp_path / "page.png"
    page.write_text("\n\n".join(choosing._MARKS))
    picture.write_text("my picture")
    before = contents(tmp_path)
    result = run(choosing.main, "--page", page)
    assert result.exit_code == 2 and "page.png was not written by this program" in result.output
    assert contents(tmp_path) == before
    page.write_text(f"{page.read_text()}\n![methods](page.png)\n")
    assert run(choosing.main, "--page", page).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_training_begins_in_a_new_or_an_empty_folder_or_goes_on(tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("word " * 2000)
    for name in ("text.npy", "curve.json", "notes.txt"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("my notes")
        with pytest.raises(EvalError, match=r"choose a new or an empty folder|was not written by this program"):
            prepare(text, folder, 1, REFERENCE)
        assert contents(folder) == {Path(name): b"my notes"}
    (_, ids), (_, second_ids) = (prepare(text, out, 1, REFERENCE) for _ in range(2))
    assert len(ids) and ids.tolist() == second_ids.tolist()


def test_a_file_is_replaced_in_one_step(tmp_path):
    path, other_link = tmp_path / "page.md", tmp_path / "backup.md"
    write(path, "before")
    other_link.hardlink_to(path)
    with pytest.raises(UnicodeEncodeError):
        write(path, "half \ud800")
    assert contents(tmp_path) == {Path("page.md"): b"before", Path("backup.md"): b"before"}
    write(path, "after")
    assert (path.read_text(), other_link.read_text()) == ("after", "before")


def test_only_files_and_folders_are_accepted(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    check_file(tmp_path / "file", "own")  # empty
    check_folder(tmp_path / "folder", "first")
    for name in ("folder", "link"):
        with pytest.raises(EvalError, match="was not written by this program"):
            check_file(tmp_path / name, "own")
    for name in ("file", "link"):
        with pytest.raises(EvalError, match="choose a new or an empty folder"):
            check_folder(tmp_path / name, "first")
