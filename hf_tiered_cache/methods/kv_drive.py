"""KVDRIVE: at each token each head attends to the chunks that its query needs, out of all tiers (its paper)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ConfigError
from ..geometry import HASH_TOKENS, Geometry
from ..select import DECODE_INDEXES
from ..select.by_index import ByIndex
from ..select.selector import Selector
from ..tiers.window import WINDOW_POLICIES
from .base import Method
from .baselines import check_budget


@dataclass(frozen=True, kw_only=True)
class KVDrive(Method):
    """Each kv head attends to chunks of the prefix that an index ranks first for its queries, chosen at every token.

    Args:
        budget: share of the prefix's chunks that a head attends to, in (0, 1]. At 1 the output is the exact method's.
        chunk_tokens: consecutive tokens of a chunk: 1, 2, 4, 8 or 16.
        window: entries that each head keeps in device memory, in multiples of those that it attends to (Section 5.1).
        sinks: tokens in front that are attended to always, beside the budget.
        local: tokens at the end of the prefix, likewise.
        index: what chunks are ranked by, of `DECODE_INDEXES`: "clusters", of chunk means, is the paper's (Section 4),
            "cluster_boxes" ours, for keys that a mean hides.
        eviction: by which entries leave the window: "lookahead" (Section 5.1), "lru", or "none".
    """

    geometry: Geometry = field(init=False, default=Geometry())
    budget: float = field(default=0.0156, kw_only=False)
    chunk_tokens: int = 8
    window: float = 2
    sinks: int = 4
    local: int = 64
    index: str = "cluster_boxes"
    eviction: str = "lookahead"

    rechoose = 1

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if self.chunk_tokens not in (1, 2, 4, 8, 16):
            raise ConfigError(f"chunk_tokens is 1, 2, 4, 8 or {HASH_TOKENS}, not {self.chunk_tokens!r}")
        if self.index not in DECODE_INDEXES:
            raise ConfigError(f"index is one of {', '.join(DECODE_INDEXES)}, not {self.index!r}")
        if self.eviction not in WINDOW_POLICIES:
            raise ConfigError(f"eviction is one of {', '.join(WINDOW_POLICIES)}, not {self.eviction!r}")
        if not self.window >= 0 or min(self.sinks, self.local) < 0:
            raise ConfigError("window, sinks and local are not negative")
        object.__setattr__(self, "geometry", Geometry(self.chunk_tokens, 1, 1))
        super().__post_init__()

    def token_budget(self, prefix_tokens: int) -> int:
        return self._by_index.budgeted_tokens(self.budget, prefix_tokens) if self.selects else prefix_tokens

    @property
    def selects(self) -> bool:
        return self.budget < 1

    def selector(self) -> Selector:
        return self._by_index

    @property
    def _by_index(self) -> ByIndex:
        return ByIndex(
            kind=DECODE_INDEXES[self.index],
            chunk_tokens=self.chunk_tokens,
            sinks=self.sinks,
            local=self.local,
            window=self.window,
            eviction=self.eviction,
        )
