"""The tokens that a cache holds KV of, row by row, and their links."""

from __future__ import annotations

import copy

import numpy as np
import torch

from ..geometry import LINK_TOKENS
from .chain import Chain


class History:
    """Token ids of every column of the cache. Row r begins with `pads[r]` columns of left padding.

    Ids stay on their device until somebody asks, so that decoding does not wait for a copy each step.
    """

    def __init__(self, chain: Chain, pads: list[int]) -> None:
        self.chain = chain
        self.pads = pads
        self.columns = 0
        self._ids = np.empty((len(pads), 0), np.int64)
        self._fresh: list[torch.Tensor] = []  # [rows, n] each, not yet in _ids
        self._links: list[list[bytes]] = [[] for _ in pads]

    @property
    def rows(self) -> int:
        return len(self.pads)

    def append(self, ids: torch.Tensor) -> None:
        """Note that the cache now holds `ids`, int `[rows, n]`, too."""
        self._fresh.append(ids)
        self.columns += ids.shape[1]

    def ids(self) -> np.ndarray:
        """int64 `[rows, columns]`."""
        if self._fresh:
            fresh = torch.cat([ids.to("cpu", torch.int64) for ids in self._fresh], dim=1).numpy()
            self._ids = np.concatenate([self._ids, fresh], axis=1)
            self._fresh.clear()
        return self._ids

    def links(self, row: int) -> list[bytes]:
        """The links of a row's tokens, without its padding and without a ragged end."""
        links, tokens = self._links[row], self.ids()[row, self.pads[row] :]
        if len(tokens) // LINK_TOKENS > len(links):
            parent = links[-1] if links else None
            links.extend(self.chain.links(tokens[len(links) * LINK_TOKENS :], parent))
        return links

    def links_with(self, row: int, more: np.ndarray) -> list[bytes]:
        """The links of a row's tokens followed by `more`, int `[n]` (whose padding, if any, is cut off)."""
        links = self.links(row)
        tokens = np.concatenate([self.ids()[row], more])[self.pads[row] :]
        parent = links[-1] if links else None
        return links + self.chain.links(tokens[len(links) * LINK_TOKENS :], parent)

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
        for row, links in enumerate(self._links):  # first: a Ctrl-C may leave too few, never links of other tokens
            del links[max(0, left - self.pads[row]) // LINK_TOKENS :]
        self._ids, self.columns = self.ids()[:, :left], left

    def select(self, order: list[int]) -> None:
        """Row i becomes what row `order[i]` was (beam search, repeats and subsets of a batch)."""
        links = [list(self._links[row]) for row in order]
        pads = [self.pads[row] for row in order]
        self._ids, self._links, self.pads = self.ids()[order], links, pads

    def fork(self) -> History:
        """A copy that goes its own way."""
        twin = copy.copy(self)
        twin._fresh = list(self._fresh)
        twin._links = [list(links) for links in self._links]
        twin.pads = list(self.pads)
        return twin
