"""Which passages of a corpus stand before one while it is seen how they change its KV.

Every passage has an order of all others, by a hash of the two, and takes the first ones: whoever stores the corpus, in
whatever order and however many calls, it gets the same. One passage more in a corpus of n is a new neighbour to about
k of them, where each has k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONTEXT_TOKENS = 512
"""Of other passages, at most, that stand before a passage while it is seen how these change it."""


@dataclass(frozen=True)
class Neighbours:
    """The passages that another one was ranked behind.

    Args:
        names: the nearest first (see `passage_name`).
        given: whether they were named, and not chosen from the corpus.
        computed: whether their text stood before it, and not their stored KV.
    """

    names: tuple[str, ...]
    given: bool = False
    computed: bool = False


class Corpus:
    """The passages that may stand before one.

    Args:
        tokens: how many each has, by its name.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = dict(tokens)
        self._names = sorted(tokens)
        self._keys = np.array([_key(name) for name in self._names], np.uint64)
        self._lengths = np.array([tokens[name] for name in self._names], np.int64)

    def __contains__(self, name: str) -> bool:
        return name in self.tokens

    def choose(self, name: str, room: int) -> tuple[str, ...]:
        """The first ones in a passage's order of the others, as many as it takes to fill `room` tokens.

        Args:
            name: of the passage, which may be in the corpus.
        """
        if room <= 0 or not len(self._names):
            return ()
        orders = _mixed(self._keys ^ _mixed(np.array([_key(name)], np.uint64)))
        least = int(self._lengths.min())
        most = min(len(orders), -(-room // max(1, least)) + 1)  # with itself
        first = np.argpartition(orders, most - 1)[:most]
        first = first[np.argsort(orders[first], kind="stable")]
        first = first[[self._names[i] != name for i in first]]
        before = np.cumsum(self._lengths[first]) - self._lengths[first]
        return tuple(self._names[i] for i in first[before < room])


def tails(lengths: Sequence[int], room: int) -> list[int]:
    """Of neighbours with so many tokens each, the nearest first, how many of the last ones stand in `room` tokens."""
    found = []
    for length in lengths:
        found.append(min(length, room))
        room -= found[-1]
    return found


def _key(name: str) -> int:
    return int(name[:16], 16)


def _mixed(words: np.ndarray) -> np.ndarray:
    """Words, uint64 `[n]`, each of whose bits depends on all of what it was (splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
