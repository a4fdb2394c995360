"""The page of all runs on pretrained models."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from eval import leaderboard
from eval.errors import EvalError


def figure(mean):
    return {"mean": mean, "low": mean, "high": mean}


def row(task, variant, budget, kl, **more):
    metrics = {"task": task, "variant": variant, "metric": "accuracy", "budget": budget, "examples": 12}
    metrics |= {"score": figure(50 + 10 * kl), "top1": figure(100 - 10 * kl), "kl": figure(kl)}
    return metrics | {name: figure(value) for name, value in more.items()}


def write_run(folder, rows):
    folder.mkdir()
    config = {"model": "models/tiny", "dtype": "float32", "seed": 1, "weights": {"sha256": "abcdef" * 8}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.json").write_text(json.dumps(rows))
    return folder


def test_running_text_is_compared_over_all_of_its_tokens(tmp_path):
    far = {"full": (None, 0, 0), "h2o:reselect=true@0.1": (0.1, 0.02, 2900), "h2o@0.1": (0.1, 0.08, 98)}
    rows = [
        row("text", name, budget, 0.5, answer_kl=kl, answer_top1=100 - 100 * kl, answered=read_share, brought=97)
        | {"metric": "perplexity"}
        for name, (budget, kl, read_share) in far.items()
    ]
    text = leaderboard.page([write_run(tmp_path / "real-text", rows)], tmp_path / "page.md")
    lines = [line.split(" | ")[:5] for line in text.splitlines() if line.startswith("| 10%")]
    assert lines == [["| 10%", "`h2o:reselect=true`", "98", "0.02", "2900.0"], ["| 10%", "`h2o`", "92", "0.08", "98.0"]]


def test_methods_stand_at_each_share_the_nearest_to_full_kv_first(tmp_path):
    rows = [row(task, "full", None, 0) for task in ("one", "two")]
    for task, add in (("one", 0), ("two", 0.2)):
        rows += [row(task, f"h2o@{share}", share, 0.4 + add, brought=91, index=0) for share in (0.05, 0.1)]
        rows += [
            row(task, f"contiguous_kv:period=2@{share}", share, share + add, brought=5, index=13)
            for share in (0.05, 0.1)
        ]
    rows += [row("one", "exact", None, 0, brought=100)]
    run = write_run(tmp_path / "real-tiny", rows)
    passages = write_run(
        tmp_path / "real-passages", [row("three", "full", None, 0), row("three", "epic@0.15", 0.15, 1.0, compute=14.7)]
    )
    out = tmp_path / "docs" / "leaderboard.md"
    out.parent.mkdir()
    result = CliRunner().invoke(_app(), [str(run), str(passages), "--out", str(out)])
    assert result.exit_code == 0, result.output
    text = out.read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == "| share | method | same token, % | KL, nats | KV read, % | index, % | accuracy, % |"
    assert lines[2].startswith("|  | `full` | 100 | 0 |")
    assert [line.split(" | ")[:5] for line in lines[3:7]] == [
        ["| 5%", "`contiguous_kv:period=2`", "98", "0.15", "5.0"],
        ["| 5%", "`h2o`", "95", "0.5", "91.0"],
        ["| 10%", "`contiguous_kv:period=2`", "98", "0.2", "5.0"],
        ["| 10%", "`h2o`", "95", "0.5", "91.0"],
    ]
    assert "`exact`" not in text  # which one of the tasks lacks
    assert lines[7] == "| share | method | same token, % | KL, nats | computed, % | accuracy, % |"
    assert "(../real-tiny/README.md)" in text and "24 examples" in text and "abcdefabcdef" in text


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(EvalError, match="holds no run"):
        leaderboard.page([tmp_path], tmp_path / "page.md")
    result = CliRunner().invoke(_app(), [str(tmp_path), "--out", str(tmp_path / "page.md")])
    assert result.exit_code == 2 and not (tmp_path / "page.md").exists()


def _app():
    import typer

    app = typer.Typer()
    app.command()(leaderboard.main)
    return app
