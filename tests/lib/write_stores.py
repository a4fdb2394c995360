"""Script for a separate process: writes one store per family and data type, with the prompts of `test_exact.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from families import FAMILIES, build, prompt

from hf_tiered_cache import KVStore

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPTS = {"a": prompt(100, seed=1), "b": prompt(90, seed=2)}


def main(root: Path) -> None:
    torch.set_num_threads(1)
    for family in FAMILIES:
        for name, dtype in DTYPES.items():
            with KVStore(root / f"{family}-{name}", engine="posix") as store:
                report = store.precompute(build(family, dtype), [p[0] for p in PROMPTS.values()], progress=False)
                assert report.stored == 96 + 80, report


if __name__ == "__main__":
    main(Path(sys.argv[1]))
