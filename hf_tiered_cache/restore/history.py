"""Token ids for which a cache holds KV, row by row, and their prefix hashes."""

from __future__ import annotations

import copy

import numpy as np
import torch

from ..geometry import HASH_TOKENS
from .prefix_hasher import PrefixHasher


class History:
    """Token ids of every position of the cache. Row r begins with `pads[r]` positions of left padding.

    Ids are copied to the host on first use, so that decoding does not wait for a copy at each step.
    """

    def __init__(self, hasher: PrefixHasher, pads: list[int]) -> None:
        self.hasher = hasher
        self.pads = pads
        self.columns = 0
        self._ids = np.empty((len(pads), 0), np.int64)
        self._fresh: list[torch.Tensor | np.ndarray] = []  # [rows, n] each, not yet in _ids
        self._prefix_hashes: list[list[bytes]] = [[] for _ in pads]

    @property
    def rows(self) -> int:
        return len(self.pads)

    def tokens_in(self, columns: int) -> int:
        """Return the number of tokens of all rows in the first `columns` positions, without left padding."""
        return sum(max(0, columns - pad) for pad in self.pads)

    def append(self, ids: torch.Tensor | np.ndarray) -> None:
        """Append `ids`, int `[rows, n]`, that the cache now holds. A tensor is copied to the host on first use."""
        self._fresh.append(ids)
        self.columns += ids.shape[1]

    def ids(self) -> np.ndarray:
        """Return all token ids, int64 `[rows, columns]`, on the host."""
        if self._fresh:
            fresh = [ids if isinstance(ids, np.ndarray) else ids.to("cpu", torch.int64).numpy() for ids in self._fresh]
            self._ids = np.concatenate([self._ids, *fresh], axis=1)
            self._fresh.clear()
        return self._ids

    def prefix_hashes(self, row: int) -> list[bytes]:
        """Return the prefix hashes of a row's tokens without padding. An incomplete last group has no hash."""
        prefix_hashes, tokens = self._prefix_hashes[row], self.ids()[row, self.pads[row] :]
        if len(tokens) // HASH_TOKENS > len(prefix_hashes):
            parent = prefix_hashes[-1] if prefix_hashes else None
            prefix_hashes.extend(self.hasher.hashes(tokens[len(prefix_hashes) * HASH_TOKENS :], parent))
        return prefix_hashes

    def prefix_hashes_with(self, row: int, more: np.ndarray) -> list[bytes]:
        """Return the prefix hashes of a row's tokens followed by `more`, int `[n]`, with left padding removed."""
        prefix_hashes = self.prefix_hashes(row)
        tokens = np.concatenate([self.ids()[row], more])[self.pads[row] :]
        parent = prefix_hashes[-1] if prefix_hashes else None
        return prefix_hashes + self.hasher.hashes(tokens[len(prefix_hashes) * HASH_TOKENS :], parent)

    def common_columns(self, prompt: np.ndarray) -> int:
        """Return the number of leading positions shared with a batch of prompts, int64 `[rows, n]`."""
        held = self.ids()
        if len(held) != len(prompt):
            return 0
        columns = min(self.columns, prompt.shape[1])
        differ = (held[:, :columns] != prompt[:, :columns]).any(axis=0)
        return int(differ.argmax()) if differ.any() else columns

    def crop(self, columns: int) -> None:
        """Remove the last `columns` positions."""
        left = self.columns - columns
        # hashes first: a Ctrl-C may leave too few hashes, but never hashes of other tokens
        for row, prefix_hashes in enumerate(self._prefix_hashes):
            del prefix_hashes[max(0, left - self.pads[row]) // HASH_TOKENS :]
        self._ids, self.columns = self.ids()[:, :left], left

    def select(self, order: list[int]) -> None:
        """Replace row i by the former row `order[i]` (beam search, repeats and subsets of a batch)."""
        prefix_hashes = [list(self._prefix_hashes[row]) for row in order]
        pads = [self.pads[row] for row in order]
        self._ids, self._prefix_hashes, self.pads = self.ids()[order], prefix_hashes, pads

    def fork(self) -> History:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._fresh = list(self._fresh)
        twin._prefix_hashes = [list(prefix_hashes) for prefix_hashes in self._prefix_hashes]
        twin.pads = list(self.pads)
        return twin
