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

    def prepare(self, layer: int, units: Units, wanted: Wanted) -> None:
        """Start to fetch what a layer is predicted to ask, as far as memory has room for it."""
        try:
            self._fetcher.bring(wanted, ahead=True)
        except RestoreError as error:  # it will be asked for again
            logger.debug("nothing is fetched ahead for layer %d: %s", layer, error)
        self._collector.add(ahead_blocks=sum(len(unit.held) for unit in units.values()))
        self._units[layer] = units

    def take(self, layer: int) -> Units:
        """What is there or on its way for a layer, which asks now."""
        return self._units.pop(layer, {})

    def complete(self, units: Units, wanted: Wanted) -> None:
        """Start to fetch what a layer asks for and has not; what was brought in vain goes, and leaves `units`.

        Args:
            units: what `take` gave, and new ones of what is missing.
            wanted: what it asks for.

        Raises:
            RestoreError: a fetch could not begin.
        """
        asked: dict[FetchUnit, np.ndarray] = {}
        for unit, chunks in wanted:
            asked[unit] = np.union1d(asked[unit], chunks) if unit in asked else chunks
        hits = sum(len(np.intersect1d(chunks, unit.held)) for unit, chunks in asked.items())
        self._collector.add(ahead_hits=hits, ahead_misses=sum(map(len, asked.values())) - hits)
        for name, unit in list(units.items()):
            if unit not in asked:
                self._fetcher.finish([units.pop(name)])
        ahead = {unit: tuple(unit.leases) for unit in asked if unit.leases}
        self._fetcher.bring(wanted)
        if self._fetcher.drop_failed(ahead):
            self._fetcher.bring(wanted)
