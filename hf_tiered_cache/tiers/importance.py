"""How important each token of a segment has been to those who asked, for laying it out by that."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection

import numpy as np

from ..shape import SegmentShape

_MOST_BYTES = 64 << 20


class TokenImportance:
    """What attention each token got in all, in each layer and kv head (IMPRESS, Section 4.4.1: in each layer).

    A sum and no average: of two tokens that matter alike, the one that is asked for more often is to lie in front.
    """

    def __init__(self) -> None:
        self._mass: OrderedDict[str, np.ndarray] = OrderedDict()  # of each segment float32 [layers, heads, tokens]
        self._prompts: dict[str, int] = {}
        self._changed: set[str] = set()
        self._nbytes = 0
        self._lock = threading.Lock()

    def note(self, segment: str, shape: SegmentShape, layer: int, tokens: slice, mass: np.ndarray) -> None:
        """Note the attention that some tokens of a segment got at a layer.

        Args:
            segment: its id.
            shape: of the segment.
            layer: which.
            tokens: n of the segment.
            mass: float32 `[rows, n]`: one row for all kv heads, or one for each.
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
        """A prompt that asked for the segment is through. Returns whether it is due to be laid out anew.

        Args:
            segment: its id.
            every: it is due when so many prompts have asked for it; then when twice as many have, and so on, so that
                what is settled is left alone.
        """
        with self._lock:
            count = self._prompts[segment] = self._prompts.get(segment, 0) + 1
            self._changed |= {segment} & self._mass.keys()
        times = count // every
        return count % every == 0 and times & (times - 1) == 0  # every, 2 every, 4 every...

    def __contains__(self, segment: object) -> bool:
        return segment in self._mass

    def of(self, segment: str) -> np.ndarray | None:
        """The attention that its tokens got, float32 `[layers, heads, tokens]`, or None if nothing is known of them."""
        with self._lock:
            known = self._mass.get(segment)
            return None if known is None else known.copy()

    def forget(self, segments: Collection[str]) -> None:
        """These segments are gone."""
        with self._lock:
            for segment in self._mass.keys() & set(segments):
                self._nbytes -= self._mass.pop(segment).nbytes
            for segment in segments:
                self._prompts.pop(segment, None)
                self._changed.discard(segment)

    def rename(self, old: str, new: str) -> None:
        """A segment is called otherwise from now on."""
        with self._lock:
            if old in self._mass:
                self._mass[new] = self._mass.pop(old)
                self._changed.add(new)
            self._changed.discard(old)
            if old in self._prompts:
                self._prompts[new] = self._prompts.pop(old)

    def changes(self) -> dict[str, tuple[np.ndarray, int]]:
        """Of each segment of which more is known since this was asked last: the attention, and how many prompts."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return {name: (self._mass[name].copy(), self._prompts.get(name, 0)) for name in changed}

    def load(self, segment: str, mass: np.ndarray, prompts: int) -> None:
        """Take in what `changes` gave of a segment, in an earlier process, unless something is known of it."""
        with self._lock:
            if segment not in self._mass:
                self._mass[segment], self._prompts[segment] = mass, prompts + self._prompts.get(segment, 0)
                self._nbytes += mass.nbytes
                self._bound()


def size_of(shape: SegmentShape) -> tuple[int, int, int]:
    """Layers, kv heads of the layer that has most, and tokens of a segment."""
    layers = shape.layout.layers
    return len(layers), max(layer.key_heads for layer in layers if layer is not None), shape.tokens
