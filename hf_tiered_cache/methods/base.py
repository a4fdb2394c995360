"""What a method is: a choice of parts, as a dataclass that reads like the overview of a paper."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from ..geometry import Geometry
from ..restore.plan import Situation


@dataclass(frozen=True)
class Method(ABC):
    """How KV is cut and restored.

    Args:
        geometry: how new segments are cut. Stored ones are read in whatever geometry they have.
        ahead_bytes: how far blocks are fetched ahead of the layers that need them: enough to keep a fast disk busy,
            little enough to bound what a request takes. 0 fetches them when they are needed.
    """

    geometry: Geometry = field(default_factory=Geometry)
    ahead_bytes: int = 128 << 20

    provenance = "exact"
    """How KV that is computed under this method comes about. Exact look-ups see exact records only."""

    @abstractmethod
    def computed(self, situation: Situation) -> tuple[np.ndarray, ...]:
        """For each layer the columns to compute, ascending; the others are restored.

        They never become more with depth, and hold the last `situation.must_compute` columns and all columns from
        `situation.restorable` on.
        """
