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
        self._known: dict[str, tuple[Hashable, dict[str, np.ndarray]]] = {}  # by segment, of which version of the file

    def of(self, reader: SegmentReader) -> Columns:
        """The columns of a segment, also those that another process has just kept."""
        return dict(self._arrays(reader))

    def keep(self, reader: SegmentReader, columns: Mapping[str, np.ndarray]) -> bool:
        """Add columns, or renew them. Return whether they are there now (see `Beside.keep`)."""
        arrays = dict(self._arrays(reader))
        arrays |= {name: np.asarray(column, np.float32) for name, column in columns.items()}
        tensors = {name: torch.tensor(array) for name, array in arrays.items()}
        return self._disk.beside.keep(reader, RANKINGS_KIND, tensors, {})

    def _arrays(self, reader: SegmentReader) -> dict[str, np.ndarray]:
        """Return all columns that lie beside a segment."""
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


def _is_column(array: np.ndarray, reader: SegmentReader) -> bool:
    right = array.dtype == np.float32 and array.shape == (reader.shape.tokens,)
    return right and bool(np.isfinite(array).all())
