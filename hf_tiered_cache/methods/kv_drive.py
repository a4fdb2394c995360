"""KVDRIVE: at each token each head attends to the chunks that its query needs, out of all tiers (its paper)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError
from ..geometry import HASH_TOKENS, Geometry
from ..select import DECODE_INDEXES
from ..select.by_index import ByIndex, WindowSizes
from ..select.selector import Selector
from ..tiers.window import WINDOW_POLICIES
from .budget import BudgetMethod

if TYPE_CHECKING:
    from typing_extensions import Self

_UNPROFILED = 2.0
"""The window of the paper's default, in multiples of what a head attends to."""


@dataclass(frozen=True, kw_only=True)
class KVDrive(BudgetMethod):
    """Each kv head attends to chunks of the prefix that an index ranks first for its queries, chosen at every token.

    Args:
        budget: share of the prefix's chunks that a head attends to, in (0, 1]. At 1 the output is the exact method's.
        quality: see `BudgetMethod`.
        chunk_tokens: consecutive tokens of a chunk: 1, 2, 4, 8 or 16.
        window: entries that each head keeps in device memory, in multiples of those that it attends to (Section 5.1); a
            mean over all heads, where these differ. "auto": the size at which tokens came quickest when windows were
            profiled (see `window_sizes`), and 2 where they were not.
        window_sizes: "profiled": each layer and head has a window of its own (Section 5.2), as
            `KVStore.profile_windows`, or `hf-tiered-cache profile`, has found for this model, `index`, `budget`,
            `chunk_tokens` and `eviction`; what all take together is `window`. Where nothing was found all have the
            same, as they have with "uniform". Or the sizes themselves: of each layer of the model those of its kv
            heads. Only what is read depends on them.
        sinks: tokens in front that are attended to always, beside the budget.
        local: tokens at the end of the prefix, likewise.
        index: what chunks are ranked by, of `DECODE_INDEXES`: "clusters", of chunk means, is the paper's (Section 4),
            "cluster_boxes" ours, for keys that a mean hides.
        eviction: by which entries leave the window: "lookahead" (Section 5.1), "lru", or "none".
        prefill_tokens: a longer prompt that is not stored is computed in pieces of so many tokens, which go to the
            store one after the other, so that memory never holds all of it; 0 computes it at once.
        exact_from: so many new tokens of a prompt, or more, attend to all of the stored prefix, which is read once for
            each layer (with 1 all do: the paper's prefill); fewer attend, as decoded ones do, to chunks that are chosen
            for them. 0: none do.
        observed: of tokens that attend to all of it, the last so many choose what decoding begins with (Section 7.1).
        ahead: layers with full attention between a layer and the hidden states that its queries are predicted from
            while decoding, so that blocks are on their way before it asks, as far as the store's memory has room. It
            changes nothing but the time: layers wait less, and the CPU does more (`bench/lookahead.py`). 0: never.
            (Beyond the paper; the idea is InfiniGen's, Lee et al., OSDI 2024.)
        choose_ahead: whether the predicted queries choose, and the layer's own do not, as in InfiniGen: a baseline.
    """

    geometry: Geometry = field(init=False, default=Geometry())
    budget: float = field(default=0.0156, kw_only=False)
    chunk_tokens: int = 8
    window: float | Literal["auto"] = "auto"
    window_sizes: Literal["profiled", "uniform"] | WindowSizes = "profiled"
    sinks: int = 4
    local: int = 64
    index: str = "cluster_boxes"
    eviction: str = "lookahead"
    prefill_tokens: int = 4096
    exact_from: int = 256
    observed: int = 64
    ahead: int = 0
    choose_ahead: bool = False

    rechoose = True

    def __post_init__(self) -> None:
        if self.chunk_tokens not in (1, 2, 4, 8, 16):
            raise ConfigError(f"chunk_tokens is 1, 2, 4, 8 or {HASH_TOKENS}, not {self.chunk_tokens!r}")
        object.__setattr__(self, "geometry", Geometry(self.chunk_tokens, 1, 1))
        super().__post_init__()
        if self.index not in DECODE_INDEXES:
            raise ConfigError(f"index is one of {', '.join(DECODE_INDEXES)}, not {self.index!r}")
        if self.eviction not in WINDOW_POLICIES:
            raise ConfigError(f"eviction is one of {', '.join(WINDOW_POLICIES)}, not {self.eviction!r}")
        if not isinstance(self.window_sizes, str):
            object.__setattr__(self, "window_sizes", tuple(map(tuple, self.window_sizes)))
            if any(not size >= 0 for sizes in self.window_sizes for size in sizes):
                raise ConfigError("window_sizes are not negative")
        elif self.window_sizes not in ("profiled", "uniform"):
            raise ConfigError(f'window_sizes is "profiled", "uniform" or numbers, not {self.window_sizes!r}')
        if isinstance(self.window, str) and self.window != "auto":
            raise ConfigError(f'window is "auto" or a number, not {self.window!r}')
        if not self.window_multiple >= 0 or min(self.sinks, self.local, self.prefill_tokens, self.exact_from) < 0:
            raise ConfigError("window, sinks, local, prefill_tokens and exact_from are not negative")
        if self.observed < 1:
            raise ConfigError(f"observed is at least 1, not {self.observed}")
        if self.prefill_tokens % HASH_TOKENS or 0 < self.prefill_tokens < 4 * HASH_TOKENS:
            raise ConfigError(f"prefill_tokens is 0, or 64 or more and a multiple of 16, not {self.prefill_tokens}")
        if self.ahead < int(self.choose_ahead):
            raise ConfigError("ahead is not negative, and at least 1 to choose by")

    @classmethod
    def paper(cls, budget: float = 0.0156, **settings: Any) -> KVDrive:
        """As published: clusters of chunk means, and prompts that attend to all of what is stored before them."""
        published: dict[str, Any] = {"index": "clusters", "exact_from": 1}
        return cls(budget, **(published | settings))

    def token_budget(self, prefix_tokens: int) -> int:
        return self._by_index.budgeted_tokens(self.budget, prefix_tokens) if self.selects else prefix_tokens

    @property
    def as_measured(self) -> Self:
        cls = type(self)  # windows decide where chunks lie, not which are attended to
        window, sizes, eviction = cls.window, cls.window_sizes, cls.eviction
        return replace(super().as_measured, window=window, window_sizes=sizes, eviction=eviction)

    def selector(self) -> Selector:
        return self._by_index

    @property
    def profile_name(self) -> str:
        """What its choices depend on: a profile of windows holds for all methods of this name."""
        return f"{self.index} {self.budget:g} {self.chunk_tokens} {self.eviction}"

    @property
    def window_multiple(self) -> float:
        """`window` as a number."""
        return _UNPROFILED if isinstance(self.window, str) else self.window

    def with_profiled_windows(
        self, profiled: Callable[[str, float | None], tuple[float, WindowSizes] | None]
    ) -> KVDrive:
        by_head, size = self.window_sizes == "profiled", None if isinstance(self.window, str) else self.window
        if self.eviction == "none" or (size is not None and not by_head):
            return self
        if (found := profiled(self.profile_name, size)) is None:
            return self
        return replace(self, window=found[0], window_sizes=found[1] if by_head else self.window_sizes)

    @property
    def _by_index(self) -> ByIndex:
        return ByIndex(
            kind=DECODE_INDEXES[self.index],
            chunk_tokens=self.chunk_tokens,
            sinks=self.sinks,
            local=self.local,
            window=self.window_multiple,
            eviction=self.eviction,
            window_sizes=() if isinstance(self.window_sizes, str) else self.window_sizes,
            ahead=self.ahead,
            choose_ahead=self.choose_ahead,
        )
