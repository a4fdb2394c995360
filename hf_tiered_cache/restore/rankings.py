"""Scores of the tokens of stored passages, by ranking: kept in a sidecar of the KV, which all rankings share."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Mapping

import numpy as np
import torch

from ..store.disk import SegmentStore
from ..store.segment import SegmentReader

RANKINGS_KIND = "rankings"
"""Kind of the sidecar, which holds float32 `[tokens]` for each ranking name."""
Columns = dict[str, np.ndarray]
"""Scores by ranking name, float32 `[tokens]`: how much it matters that each token is computed in its true context."""


class KeptRankings:
    """Token rankings in sidecars of their segments.

    Losing one does no harm: tokens are then taken in another order.

    Args:
        disk: Segment store.
    """

    def __init__(self, disk: SegmentStore) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Hashable, dict[str, np.ndarray]]] = {}  # by segment: version and scores

    def of(self, reader: SegmentReader) -> Columns:
        """Return the scores of a segment by ranking, including those just written by another process."""
        return dict(self._arrays(reader))

    def keep(self, reader: SegmentReader, columns: Mapping[str, np.ndarray]) -> bool:
        """Add or replace scores. Return whether they are stored now (see `Beside.keep`)."""
        arrays = dict(self._arrays(reader))
        arrays |= {name: np.asarray(column, np.float32) for name, column in columns.items()}
        tensors = {name: torch.tensor(array) for name, array in arrays.items()}
        return self._disk.beside.keep(reader, RANKINGS_KIND, tensors, {})

    def _arrays(self, reader: SegmentReader) -> dict[str, np.ndarray]:
        """Return all scores in the sidecar of a segment."""
        version = self._version(reader)
        with self._lock:
            known = self._known.get(reader.id)
        if known is not None and known[0] == version:
            return known[1]
        kept = {} if version is None else self._disk.beside.kept(reader, RANKINGS_KIND, {}) or {}
        arrays = {name: tensor.numpy() for name, tensor in kept.items() if tensor.dtype == torch.float32}
        found = {name: array for name, array in arrays.items() if _is_column(array, reader)}
        with self._lock:
            self._known[reader.id] = version, found
        return found

    def forget(self, segments: Collection[str]) -> None:
        """Forget deleted segments; their ids may be reused."""
        with self._lock:
            for segment in segments:
                self._known.pop(segment, None)

    def _version(self, reader: SegmentReader) -> Hashable:
        """Return the version of a segment's sidecar, or None if there is none."""
        try:
            found = self._disk.backend.find(f"{reader.id}.{RANKINGS_KIND}")
        except OSError:
            return None
        return None if found is None else (reader.header.digests.digest, found.version)


def _is_column(array: np.ndarray, reader: SegmentReader) -> bool:
    right = array.dtype == np.float32 and array.shape == (reader.shape.tokens,)
    return right and bool(np.isfinite(array).all())
