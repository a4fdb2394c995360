"""ContiguousKV's choice (Section 4.2): whole chunks, by the attention of all queries in all heads."""

from __future__ import annotations

from dataclasses import dataclass

from ..transfers import to_host
from .chunks import top_chunks
from .mass import attention_mass
from .selector import Selection, SelectionInput, Selector


@dataclass(frozen=True)
class TopChunks(Selector):
    """The chunks that get most attention, the same for all heads.

    Args:
        heads: how many of the kv heads are asked, each with the query heads it serves; None for all.
    """

    heads: int | None = None

    @property
    def probe_heads(self) -> int | None:
        return self.heads

    def choose(self, asked: SelectionInput) -> Selection:
        keys = asked.keys(self.heads)
        served = asked.query.shape[0] // asked.own_keys.shape[0]  # query heads of one kv head
        mass = attention_mass(asked.query[: len(keys) * served], keys, asked.own_keys[: len(keys)], asked.scaling)
        chosen, known = to_host(top_chunks(mass, asked.chunks, asked.count), mass)
        return Selection(chosen[None], known)
