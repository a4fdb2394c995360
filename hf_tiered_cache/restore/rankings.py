"""Scores of the tokens of stored passages, by any ranking: columns beside the KV, which is the same for all of them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Mapping

import numpy as np
import torch

from ..store.disk import SegmentStore
from ..store.segment import SegmentReader

RANKINGS_KIND = "rankings"
"""Kind of the arrays beside a segment: by the name of a ranking float32 `[tokens]`."""
Columns = dict[str, np.ndarray]
"""By the name of a ranking how much it matters that each token is computed in its true context: float32 `[tokens]`."""


class KeptRankings:
    """What lies beside segments of how their tokens rank. It can be lost without harm: another order is taken then.

    Args:
        disk: where the segments are.
    """

    def __init__(self, disk: SegmentStore) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Hashable, Columns]] = {}  # by segment, of which version of the file

    def of(self, reader: SegmentReader) -> Columns:
        """The columns of a segment, also those that another process has just kept."""
        version = self._version(reader)
        with self._lock:
            known = self._known.get(reader.id)
        if known is not None and known[0] == version:
            return known[1]
        arrays = None if version is None else self._disk.beside.kept(reader, RANKINGS_KIND, {})
        found = {name: array.numpy() for name, array in (arrays or {}).items() if _is_column(array, reader)}
        with self._lock:
            self._known[reader.id] = version, found
        return found

    def keep(self, reader: SegmentReader, columns: Mapping[str, np.ndarray]) -> bool:
        """Add columns, or renew them. Returns whether they are there now (see `Beside.keep`)."""
        every = {**self.of(reader), **columns}
        arrays = {name: torch.tensor(column, dtype=torch.float32) for name, column in every.items()}
        return self._disk.beside.keep(reader, RANKINGS_KIND, arrays, {})

    def forget(self, segments: Collection[str]) -> None:
        """These are gone, or others now."""
        with self._lock:
            for segment in segments:
                self._known.pop(segment, None)

    def _version(self, reader: SegmentReader) -> Hashable:
        """Which bytes lie beside which segment; None if there are none."""
        try:
            found = self._disk.backend.find(f"{reader.id}.{RANKINGS_KIND}")
        except OSError:
            return None
        return None if found is None else (reader.header.digests.digest, found.version)


def _is_column(array: torch.Tensor, reader: SegmentReader) -> bool:
    right = array.dtype == torch.float32 and array.shape == (reader.shape.tokens,)
    return right and bool(array.isfinite().all())
