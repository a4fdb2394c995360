"""The tokens that a cache holds KV of, row by row, and their prefix hashes."""

from __future__ import annotations

import copy

import numpy as np
import torch

from ..geometry import HASH_TOKENS
from .prefix_hasher import PrefixHasher


class History:
    """Token ids of every column of the cache. Row r begins with `pads[r]` columns of left padding.

    Ids stay on their device until somebody asks, so that decoding does not wait for a copy each step.
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

    def append(self, ids: torch.Tensor | np.ndarray) -> None:
        """Note that the cache now holds `ids`, int `[rows, n]`, too. A tensor is read when it is asked for."""
        self._fresh.append(ids)
        self.columns += ids.shape[1]

    def ids(self) -> np.ndarray:
        """int64 `[rows, columns]`."""
        if self._fresh:
            fresh = [ids if isinstance(ids, np.ndarray) else ids.to("cpu", torch.int64).numpy() for ids in self._fresh]
            self._ids = np.concatenate([self._ids, *fresh], axis=1)
            self._fresh.clear()
        return self._ids

    def prefix_hashes(self, row: int) -> list[bytes]:
        """The prefix hashes of a row's tokens, without its padding and without a ragged end."""
        prefix_hashes, tokens = self._prefix_hashes[row], self.ids()[row, self.pads[row] :]
        if len(tokens) // HASH_TOKENS > len(prefix_hashes):
            parent = prefix_hashes[-1] if prefix_hashes else None
            prefix_hashes.extend(self.hasher.hashes(tokens[len(prefix_hashes) * HASH_TOKENS :], parent))
        return prefix_hashes

    def prefix_hashes_with(self, row: int, more: np.ndarray) -> list[bytes]:
        """The prefix hashes of a row's tokens followed by `more`, int `[n]` (whose padding, if any, is cut off)."""
        prefix_hashes = self.prefix_hashes(row)
        tokens = np.concatenate([self.ids()[row], more])[self.pads[row] :]
        parent = prefix_hashes[-1] if prefix_hashes else None
        return prefix_hashes + self.hasher.hashes(tokens[len(prefix_hashes) * HASH_TOKENS :], parent)

    def common_columns(self, prompt: np.ndarray) -> int:
        """How many columns this and a batch of prompts, int64 `[rows, n]`, have in common from the first one on."""
        held = self.ids()
        if len(held) != len(prompt):
            return 0
        columns = min(self.columns, prompt.shape[1])
        differ = (held[:, :columns] != prompt[:, :columns]).any(axis=0)
        return int(differ.argmax()) if differ.any() else columns

    def crop(self, columns: int) -> None:
        """Forget the last `columns` columns."""
        left = self.columns - columns
        # first: a Ctrl-C may leave too few, never those of other tokens
        for row, prefix_hashes in enumerate(self._prefix_hashes):
            del prefix_hashes[max(0, left - self.pads[row]) // HASH_TOKENS :]
        self._ids, self.columns = self.ids()[:, :left], left

    def select(self, order: list[int]) -> None:
        """Row i becomes what row `order[i]` was (beam search, repeats and subsets of a batch)."""
        prefix_hashes = [list(self._prefix_hashes[row]) for row in order]
        pads = [self.pads[row] for row in order]
        self._ids, self._prefix_hashes, self.pads = self.ids()[order], prefix_hashes, pads

    def fork(self) -> History:
        """A copy that goes its own way."""
        twin = copy.copy(self)
        twin._fresh = list(self._fresh)
        twin._prefix_hashes = [list(prefix_hashes) for prefix_hashes in self._prefix_hashes]
        twin.pads = list(self.pads)
        return twin
