"""The results of `calibrate`, kept with the store.

Computing a token costs more in a longer prompt, loading it does not; so what was found holds for prompts of one length,
and between two such the ratio goes from one to the other.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from .restore.recompute import Costs
from .storage import Storage

_FILE = "calibrations.json"
_KEPT = {"tokens", "ratio", "cold"}
"""What is read again of each."""


@dataclass(frozen=True)
class Calibration:
    """What was found for one model on one device.

    Args:
        ratio: share of each passage to compute: `CacheTune(recompute="auto")` takes it.
        seconds: to the first token at that ratio, and at those that were tried, by ratio; 1 is full recompute.
        costs: of a token in one layer.
        balanced: the ratio that these say, where the search began.
        tokens: of the prompt.
        cold: whether passages were read from disk, or came from memory.
    """

    ratio: float
    seconds: dict[float, float]
    costs: Costs
    balanced: float
    tokens: int
    cold: bool

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return asdict(self) | {"seconds": {f"{ratio:.4f}": value for ratio, value in sorted(self.seconds.items())}}


def calibrated_ratio(storage: Storage, fingerprint: str, device: torch.device, tokens: int) -> float | None:
    """What `calibrate` found for this model on this device, for prompts of so many tokens, or None."""
    found = _read(storage).get(f"{fingerprint} {_describe(device)}")
    if not found:
        return None
    known = sorted((one["tokens"], one["ratio"]) for one in found)
    return float(np.interp(tokens, [at for at, _ in known], [ratio for _, ratio in known]))


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _read(storage: Storage) -> dict[str, list[dict[str, Any]]]:
    """For each model on each device what was found, as `Calibration.as_dict` gives it."""
    try:
        found = json.loads((storage.path / _FILE).read_text(encoding="utf-8"))
        sound = all(one.keys() >= _KEPT for some in found.values() for one in some)
    except (OSError, ValueError, AttributeError, TypeError):  # none yet, or damaged
        sound = False
    return found if sound else {}  # as if nothing had been measured


def keep(storage: Storage, fingerprint: str, device: torch.device, found: Calibration) -> None:
    """Keep what was found, beside what was found for prompts of other lengths from the same place."""
    name = f"{fingerprint} {_describe(device)}"
    path = storage.path / _FILE
    partial = path.with_suffix(f".{os.getpid()}")
    kept = _read(storage)
    others = [one for one in kept.get(name, ()) if one["tokens"] != found.tokens and one["cold"] == found.cold]
    partial.write_text(json.dumps(kept | {name: [*others, found.as_dict()]}, indent=1) + "\n", encoding="utf-8")
    partial.chmod(0o600)
    partial.replace(path)
