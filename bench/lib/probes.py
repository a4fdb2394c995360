"""IMPRESS, and how often its probe heads agree: as they do, or emulated where weights are random and they never do."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from hf_tiered_cache.methods import Impress
from hf_tiered_cache.selection.selectors import ProbeHeads


@dataclass(frozen=True)
class NotedProbes(ProbeHeads):
    """Notes whether the probes agreed.

    Args:
        emulated: the share of choices at which they are taken to agree, drawn by what they choose; None: as they do.
        notes: of each choice.
    """

    emulated: float | None = None
    notes: list[bool] = field(default_factory=list, compare=False, repr=False)

    def agree(self, sets: np.ndarray, tokens: int) -> bool:
        drawn = zlib.crc32(np.ascontiguousarray(sets).tobytes()) / 2**32
        found = super().agree(sets, tokens) if self.emulated is None else drawn < self.emulated
        self.notes.append(found)
        return found


@dataclass(frozen=True, kw_only=True)
class NotedImpress(Impress):
    """IMPRESS with such probes. Args: see `NotedProbes`."""

    emulated: float | None = None
    notes: list[bool] = field(default_factory=list, compare=False, repr=False)

    def selector(self) -> ProbeHeads:
        return NotedProbes(heads=self.probe_heads, alpha=self.alpha, emulated=self.emulated, notes=self.notes)
