"""IMPRESS with a record of how often its probe heads agree: measured, or emulated for random weights."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from hf_tiered_cache.methods import Impress
from hf_tiered_cache.selection.selectors import ProbeHeads


@dataclass(frozen=True)
class NotedProbes(ProbeHeads):
    """Probe heads that record whether they agreed.

    Args:
        emulated: Share of the selections in which the probes are assumed to agree, drawn by a hash of the selection;
            None to use their actual agreement.
        notes: Whether the probes agreed, for each selection.
    """

    emulated: float | None = None
    notes: list[bool] = field(default_factory=list, compare=False, repr=False)

    def agree(self, sets: np.ndarray, tokens: int) -> bool:
        draw = zlib.crc32(np.ascontiguousarray(sets).tobytes()) / 2**32
        agreed = super().agree(sets, tokens) if self.emulated is None else draw < self.emulated
        self.notes.append(agreed)
        return agreed


@dataclass(frozen=True, kw_only=True)
class NotedImpress(Impress):
    """IMPRESS with `NotedProbes`; see there for the arguments."""

    emulated: float | None = None
    notes: list[bool] = field(default_factory=list, compare=False, repr=False)

    def selector(self) -> ProbeHeads:
        return NotedProbes(heads=self.probe_heads, alpha=self.alpha, emulated=self.emulated, notes=self.notes)
