"""How important each token of a segment has been to those who asked, for laying it out by that."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection

import numpy as np

_MOST_BYTES = 64 << 20


class TokenImportance:
    """What attention each token got in all, layer by layer, since the process began (IMPRESS, Section 4.4.1).

    A sum and no average: of two tokens that matter alike, the one that is asked for more often is to lie in front.

    Args:
        every: a segment is due to be laid out anew when so many prompts have asked for it; then when twice as many
            have, and so on, so that what is settled is left alone.
    """

    def __init__(self, every: int = 4) -> None:
        self._every = every
        self._mass: OrderedDict[str, np.ndarray] = OrderedDict()  # of each segment float32 [layers, tokens]
        self._prompts: dict[str, int] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def note(self, segment: str, shape: tuple[int, int], layer: int, tokens: slice, mass: np.ndarray) -> None:
        """At `layer` some tokens of a segment of `shape`, layers and tokens, got so much attention."""
        with self._lock:
            if segment not in self._mass:
                self._mass[segment] = np.zeros(shape, np.float32)
                self._nbytes += self._mass[segment].nbytes
            self._mass.move_to_end(segment)
            self._mass[segment][layer, tokens] += mass
            while self._nbytes > _MOST_BYTES and len(self._mass) > 1:
                oldest, known = self._mass.popitem(last=False)
                self._nbytes -= known.nbytes
                self._prompts.pop(oldest, None)

    def prompt_done(self, segment: str) -> bool:
        """A prompt that asked for the segment is through. Returns whether it is due to be laid out anew."""
        with self._lock:
            count = self._prompts[segment] = self._prompts.get(segment, 0) + 1
        times = count // self._every
        return count % self._every == 0 and times & (times - 1) == 0  # every, 2 every, 4 every...

    def of(self, segment: str) -> np.ndarray | None:
        """The attention that its tokens got, float32 `[layers, tokens]`, or None if nothing is known of them."""
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

    def rename(self, old: str, new: str) -> None:
        """A segment is called otherwise from now on."""
        with self._lock:
            if old in self._mass:
                self._mass[new] = self._mass.pop(old)
            if old in self._prompts:
                self._prompts[new] = self._prompts.pop(old)
