"""Prefetch of blocks for a layer's predicted selection, completed by its actual selection request.

See `patches.lookahead` for the prediction. Attention uses only what the layer itself requests, so a wrong prediction or
a failed prefetch affects only the run time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ..errors import RestoreError
from ..stats import StatsCollector
from ..store.segment import SegmentReader
from .fetch import Fetcher, FetchUnit

logger = logging.getLogger("hf_tiered_cache")

Units = dict[tuple[SegmentReader, int], FetchUnit]
"""Fetch units by segment and index of the KV cache group."""
Wanted = Sequence[tuple[FetchUnit, np.ndarray]]
"""Units with their requested chunks, int64, ascending. A unit may occur several times."""


class FetchAhead:
    """Prefetched units of each layer, kept until the layer requests blocks or the pass ends.

    Args:
        fetcher: Fetcher of the pass; its `cancel` releases all units.
        collector: Statistics of prefetched blocks, hits and misses.
    """

    def __init__(self, fetcher: Fetcher, collector: StatsCollector) -> None:
        self._fetcher, self._collector = fetcher, collector
        self._units: dict[int, Units] = {}  # by layer
        self._taken: dict[FetchUnit, np.ndarray] = {}  # prefetched chunks of the requesting layer
        self._asked: set[FetchUnit] = set()  # units that the layer has requested so far

    def prepare(self, layer: int, units: Units, wanted: Wanted) -> None:
        """Start to prefetch the chunks predicted for a layer, within the memory budgets."""
        try:
            self._fetcher.bring(wanted, ahead=True, attends=False)
        except RestoreError as error:  # the layer requests the chunks again
            logger.debug("nothing is fetched ahead for layer %d: %s", layer, error)
        self._collector.add(ahead_blocks=sum(len(unit.held) for unit in units.values()))
        self._units[layer] = units

    def take(self, layer: int) -> Units:
        """Remove and return the prefetched units of a layer that starts its requests."""
        units = self._units.pop(layer, {})
        self._taken, self._asked = {unit: unit.held for unit in units.values()}, set()
        return units

    def complete(self, wanted: Wanted) -> None:
        """Start to fetch the requested chunks that are not prefetched, and those of failed prefetches.

        Args:
            wanted: Chunks that the layer, or some of its rows, requests, of units from `take` and of new units.

        Raises:
            RestoreError: A fetch could not be started.
        """
        asked: dict[FetchUnit, np.ndarray] = {}
        for unit, chunks in wanted:
            asked[unit] = np.union1d(asked[unit], chunks) if unit in asked else chunks
        ahead = {unit: tuple(unit.leases) for unit in asked if unit in self._taken and unit not in self._asked}
        hits = sum(len(np.intersect1d(asked[unit], held)) for unit, held in self._taken.items() if unit in asked)
        self._collector.add(ahead_hits=hits, ahead_misses=sum(map(len, asked.values())) - hits)
        self._asked.update(asked)
        self._fetcher.bring(wanted)
        if ahead and self._fetcher.drop_failed(ahead):
            self._fetcher.bring(wanted)

    def drop_others(self, units: Units) -> None:
        """Release the units that the layer did not request, and remove them from `units`. Call after all requests."""
        for name, unit in list(units.items()):
            if unit not in self._asked:
                self._fetcher.finish([units.pop(name)])
