"""bench/harness.py: `hf` and `hf-tiered` side by side, on five local tasks."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))


def test_the_exact_method_chooses_what_hf_does_on_every_task(saved, folder, tmp_path, loaded_once):
    import harness

    options = ["--model", str(saved), "--data", str(folder), "--shots", "4", "--limit", "2", "--budgets", "0.5"]
    harness.main([*options, "--out", str(tmp_path)])
    name = f"harness-{Path(saved).name}"
    results = json.loads((tmp_path / f"{name}.json").read_text())["found"]
    assert results.keys() == {harness.HF, harness.EXACT, harness.way_of(0.5)}
    for task in harness.TASKS:
        plain, exact = results[harness.HF][task], results[harness.EXACT][task]
        assert len(plain["scores"]) == 2 and plain["right"] == exact["right"]
        scores = (chain.from_iterable(way["scores"]) for way in (plain, exact))
        assert all(abs(a - b) < 1e-3 for a, b in zip(*scores, strict=True))
        assert plain["scores"] != results[harness.way_of(0.5)][task]["scores"]
    page = (tmp_path / f"{name}.md").read_text()
    assert "| hf-tiered, exact |" in page and "| 100.0 |" in page
