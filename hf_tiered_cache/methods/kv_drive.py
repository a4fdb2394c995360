"""KVDRIVE: at each token, each head attends to the chunks that its query needs, from all tiers (its paper)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, unknown_name
from ..selection import DECODE_INDEXES
from ..selection.held import WINDOW_POLICIES
from ..selection.window import ByIndex
from ..store.geometry import HASH_TOKENS, Geometry
from .base import BudgetMethod, is_count, is_number, require


@dataclass(frozen=True, kw_only=True)
class KVDrive(BudgetMethod):
    """KVDRIVE: at every token, each KV head attends to the prefix chunks that an index ranks first for its queries.

    Selected chunks, and recently selected ones in a window, are in device memory; others are fetched from the tiers.
    The hierarchical index, windows, and lookahead eviction are the paper's. Ours are the default index and the limit
    `exact_from`. `KVDrive.paper()` has the paper's settings.

    Args:
        budget: Share of the prefix's chunks that a head attends to, in (0, 1]. At 1 the output is that of `Exact`.
        quality: Loss that chooses the budget, in place of `budget`: see `BudgetMethod`.
        chunk_tokens: Consecutive tokens of a chunk: 1, 2, 4, 8 or 16.
        window: Number of chunks that each head keeps in device memory, in multiples of the selected chunks (Section
            5.1). With 1 a head keeps only the selected ones, and below 1 none. It only affects what is read, not the
            output.
        sinks: Number of leading tokens that are always attended to, in addition to the budget.
        local: Number of trailing tokens of the prefix that are always attended to, in addition to the budget.
        index: Index that ranks chunks, of `DECODE_INDEXES`: "clusters", of chunk means, is the paper's (Section 4);
            "cluster_boxes" is ours, for keys that a mean hides.
        eviction: Eviction policy of the window: "lookahead" (Section 5.1) or "lru".
        prefill_tokens: Number of tokens per piece of a longer prompt that is not stored. Each piece is stored before
            the next is computed, so that memory never holds the whole prompt. 0 computes it at once.
        exact_from: Minimum number of new prompt tokens that attend to the whole stored prefix, which is read once per
            layer. Fewer tokens attend to selected chunks, as decoded tokens do. With 1 the whole prefix is always used:
            the paper's prefill. 0: never.
        observed: Number of trailing tokens, of those that attend to the whole prefix, that select the first chunks for
            decoding (Section 7.1).
    """

    geometry: Geometry = field(init=False, default=Geometry())
    budget: float = field(default=0.0156, kw_only=False)
    chunk_tokens: int = 8
    window: float = 2.0
    sinks: int = 4
    local: int = 64
    index: str = "cluster_boxes"
    eviction: str = "lookahead"
    prefill_tokens: int = 4096
    exact_from: int = 256
    observed: int = 64

    reselect = True
    loss_ignores = BudgetMethod.loss_ignores | {"window", "eviction"}  # where chunks are kept

    def __post_init__(self) -> None:
        require(self.chunk_tokens in (1, 2, 4, 8, 16), "chunk_tokens", "1, 2, 4, 8 or 16", self.chunk_tokens)
        object.__setattr__(self, "geometry", Geometry(self.chunk_tokens, 1, 1))
        super().__post_init__()
        if self.index not in DECODE_INDEXES:
            raise ConfigError(unknown_name("index", self.index, DECODE_INDEXES))
        if self.eviction not in WINDOW_POLICIES:
            raise ConfigError(unknown_name("eviction policy", self.eviction, WINDOW_POLICIES))
        require(is_number(self.window, 0), "window", "a number of at least 0", self.window)
        for name in ("sinks", "local", "prefill_tokens", "exact_from", "observed"):
            value, least = getattr(self, name), int(name == "observed")
            require(is_count(value) and value >= least, name, f"a number of tokens, an int of at least {least}", value)
        pieces, step = self.prefill_tokens, HASH_TOKENS
        is_step = not pieces % step and (not pieces or pieces >= 4 * step)
        require(is_step, "prefill_tokens", f"0, or a multiple of {step} of at least {4 * step}", pieces)

    @classmethod
    def paper(cls, budget: float = 0.0156, **settings: Any) -> KVDrive:
        """Return the paper's settings: clusters of chunk means, and prompts that attend to all of their prefix."""
        published: dict[str, Any] = {"index": "clusters", "exact_from": 1}
        return cls(budget, **(published | settings))

    def token_budget(self, prefix_tokens: int) -> int:
        return self.selector().budgeted_tokens(self.budget, prefix_tokens)

    def selector(self) -> ByIndex:
        return ByIndex(
            kind=DECODE_INDEXES[self.index],
            chunk_tokens=self.chunk_tokens,
            sinks=self.sinks,
            local=self.local,
            window=self.window,
            eviction=self.eviction,
        )
