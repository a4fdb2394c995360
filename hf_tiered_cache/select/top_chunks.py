"""ContiguousKV's selection (Section 4.2): whole chunks, by the attention of queries in all heads, or in each head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from ..transfers import to_host
from .all_keys import Int8KeysIndex, KeysIndex
from .chunks import tokens_of_mass, top_chunks
from .decode_index import DecodeIndex
from .mass import head_mass
from .selector import Selection, SelectionInput, Selector


@dataclass(frozen=True)
class TopChunks(Selector):
    """Selector of the chunks with the most attention.

    Args:
        heads: Number of KV heads whose attention counts, each with the query heads it serves; None for all.
        resident: Whether to use an index of the int8 keys of all heads, which stays in memory.
        queries: Number of trailing queries that select; 0 for all.
        mass: Share of the total attention to restored tokens that the selected chunks of a row of a batch must hold. No
            more chunks are taken, unless another row needs more. None takes as many as requested.
        gain: Share of a decoded token's attention by which a new selection must exceed the last one to replace it.
        per_head: Whether each KV head selects for itself; if not, one selection serves all.
    """

    heads: int | None = None
    resident: bool = False
    queries: int = 0
    mass: float | None = None
    gain: float = 0.0
    per_head: bool = False

    @property
    def index(self) -> tuple[type[DecodeIndex], int] | None:
        return (Int8KeysIndex, 1) if self.resident else None

    @property
    def probe_heads(self) -> int | None:
        return self.heads

    def choose(self, asked: SelectionInput) -> Selection:
        keys = _joined(asked.indexes(), asked.query.dtype) if self.resident else asked.keys(self.heads)
        served = asked.query.shape[0] // asked.own_keys.shape[0]  # query heads of one kv head
        query = asked.query[: len(keys) * served, -self.queries :]
        mass = head_mass(query, keys, asked.own_keys[: len(keys)], asked.scaling)  # [kv_heads, tokens]
        (known,) = to_host(mass if self.per_head else mass.mean(0, keepdim=True))
        return Selection(top_chunks(known, asked.chunks, asked.count), known)

    def choose_again(self, asked: SelectionInput, held: np.ndarray) -> np.ndarray:
        choice = self.choose(asked)
        if not self.gain:
            return choice.tokens
        now, before = (np.take_along_axis(choice.mass, tokens, 1).sum(1) for tokens in (choice.tokens, held))
        stays = now - before < self.gain  # bool [sets]
        return np.where(stays[:, None], np.sort(held, axis=1), choice.tokens)

    def choose_rows(self, asked: Iterable[SelectionInput]) -> Iterator[Selection]:
        if self.mass is None:
            yield from super().choose_rows(asked)
            return
        chosen = [(one, self.choose(one)) for one in asked]
        most = max(tokens_of_mass(choice.mass, one.chunks, self.mass) for one, choice in chosen)
        for one, choice in chosen:
            yield replace(choice, tokens=top_chunks(choice.mass, one.chunks, min(most, one.count)))


def _joined(indexes: Sequence[DecodeIndex], dtype: torch.dtype) -> torch.Tensor:
    """Return the keys of all indexes, `[kv_heads, tokens, dim]`."""
    each = [cast(KeysIndex, index).keys_as(dtype) for index in indexes]
    return each[0] if len(each) == 1 else torch.cat(each, 1)
