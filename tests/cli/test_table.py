"""Tables of the command line: aligned, folded to the terminal's width, and whole in a pipe."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from rich.cells import cell_len

from hf_tiered_cache.cli.output import Refused, Table, ago, date, facts, picture


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def show(monkeypatch):
    """Return the lines that a terminal of 40 columns gets of a table."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def lines_of(table):
        with redirect_stdout(Terminal()) as output:
            table.show()
        return output.getvalue().splitlines()

    return lines_of


def labelled(*labels):
    table = Table("segment", "size", "label", right=("size",), fold=("label",))
    for number, label in enumerate(labels):
        table.add_row(f"{number:08}", str(10**number), label)
    return table


def test_columns_are_aligned_and_nothing_trails(capsys):
    labelled("short", "", "日本語").show()
    assert capsys.readouterr().out.splitlines() == [
        "segment   size  label",
        "00000000     1  short",
        "00000001    10",
        "00000002   100  日本語",
    ]


def test_a_pipe_gets_every_row_in_one_line(capsys):
    label = "word " * 100 + "end"
    labelled(label).show()
    assert capsys.readouterr().out.splitlines()[1] == f"00000000     1  {label}"


def test_a_terminal_gets_what_fits_and_all_of_it(show):
    labels = ["some words that need a second line", "日本語" * 20, "x" * 100, "short"]
    heading, *lines = show(labelled(*labels))
    assert heading.startswith("\x1b[2msegment ") and "\x1b" not in "".join(lines)
    assert max(map(cell_len, lines)) <= 40
    rows = "".join(line.ljust(17)[16:].strip() for line in lines)
    assert rows.replace(" ", "") == "".join(labels).replace(" ", "")
    assert [line.split()[0] for line in lines if line[0] == "0"] == [f"{number:08}" for number in range(4)]


def test_facts_fold_what_is_long_and_have_no_heading(show):
    table = facts()
    table.add_row("store", "somewhere")
    table.add_row("model", "a name that is too long for forty columns")
    lines = show(table)
    assert lines[0] == "\x1b[2mstore\x1b[0m\x1b[2m  \x1b[0msomewhere"
    assert len(lines) == 3 and lines[2] == "\x1b[2m       \x1b[0mcolumns"


def test_an_empty_table_of_facts_shows_nothing(capsys):
    facts().show()
    assert capsys.readouterr().out == ""


def test_a_number_that_is_no_time_is_shown_as_unknown():
    for moment in (-1e163, float("-inf")):
        assert ago(moment) == date(moment) == "unknown"
    for moment in (1e163, float("inf")):
        assert (ago(moment), date(moment)) == ("now", "unknown")
    assert ago(time.time()) == "now" and date(0.0) != "unknown"


def test_the_ending_of_a_picture_does_not_hide_an_existing_file(tmp_path):
    assert picture(tmp_path / "losses") == tmp_path / "losses.png"
    (tmp_path / "losses.png").write_bytes(b"precious")
    assert picture(tmp_path / "losses.png") == tmp_path / "losses.png"  # named
    with pytest.raises(Refused, match=r"losses\.png exists"):
        picture(tmp_path / "losses")


def test_a_picture_that_cannot_be_written_is_refused_before_it_is_drawn(tmp_path):
    (tmp_path / "losses.png").mkdir()
    for folder in (tmp_path, tmp_path / "losses.png"):
        with pytest.raises(Refused, match="is a folder; name a file in it"):
            picture(folder)
    with pytest.raises(Refused, match=r"/proc/losses\.png cannot be written"):
        picture(Path("/proc/losses.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["losses.png"]
