"""The soak, for a few seconds (`make soak` takes ten minutes)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import processes

sys.path.append(str(Path(__file__).parent))


def test_everything_at_once_for_a_few_seconds(tmp_path, monkeypatch):
    import soak

    arguments = ["--minutes", "0.1", "--seed", "1", "--processes", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(soak, "subprocess", processes)
    monkeypatch.setattr(sys, "argv", ["soak.py", *arguments])
    soak.main()
    (run,) = json.loads((tmp_path / "soak.json").read_text())["runs"]
    assert run["wrong"] == []
    assert run["counts"]["requests"] > 0
    assert run["counts"]["changes"] > 0
    assert run["counts"]["requests_under_change"] > 0
    assert "| requests compared with DynamicCache |" in (tmp_path / "soak.md").read_text()
