"""Exact reuse: restore the longest stored prefix, compute the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..restore.plan import Situation
from .base import Method

_LARGE_MASK = 1 << 28
_LITTLE = 1 / 8


@dataclass(frozen=True)
class Exact(Method):
    """Every layer computes the suffix, and sees every token before it: the output is that of no reuse at all."""

    def computed(self, situation: Situation) -> tuple[np.ndarray, ...]:
        first = min(situation.restorable, situation.columns - situation.must_compute)
        suffix = situation.columns - first
        # a whole prompt needs no mask, a suffix one of suffix x columns: for a little spared that costs more
        if situation.base == 0 and first < _LITTLE * suffix and suffix * situation.columns > _LARGE_MASK:
            first = 0
        return (np.arange(first, situation.columns),) * situation.layers
