"""Importance of each token of a segment to past queries, by which segments are reordered."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection

import numpy as np

from ..shape import SegmentShape

_MOST_BYTES = 64 << 20


class TokenImportance:
    """Total attention to each token, by layer and KV head (IMPRESS, Section 4.4.1, by layer).

    The attention is summed, not averaged, so that tokens that are requested more often are placed first.
    """

    def __init__(self) -> None:
        self._mass: OrderedDict[str, np.ndarray] = OrderedDict()  # segment id -> float32 [layers, heads, tokens]
        self._prompts: dict[str, int] = {}
        self._changed: set[str] = set()
        self._nbytes = 0
        self._lock = threading.Lock()

    def note(self, segment: str, shape: SegmentShape, layer: int, tokens: slice, mass: np.ndarray) -> None:
        """Add the attention that queries paid to tokens of a segment at one layer.

        Args:
            segment: id of the segment.
            shape: shape of the segment.
            layer: number of the layer.
            tokens: slice of n tokens of the segment.
            mass: attention, float32 `[rows, n]`: one row for all KV heads, or one row per head.
        """
        with self._lock:
            if segment not in self._mass:
                self._mass[segment] = np.zeros(size_of(shape), np.float32)
                self._nbytes += self._mass[segment].nbytes
            self._mass.move_to_end(segment)
            heads = slice(None if len(mass) == 1 else len(mass))
            self._mass[segment][layer, heads, tokens] += mass
            self._changed.add(segment)
            self._bound()

    def _bound(self) -> None:
        while self._nbytes > _MOST_BYTES and len(self._mass) > 1:
            oldest, known = self._mass.popitem(last=False)
            self._nbytes -= known.nbytes
            self._prompts.pop(oldest, None)
            self._changed.discard(oldest)

    def prompt_done(self, segment: str, every: int) -> bool:
        """Count a completed prompt that used the segment, and return whether the segment is due for reordering.

        Args:
            segment: id of the segment.
            every: number of prompts after which the segment is due for the first time. It is due again at 2, 4, 8, ...
                times that number, so that a stable order is rarely rewritten.
        """
        with self._lock:
            count = self._prompts[segment] = self._prompts.get(segment, 0) + 1
            self._changed |= {segment} & self._mass.keys()
        times = count // every
        return count % every == 0 and times & (times - 1) == 0  # every, 2 every, 4 every...

    def __contains__(self, segment: object) -> bool:
        return segment in self._mass

    def of(self, segment: str) -> np.ndarray | None:
        """Return the attention to the tokens of a segment, float32 `[layers, heads, tokens]`, or None if unknown."""
        with self._lock:
            known = self._mass.get(segment)
            return None if known is None else known.copy()

    def forget(self, segments: Collection[str]) -> None:
        """Forget deleted segments."""
        with self._lock:
            for segment in self._mass.keys() & set(segments):
                self._nbytes -= self._mass.pop(segment).nbytes
            for segment in segments:
                self._prompts.pop(segment, None)
                self._changed.discard(segment)

    def rename(self, old: str, new: str) -> None:
        """Move the importance of the segment `old` to the id `new`."""
        with self._lock:
            if old in self._mass:
                self._mass[new] = self._mass.pop(old)
                self._changed.add(new)
            self._changed.discard(old)
            if old in self._prompts:
                self._prompts[new] = self._prompts.pop(old)

    def changes(self) -> dict[str, tuple[np.ndarray, int]]:
        """Return the attention and the number of prompts of each segment that changed since the last call."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return {name: (self._mass[name].copy(), self._prompts.get(name, 0)) for name in changed}

    def load(self, segment: str, mass: np.ndarray, prompts: int) -> None:
        """Load what `changes` returned for a segment in an earlier process.

        Segments with attention from this process are left as they are.
        """
        with self._lock:
            if segment not in self._mass:
                self._mass[segment], self._prompts[segment] = mass, prompts + self._prompts.get(segment, 0)
                self._nbytes += mass.nbytes
                self._bound()


def size_of(shape: SegmentShape) -> tuple[int, int, int]:
    """Return the number of layers, the largest number of KV heads of a layer, and the number of tokens."""
    layers = shape.layout.layers
    return len(layers), max(layer.key_heads for layer in layers if layer is not None), shape.tokens
