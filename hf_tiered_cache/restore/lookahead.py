"""Blocks ahead of their layer: fetched for what it is predicted to ask, completed when it asks.

See `patches.lookahead` for the prediction. Attention sees what the layer itself asks for and nothing else, so a wrong
prediction, or a read that fails ahead of its need, changes nothing but the time.
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
"""By segment and number of the block group."""
Wanted = Sequence[tuple[FetchUnit, np.ndarray]]
"""Units, and for each the chunks that are asked of it, int64 ascending. One unit may stand there several times."""


class FetchAhead:
    """Units that were brought ahead of their layer, until it asks or the pass ends.

    Args:
        fetcher: of the pass; its `cancel` lets everything go.
        collector: counts what was brought ahead, asked for, and missing.
    """

    def __init__(self, fetcher: Fetcher, collector: StatsCollector) -> None:
        self._fetcher, self._collector = fetcher, collector
        self._units: dict[int, Units] = {}  # by layer
        self._taken: dict[FetchUnit, np.ndarray] = {}  # of the layer that asks, and the chunks that were brought ahead
        self._asked: set[FetchUnit] = set()  # what it has asked for so far

    def prepare(self, layer: int, units: Units, wanted: Wanted) -> None:
        """Start to fetch what a layer is predicted to ask, as far as memory has room for it."""
        try:
            self._fetcher.bring(wanted, ahead=True, attends=False)
        except RestoreError as error:  # it will be asked for again
            logger.debug("nothing is fetched ahead for layer %d: %s", layer, error)
        self._collector.add(ahead_blocks=sum(len(unit.held) for unit in units.values()))
        self._units[layer] = units

    def take(self, layer: int) -> Units:
        """What is there or on its way for a layer, which asks now."""
        units = self._units.pop(layer, {})
        self._taken, self._asked = {unit: unit.held for unit in units.values()}, set()
        return units

    def complete(self, wanted: Wanted) -> None:
        """Start to fetch what the layer asks for and has not.

        Args:
            wanted: what it asks for, or some of its rows do, of units that `take` gave and of new ones.

        Raises:
            RestoreError: a fetch could not begin.
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
        """The layer has asked for all: what was brought in vain goes, and leaves `units`."""
        for name, unit in list(units.items()):
            if unit not in self._asked:
                self._fetcher.finish([units.pop(name)])
