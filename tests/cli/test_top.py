"""`hf-tiered-cache top`: what programs did with a store while it ran."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from segments import hashes, open_store, segment
from typer.testing import CliRunner

from hf_tiered_cache.cli import app
from hf_tiered_cache.cli.contents import contents_of
from hf_tiered_cache.cli.top import Activity, draw
from hf_tiered_cache.units import format_bytes


@pytest.fixture
def store(tmp_path):
    with_one = open_store(tmp_path / "store")
    yield with_one, publish(with_one, "a", label="the report")
    with_one.close()


def publish(opened, seed, model="Qwen/Qwen2.5-0.5B", **changes):
    header, chain, blocks = segment(hashes(4, seed), model={"name": model}, **changes)
    opened.publish(header, chain, blocks)
    return header.id


def text_of(view, width=150):
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    return console.file.getvalue()


def test_uses_new_segments_and_removals_are_counted_and_shown(store, tmp_path):
    segment_store, first = store
    root, activity = tmp_path / "store", Activity()
    before = contents_of(root)
    assert "uses (0.0/s), stored nothing, removed nothing" in text_of(draw(root, before, activity))
    second = publish(segment_store, "b", label="[bold]minutes\x1b[31m")
    segment_store.index.touch([first])
    segment_store.index.touch([first])
    between = contents_of(root)
    activity.observe(before, between, 2.0)
    assert (activity.uses, activity.stored[0], activity.removed[0]) == (2, 1, 0)
    nbytes = next(row.nbytes for row in between.rows if row.id == first)
    segment_store.remove([first])
    after = contents_of(root)
    activity.observe(between, after, 2.0)
    assert (activity.uses, activity.removed, activity.seconds) == (2, (1, nbytes), 4.0)
    lines = text_of(draw(root, after, activity)).splitlines()
    assert "1 segment, 64 tokens" in lines[0] and lines[1].startswith("last 4 s: 2 uses (0.5/s), stored 1 segment, ")
    removed_line, new = lines[-2:]
    assert removed_line.startswith(first[:8]) and " removed " in removed_line and "the report" in removed_line
    assert new.startswith(second[:8]) and " stored " in new and "[bold]minutes�[31m" in new


def test_a_narrow_terminal_shortens_names_and_no_figures(store, tmp_path):
    segment_store, _ = store
    row = publish(segment_store, "b", model="/models/" + "a-model-with-a-long-name" * 4, label="minutes of a meeting")
    contents = contents_of(tmp_path / "store")
    lines = text_of(draw(tmp_path / "store", contents, Activity()), width=80).splitlines()
    (line,) = (line for line in lines if line.startswith(row[:8]))
    assert " a-model" in line and line.count("…") == 1
    size = format_bytes(next(entry.nbytes for entry in contents.rows if entry.id == row))
    assert f" 64  {size}     1 " in line and line.endswith(" now")


def test_the_command_watches_until_its_time_is_over(store, tmp_path, monkeypatch):
    segment_store, _ = store
    looks = []

    def look(path):
        looks.append(contents_of(path))
        if len(looks) == 1:
            publish(segment_store, "c")
        return looks[-1]

    monkeypatch.setattr("hf_tiered_cache.cli.top.contents_of", look)
    result = CliRunner().invoke(app, ["top", str(tmp_path / "store"), "--interval", "0.2", "--seconds", "0.4"])
    assert result.exit_code == 0 and len(looks) > 1
    assert "stored 1 segment" in result.output and result.output.count("segment ") < 6  # printed once in a pipe
    assert result.output.endswith("\n")
