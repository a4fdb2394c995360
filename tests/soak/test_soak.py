"""The soak, for a few seconds (`make soak` takes ten minutes)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_everything_at_once_for_a_few_seconds(tmp_path):
    arguments = ["--minutes", "0.1", "--seed", "1", "--processes", "2", "--out", str(tmp_path)]
    soak = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "soak.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert soak.returncode == 0, soak.stdout
    (run,) = json.loads((tmp_path / "soak.json").read_text())["runs"]
    assert run["wrong"] == []
    assert run["counts"]["requests"] > 0
    assert "| requests compared with DynamicCache |" in (tmp_path / "soak.md").read_text()
