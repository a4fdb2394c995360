"""IMPRESS's selection (Section 4.1): by a few probe heads, and for all heads if the probe heads agree."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ..transfers import to_host
from .mass import head_mass, top_of_each
from .selector import Selection, SelectionInput, Selector


@dataclass(frozen=True)
class ProbeHeads(Selector):
    """Selector of single tokens: by the first KV heads if their selections are similar enough, else by each head.

    Args:
        heads: Number of probe KV heads, each with the query heads it serves.
        alpha: Exponent of the required similarity: the mean Jaccard index of two probes' selections must be at least
            `j ** alpha`, where j is that of two random sets of their size.
    """

    heads: int = 3
    alpha: float = 0.6

    @property
    def probe_heads(self) -> int:
        return self.heads

    def choose(self, asked: SelectionInput) -> Selection:
        probes = asked.keys(self.heads)
        served = asked.query.shape[0] // asked.own_keys.shape[0]
        own = asked.own_keys[: len(probes)]
        mass = head_mass(asked.query[: len(probes) * served], probes, own, asked.scaling)  # [probes, tokens]
        sets, summed = to_host(top_of_each(mass, asked.count), mass.sum(0))
        if self.agree(sets, asked.chunks.tokens):
            votes = np.zeros(asked.chunks.tokens, np.int64)
            np.add.at(votes, sets.ravel(), 1)
            best = np.lexsort((-summed, -votes))[: asked.count]  # by votes, ties by total mass
            return Selection(np.sort(best)[None], summed[None] / len(probes))
        mass = head_mass(asked.query, asked.keys(None), asked.own_keys, asked.scaling)
        return Selection(*to_host(top_of_each(mass, asked.count), mass.mean(0, keepdim=True)))

    def agree(self, sets: np.ndarray, tokens: int) -> bool:
        """Return whether the probes' selections among `tokens`, int64 `[probes, count]`, are similar enough."""
        return mean_jaccard(sets) >= jaccard_threshold(sets.shape[1], tokens, self.alpha)


def mean_jaccard(sets: np.ndarray) -> float:
    """Return the mean Jaccard index of all pairs of rows of `[rows, count]`, sets of numbers; 1 for a single row."""
    found = []
    for a, b in combinations(sets, 2):
        shared = len(np.intersect1d(a, b, assume_unique=True))
        found.append(shared / (len(a) + len(b) - shared))
    return float(np.mean(found)) if found else 1.0


def jaccard_threshold(count: int, tokens: int, alpha: float) -> float:
    """Return j ** alpha, where j is the Jaccard index of two random sets of `count` out of `tokens`.

    j = r / (2 - r) with r = count / tokens.
    """
    ratio = count / tokens
    return (ratio / (2 - ratio)) ** alpha
