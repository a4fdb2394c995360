"""Eviction policies, and the scores by which blocks are evicted and tokens reordered.

A chunk's score is its importance and how often selectors chose it, in memory or not. A token's is its importance to
past queries. Policies score buffer slots by the usage of their blocks: `lru` and `lfu` are least recently and least
frequently used, `attention` keeps blocks that often get much attention (ContiguousKV, Section 4.4). To add an eviction
policy, add a subclass of `EvictionPolicy` and an entry to `POLICIES`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from ..errors import ConfigError, unknown_name
from ..store.shape import SegmentShape

Owner = tuple[str, int, int]
"""Segment id, KV cache group, and a checksum of its content.

Together with a chunk number this identifies a block. The checksum distinguishes contents stored under the same id at
different times."""

Attention = tuple[Owner, int, np.ndarray, np.ndarray, np.ndarray]
"""Attention to chosen chunks: owner, number of chunks of the KV cache group, the chosen chunks, attention to each, and
fraction of each chunk's tokens that was chosen."""

_MOST_OWNERS = 1 << 16
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Usage:
    """Usage of the blocks in some slots, as arrays of one length."""

    last_used: np.ndarray
    """Clock of the tier at the last use, int64. The clock ticks once per fetch and stays below 2^32."""
    uses: np.ndarray
    """Number of requests for the block since it was inserted, int64."""
    importance: np.ndarray
    """Importance of the chunk as computed by `learn` from selector reports, float64."""
    accesses: np.ndarray
    """Number of times that selectors chose the chunk, float64."""

    @classmethod
    def join(cls, usages: Sequence[Usage]) -> Usage:
        """Join usages in the given order."""
        if len(usages) == 1:
            return usages[0]
        names = (field.name for field in fields(cls))
        return cls(*(np.concatenate([getattr(usage, name) for usage in usages]) for name in names))


class EvictionPolicy(ABC):
    """Base class of eviction policies."""

    def learn(self, importance: np.ndarray, accesses: np.ndarray, mass: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Return the new importance of chunks that a selector chose. The default is the sum of the attention.

        Each chunk had an importance and a number of accesses before; in this selection it got attention (`mass`), and a
        `share` of its tokens was chosen.
        """
        return importance + mass

    @abstractmethod
    def score(self, usage: Usage) -> np.ndarray:
        """Return a score for each slot. The lowest scores are evicted first."""

    def victims(self, usage: Usage, count: int) -> np.ndarray:
        """Return the indices of the `count` slots with the lowest scores, lowest first.

        Ties are broken by least recent use, then index. The slots are selected, not sorted: a tier of 1 GiB may hold
        130,000 blocks, most of which have the same score.
        """
        score, last_used = self.score(usage), usage.last_used
        lowest = np.arange(len(score))
        if 0 < count < len(score):
            bound = np.partition(score, count - 1)[count - 1]
            lowest = np.flatnonzero(score <= bound)
            age = np.where(score[lowest] < bound, -1, last_used[lowest])  # lower scores first, however recently used
            lowest = lowest[age <= np.partition(age, count - 1)[count - 1]]
        return lowest[np.lexsort((lowest, last_used[lowest], score[lowest]))[:count]]

    def keeps(self, arriving: Usage, resident: Usage, free: int) -> np.ndarray:
        """Return a bool mask of the arriving blocks that the tier keeps, by the usage of the blocks.

        They arrive from disk or a faster tier. `free` slots are free, and `resident` are the blocks that the tier would
        evict for the others, in this order.
        """
        return np.ones(len(arriving.last_used), bool)


class LRU(EvictionPolicy):
    """Eviction of the least recently used blocks."""

    def score(self, usage: Usage) -> np.ndarray:
        return usage.last_used


class LFU(EvictionPolicy):
    """Eviction of the blocks with the fewest requests; ties are broken by least recent use."""

    def score(self, usage: Usage) -> np.ndarray:
        return (usage.uses << 32) + usage.last_used


class AttentionGuided(EvictionPolicy):
    """Eviction by the score S = I · F: the total attention to a block times how often it was selected.

    The blocks with the lowest scores are evicted first; ties are broken by least recent use. If no slot is free, a
    block that arrives from disk or from a faster tier is kept only if a block in the tier ranks lower.
    """

    def score(self, usage: Usage) -> np.ndarray:
        return usage.importance * usage.accesses

    def keeps(self, arriving: Usage, resident: Usage, free: int) -> np.ndarray:
        score, resident_score = self.score(arriving), self.score(resident)
        order = np.lexsort((arriving.last_used, score))[::-1]  # best first
        mask = np.zeros(len(order), bool)
        mask[order[:free]] = True
        rivals = order[free : free + len(resident_score)]
        is_newer = arriving.last_used[rivals] > resident.last_used
        mask[rivals] = (score[rivals] > resident_score) | ((score[rivals] == resident_score) & is_newer)
        return mask


class ImportanceGuided(AttentionGuided):
    """Attention-guided eviction with another importance I (IMPRESS, Section 4.3).

    I is a moving average of the selected share of a block's tokens, in place of the attention.
    """

    def learn(self, importance: np.ndarray, accesses: np.ndarray, mass: np.ndarray, share: np.ndarray) -> np.ndarray:
        return np.where(accesses == 0, share, 0.5 * importance + 0.5 * share)


POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "attention": AttentionGuided,
    "importance": ImportanceGuided,
}


def make_policy(name: str) -> EvictionPolicy:
    """Create the eviction policy called `name`. Raises ConfigError if there is none."""
    if name not in POLICIES:
        raise ConfigError(unknown_name("eviction policy", name, POLICIES))
    return POLICIES[name]()


class ScoreTable:
    """Importance I and accesses F of each chunk (ContiguousKV, Section 4.4), by segment and KV cache group.

    Scores survive eviction, so a reloaded block keeps its history.
    """

    def __init__(self, learn: Callable[..., np.ndarray]) -> None:
        self._learn = learn
        self._rows = OrderedDict[tuple[str, int], np.ndarray]()  # float64 [2, chunks]: importance, accesses
        self._changed: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def note(self, noted: Iterable[Attention]) -> list[tuple[Owner, np.ndarray, np.ndarray]]:
        """Record that chunks were chosen, and return for each KV cache group owner, chunks and new scores, see `of`."""
        changes = []
        with self._lock:
            for owner, count, chunks, mass, share in noted:
                name = owner[:2]
                row = self._rows.get(name)
                if row is None or row.shape[1] != count:  # new, or loaded from a damaged catalogue
                    row = self._rows[name] = np.zeros((2, count))
                self._rows.move_to_end(name)
                row[0, chunks] = self._learn(*row[:, chunks], mass, share)
                row[1, chunks] += 1
                self._changed.add(name)
                changes.append((owner, chunks, row[:, chunks]))
            while len(self._rows) > _MOST_OWNERS:
                self._changed.discard(self._rows.popitem(last=False)[0])
        return changes

    def of(self, owner: Owner, chunks: np.ndarray) -> np.ndarray:
        """Return importance and accesses of chunks, float64 `[2, len(chunks)]`; zeros if unknown."""
        with self._lock:
            row = self._rows.get(owner[:2])
            is_known = row is not None and chunks.max(initial=-1) < row.shape[1]
            return row[:, chunks] if row is not None and is_known else np.zeros((2, len(chunks)))

    def put(self, owner: Owner, scores: np.ndarray) -> None:
        """Replace the scores of all chunks of a KV cache group by `scores`, float64 `[2, chunks]`."""
        with self._lock:
            self._rows[owner[:2]] = scores
            self._changed.add(owner[:2])

    def forget(self, segments: Collection[str]) -> None:
        """Forget deleted segments."""
        with self._lock:
            for name in [name for name in self._rows if name[0] in segments]:
                del self._rows[name]
                self._changed.discard(name)

    def changes(self) -> list[tuple[str, int, bytes]]:
        """Return segment, KV cache group and scores, as float32 bytes, of each entry changed since the last call."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return [(*name, self._rows[name].astype("<f4").tobytes()) for name in changed]

    def load(self, rows: Iterable[tuple[str, int, bytes]]) -> None:
        """Load what `changes` returned in an earlier process. Existing entries are kept."""
        with self._lock:
            for segment, block_group, data in rows:
                if len(data) % 8 == 0:  # otherwise damaged
                    row = np.frombuffer(data, "<f4").astype(np.float64).reshape(2, -1)
                    self._rows.setdefault((segment, block_group), row)


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
        """Add the attention that queries paid to n tokens of a segment, given as a slice, at one layer.

        `mass` is float32 `[rows, n]`: one row for all KV heads, or one row per head.
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
            oldest, mass = self._mass.popitem(last=False)
            self._nbytes -= mass.nbytes
            self._prompts.pop(oldest, None)
            self._changed.discard(oldest)

    def prompt_done(self, segment: str, interval: int) -> bool:
        """Count a completed prompt that used the segment, and return whether the segment is due for reordering.

        It is due after `interval` prompts, and again after 2, 4, 8, ... times as many, so that a stable order is rarely
        rewritten.
        """
        with self._lock:
            count = self._prompts[segment] = self._prompts.get(segment, 0) + 1
            self._changed |= {segment} & self._mass.keys()
        times = count // interval
        return count % interval == 0 and times & (times - 1) == 0  # 1, 2, 4, ... times the interval

    def __contains__(self, segment: object) -> bool:
        return segment in self._mass

    def of(self, segment: str) -> np.ndarray | None:
        """Return the attention to the tokens of a segment, float32 `[layers, heads, tokens]`, or None if unknown."""
        with self._lock:
            mass = self._mass.get(segment)
            return None if mass is None else mass.copy()

    def forget(self, segments: Collection[str]) -> None:
        """Forget deleted segments."""
        with self._lock:
            for segment in self._mass.keys() & set(segments):
                self._nbytes -= self._mass.pop(segment).nbytes
            for segment in segments:
                self._prompts.pop(segment, None)
                self._changed.discard(segment)

    def rename(self, old_id: str, new_id: str) -> None:
        """Move the importance of the segment `old_id` to the id `new_id`."""
        with self._lock:
            if old_id in self._mass:
                self._mass[new_id] = self._mass.pop(old_id)
                self._changed.add(new_id)
            self._changed.discard(old_id)
            if old_id in self._prompts:
                self._prompts[new_id] = self._prompts.pop(old_id)

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
