"""`python -m bench`: suites, one page of results, and what became slower."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import processes
import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))


@pytest.fixture
def entry(monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_entry", BENCH / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "subprocess", processes)
    return module


def write(folder: Path, **times: list[float]) -> Path:
    folder.mkdir()
    document = {"results": [{"prefix": 1024, "ttft_s": times, "losses": [0.1, 0.2, 0.3]}]}
    (folder / "made.json").write_text(json.dumps(document))
    return folder


def test_every_script_of_a_suite_exists_and_reads_its_options(entry):
    for suite, lines in entry.read_suites().items():
        assert lines, suite
        for script, *options in map(str.split, lines):
            text = (BENCH / script).read_text() + (BENCH / "lib/common.py").read_text()
            text += (BENCH / "lib/serving.py").read_text()
            assert all(f'"{option}"' in text for option in options if option.startswith("--")), (suite, script)


def test_a_suite_runs_and_becomes_one_page(entry, tmp_path, monkeypatch, capsys):
    lines = ["fingerprint.py --shape tiny --repeats 1 --tokens 8", "fingerprint.py --shape nothing"]
    monkeypatch.setattr(entry, "read_suites", lambda: {"made": lines})
    assert entry.main(["run", "--suite", "made", "--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert "[1/2] bench/fingerprint.py --shape tiny" in captured.out
    assert captured.err.rstrip().endswith("failed: bench/fingerprint.py --shape nothing")
    page = (tmp_path / "out/README.md").read_text()
    assert page.startswith("# Results") and "](fingerprint-tiny-bfloat16-cpu.md)" in page and "\n## " in page
    assert entry.report(tmp_path / "out").read_text() == page  # its own page is no result


def test_a_folder_without_results_is_an_error_that_says_what_to_run(entry, tmp_path):
    with pytest.raises(SystemExit, match="has no results; run: python -m bench run"):
        entry.main(["report", str(tmp_path)])
    with pytest.raises(SystemExit, match="no time with 3 samples in common"):
        entry.main(["compare", str(tmp_path), str(tmp_path)])


def test_a_page_of_something_else_is_not_replaced(entry, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("# Notes\n")
    (tmp_path / "notes.md").write_text("# Notes\n")
    for arguments in (["report", str(tmp_path)], ["run", "--out", str(tmp_path)]):
        with pytest.raises(SystemExit, match=r"README\.md was not written by this program"):
            entry.main(arguments)
    assert page.read_text() == "# Notes\n"


@pytest.mark.parametrize("suffix", [".json", ".md", ".png"])
@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_results_replace_no_files_of_others(tmp_path, capsys, suffix, kind):
    from lib.pages import save

    document = {"machine": {"hf_tiered_cache": "0", "commit": "0123"}}

    def plot(plt, document):
        return plt.figure(figsize=(1, 1))

    out, notes = tmp_path / "out", tmp_path / "notes"
    out.mkdir()
    notes.write_text('{"machine": 1}')
    target = out / f"fleet{suffix}"
    target.mkdir() if kind == "folder" else target.symlink_to(notes) if kind == "link" else notes.rename(target)
    for _ in range(2):
        save(out, "fleet", document, "# Fleet\n", plot)
        assert sorted(path.name for path in out.iterdir() if path != target) == [
            f"fleet-2{ending}" for ending in (".json", ".md", ".png")
        ]
        assert "so the results are in" in capsys.readouterr().out
    if kind != "folder":
        assert target.read_text() == '{"machine": 1}'


def test_results_replace_earlier_ones_but_not_other_links_to_them(tmp_path, capsys):
    from lib.pages import save

    out, backup = tmp_path / "out", tmp_path / "backup"
    for number in range(2):
        document = {"machine": {"hf_tiered_cache": "0", "commit": "0123"}, "number": number}
        save(out, "fleet", document, f"# Fleet {number}\n", lambda plt, d: plt.figure(figsize=(1 + d["number"], 1)))
        if not number:
            shutil.copytree(out, backup, copy_function=os.link)
    assert sorted(path.name for path in out.iterdir()) == ["fleet.json", "fleet.md", "fleet.png"]
    widths = [int.from_bytes((folder / "fleet.png").read_bytes()[16:20], "big") for folder in (backup, out)]
    assert widths == [120, 240]
    assert "# Fleet 0" in (backup / "fleet.md").read_text()
    assert not capsys.readouterr().out


def test_a_page_has_room_for_results_that_are_blank_or_no_text(entry, tmp_path):
    (tmp_path / "blank.md").write_bytes(b"")
    (tmp_path / "other.md").write_bytes(b"\xff\n")
    assert "- [blank](blank.md)" in entry.report(tmp_path).read_text()


def test_files_of_others_are_not_replaced_by_a_run_on_a_gpu(tmp_path, monkeypatch, capsys):
    from lib import gpu_run

    assert gpu_run.foreign_file(tmp_path) is None
    (tmp_path / "log.txt").write_text("precious")
    assert gpu_run.foreign_file(tmp_path) == tmp_path / "log.txt"
    for rows in ("", "precious", "[]", '{"stage": "a"}'):
        (tmp_path / gpu_run.ROWS).write_text(rows)
        assert gpu_run.foreign_file(tmp_path) == tmp_path / gpu_run.ROWS
    spec = importlib.util.spec_from_file_location("on_gpu", BENCH / "on_gpu.py")
    on_gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(on_gpu)
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "run", str(tmp_path)])
    with pytest.raises(SystemExit):
        on_gpu.main()
    assert "rows.jsonl was not written by this program" in capsys.readouterr().err
    (tmp_path / gpu_run.ROWS).write_text('{"stage": "run"}\n')
    assert gpu_run.foreign_file(tmp_path) is None


def test_only_marked_folders_that_no_run_has_locked_are_swept(tmp_path):
    from lib import gpu_run

    live, killed, unmarked = (tmp_path / f"on-gpu-{name}" for name in ("live", "killed", "other"))
    for folder in (live, killed, unmarked):
        folder.mkdir()
    gpu_run.mark(killed).close()
    with gpu_run.mark(live):
        gpu_run.sweep(tmp_path)
        assert {*tmp_path.iterdir()} == {live, unmarked}
    gpu_run.sweep(tmp_path)
    assert [*tmp_path.iterdir()] == [unmarked]


def test_only_what_is_slower_beyond_noise_is_told(entry, tmp_path, capsys):
    before = write(tmp_path / "before", steady=[1.0, 1.1, 0.9, 1.05], slow=[1.0, 1.01, 0.99], quick=[1.0, 1.01, 0.99])
    after = write(tmp_path / "after", steady=[1.05, 0.95, 1.1, 1.0], slow=[1.2, 1.21, 1.19], quick=[0.8, 0.81, 0.79])
    assert entry.main(["compare", str(before), str(after)]) == 0
    page = capsys.readouterr().out
    slow, quick = (line for line in page.splitlines() if line.endswith(("| slower |", "| faster |")))
    assert "results / prefix 1024 / ttft_s / slow | 1e+03 | 1.2e+03 | 1.20" in slow
    assert "ttft_s / quick" in quick and "steady" not in page and "losses" not in page
    assert "1 slower, 1 faster, 1 within noise" in page
    assert entry.main(["compare", str(before), str(after), "--fail"]) == 1
    assert entry.main(["compare", str(after), str(after), "--fail", "--all"]) == 0
    assert "steady" in capsys.readouterr().out


def test_rows_of_a_trace_are_samples_of_their_system():
    from lib.comparing import samples

    rows = [{"system": name, "turn": turn, "ttft_s": 1.0 + turn} for turn in range(5) for name in ("a", "b")]
    assert samples({"rows": rows}) == {f"rows / {name} / ttft_s": [1.0, 2.0, 3.0, 4.0, 5.0] for name in ("a", "b")}
    few = [{"tokens": 64, "seconds": [1.0, 2.0, 3.0], "mean_s": 2.0}, {"tokens": 128, "seconds": [2.0, 3.0, 4.0]}]
    assert samples(few) == {"tokens 64 / seconds": [1.0, 2.0, 3.0], "tokens 128 / seconds": [2.0, 3.0, 4.0]}


def test_committed_results_agree_with_themselves():
    from lib.comparing import compare

    changes = compare(BENCH / "results", BENCH / "results")
    assert len(changes) > 100
    assert not [change for change in changes if change.verdict]
