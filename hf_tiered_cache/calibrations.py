"""The results of `calibrate` and `calibrate_prefix`, kept with the store.

Computing a token costs more in a longer prompt, loading it does not; so what was found holds for prompts of one length,
and between two such the ratio, or the time, goes from one to the other.
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
"""What is read again of each `Calibration`."""


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


@dataclass(frozen=True)
class PrefixCosts:
    """What a token of a prefix costs, for one model on one device, through one engine, stored with one codec.

    Args:
        tokens: of the prefix it was measured with.
        compute: seconds to compute one.
        restore: seconds to restore one, by the name of the tier.
    """

    tokens: int
    compute: float
    restore: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return asdict(self)


def calibrated_ratio(storage: Storage, fingerprint: str, device: torch.device, tokens: int) -> float | None:
    """What `calibrate` found for this model on this device, for prompts of so many tokens, or None."""
    found = _read(storage).get(f"{fingerprint} {_describe(device)}", [])
    return _between(tokens, {one["tokens"]: one["ratio"] for one in found if one.keys() >= _KEPT})


def prefix_costs(
    storage: Storage, fingerprint: str, device: torch.device, provenance: str, tokens: int
) -> PrefixCosts | None:
    """What `calibrate_prefix` found for this model, device, engine and codec, for a prefix of so many tokens, or None.

    A tier that was not measured is left out.
    """
    found = _read(storage).get(_prefix_name(storage, fingerprint, device, provenance), [])
    try:
        known = [PrefixCosts(**one) for one in found]
        compute = _between(tokens, {one.tokens: one.compute for one in known})
        restore = {
            tier: _between(tokens, {one.tokens: one.restore[tier] for one in known if tier in one.restore})
            for tier in {tier for one in known for tier in one.restore}
        }
    except (TypeError, AttributeError, ValueError):  # damaged
        return None
    if compute is None:
        return None
    return PrefixCosts(tokens, compute, {tier: cost for tier, cost in restore.items() if cost is not None})


def _between(tokens: int, known: dict[int, float]) -> float | None:
    """Of what is known for some lengths, the value for another; beyond them that of the nearest."""
    lengths = sorted(known)
    return float(np.interp(tokens, lengths, [known[length] for length in lengths])) if lengths else None


def _prefix_name(storage: Storage, fingerprint: str, device: torch.device, provenance: str) -> str:
    return f"prefix {fingerprint} {_describe(device)} {storage.disk.backend.reads_with} {provenance}"


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _read(storage: Storage) -> dict[str, list[dict[str, Any]]]:
    """For each model on each device what was found, as `Calibration.as_dict` gives it."""
    try:
        found = json.loads((storage.path / _FILE).read_text(encoding="utf-8"))
        sound = all(isinstance(one, dict) for some in found.values() for one in some)
    except (OSError, ValueError, AttributeError, TypeError):  # none yet, or damaged
        sound = False
    return found if sound else {}  # as if nothing had been measured


def keep(storage: Storage, fingerprint: str, device: torch.device, found: Calibration) -> None:
    """Keep what was found, beside what was found for prompts of other lengths from the same place."""
    name = f"{fingerprint} {_describe(device)}"
    sound = [one for one in _read(storage).get(name, ()) if one.keys() >= _KEPT]
    others = [one for one in sound if one["tokens"] != found.tokens and one["cold"] == found.cold]
    _write(storage, name, [*others, found.as_dict()])


def keep_prefix_costs(
    storage: Storage, fingerprint: str, device: torch.device, provenance: str, found: list[PrefixCosts]
) -> None:
    """Keep what was found in place of what was."""
    _write(storage, _prefix_name(storage, fingerprint, device, provenance), [one.as_dict() for one in found])


def _write(storage: Storage, name: str, found: list[dict[str, Any]]) -> None:
    path = storage.path / _FILE
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(_read(storage) | {name: found}, indent=1) + "\n", encoding="utf-8")
    partial.chmod(0o600)
    partial.replace(path)
