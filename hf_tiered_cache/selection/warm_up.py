"""Warm-up of host memory with the chunks that decoding is likely to need (KVDRIVE, Section 7.1).

The last queries of a prompt show which chunks of its prefix matter. The layers hold the most important ones themselves;
of the others, as many as the host has room for are fetched to host memory, after the request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ..errors import TieredCacheError
from ..stats import StatsCollector
from ..tiers.handles import BlockRequest
from ..tiers.residency import Residency
from .selected import RowPrefix, restoring_groups

logger = logging.getLogger("hf_tiered_cache")

_SHARE = 0.9
"""Share of host memory to fill; the rest is for requests in the meantime."""


class WarmUp:
    """Most important chunks of one prompt, and their fetch to host memory.

    Args:
        residency: Memory tiers.
        collector: Statistics of the reads.
        defer: Runs a callable after the request.
        lists: Number of lists that will be recorded: one for each layer and row.
    """

    def __init__(
        self,
        residency: Residency,
        collector: StatsCollector,
        defer: Callable[[Callable[[], object]], object],
        lists: int,
    ) -> None:
        self._residency, self._collector, self._defer = residency, collector, defer
        self._bytes_per_list = int(_SHARE * residency.host.budget / lists)
        self._requests: list[list[BlockRequest]] = []  # by layer and row

    def chunks_per_head(self, row: RowPrefix, layer: int, chunk_tokens: int) -> int:
        """Return how many chunks of each head fit, for one layer and row; 0 if all of them fit."""
        chunk_bytes, total_bytes = 0, 0
        for piece in row.pieces():
            shape = piece.reader.shape
            groups = restoring_groups(shape, (layer,))
            total_bytes += sum(group.block_bytes * shape.chunks_in(group) for group in groups)
            blocks = -(-chunk_tokens // shape.geometry.chunk_tokens)  # per chunk and group
            chunk_bytes = max(chunk_bytes, blocks * sum(group.block_bytes for group in groups))
        return 0 if total_bytes <= self._bytes_per_list else self._bytes_per_list // chunk_bytes

    def note(self, row: RowPrefix, layer: int, ranked: np.ndarray, chunk_tokens: int) -> None:
        """Record the chunks of a row that matter most to a layer, int64 `[kv_heads, n]`, `chunk_tokens` tokens each."""
        requests, firsts = list[BlockRequest](), np.sort(ranked, axis=1) * chunk_tokens
        for piece in row.pieces():
            shape = piece.reader.shape
            for group in restoring_groups(shape, (layer,)):
                low = min(part.first_head for part in group.parts)
                high = max(part.first_head + part.heads for part in group.parts)
                tokens = np.unique(firsts[low:high])
                tokens = (tokens[:, None] + np.arange(chunk_tokens)).ravel()
                inside = row.inside(piece, tokens[tokens < row.tokens])[1]
                if len(inside):
                    requests.append(BlockRequest(piece.reader, group.index, shape.chunks_of(group, inside)))
        self._requests.append(requests)

    def start(self) -> None:
        """Fetch the recorded chunks, layer by layer."""
        for requests in self._requests:
            self._defer(partial(_bring, self._residency, self._collector, requests))


def _bring(residency: Residency, collector: StatsCollector, requests: list[BlockRequest]) -> None:
    handle = None
    try:
        handle = residency.fetch(requests, torch.device("cpu"), collector, ahead=True)
        handle.wait()
    except (TieredCacheError, OSError, MemoryError) as error:  # a request that needs them fetches and reports
        logger.info("chunks that are likely to be selected could not be loaded into host memory: %s", error)
    finally:
        if handle is not None:
            handle.release()
