"""KVDRIVE: at each token, each head attends to the chunks that its query needs, from all tiers (its paper)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError, unknown_name, with_type
from ..selection import DECODE_INDEXES
from ..selection.selector import Selector
from ..selection.window import ByIndex, WindowSizes
from ..selection.window_slots import WINDOW_POLICIES
from ..store.geometry import HASH_TOKENS, Geometry
from .budget import BudgetMethod

if TYPE_CHECKING:
    from typing_extensions import Self

_UNPROFILED = 2.0
"""Window size without a profile, the paper's default, in multiples of the selected chunks."""


@dataclass(frozen=True, kw_only=True)
class KVDrive(BudgetMethod):
    """KVDRIVE: at every token, each KV head attends to the prefix chunks that an index ranks first for its queries.

    Selected chunks, and recently selected ones in a window, are in device memory; others are fetched from the tiers.
    The hierarchical index, windows with a size per head, and lookahead eviction are the paper's. Ours are the default
    index and the limit `exact_from`. `KVDrive.paper()` has the paper's settings.

    Args:
        budget: Share of the prefix's chunks that a head attends to, in (0, 1]. At 1 the output is that of `Exact`.
        quality: See `BudgetMethod`.
        chunk_tokens: Consecutive tokens of a chunk: 1, 2, 4, 8 or 16.
        window: Number of chunks that each head keeps in device memory, in multiples of the selected chunks (Section
            5.1); the mean over all heads if their sizes differ. "auto" is the size with the fastest tokens when windows
            were profiled (see `window_sizes`), or 2 without a profile.
        window_sizes: "profiled" gives each layer and head its own window size (Section 5.2), as measured by
            `KVStore.profile_windows` or `hf-tiered-cache profile` for this model, `index`, `budget`, `chunk_tokens` and
            `eviction`; their total is that of `window`. "uniform", or no profile, gives all heads the same size. Or the
            sizes of the KV heads of each layer. Sizes only affect what is read, not the output.
        sinks: Number of leading tokens that are always attended to, in addition to the budget.
        local: Number of trailing tokens of the prefix that are always attended to, in addition to the budget.
        index: Index that ranks chunks, of `DECODE_INDEXES`: "clusters", of chunk means, is the paper's (Section 4);
            "cluster_boxes" is ours, for keys that a mean hides.
        eviction: Eviction policy of the window: "lookahead" (Section 5.1), "lru", or "none", which keeps only the
            selected chunks.
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
    window: float | Literal["auto"] = "auto"
    window_sizes: Literal["profiled", "uniform"] | WindowSizes = "profiled"
    sinks: int = 4
    local: int = 64
    index: str = "cluster_boxes"
    eviction: str = "lookahead"
    prefill_tokens: int = 4096
    exact_from: int = 256
    observed: int = 64

    reselect = True
    loss_ignores = BudgetMethod.loss_ignores | {"window", "window_sizes", "eviction"}  # where chunks are kept

    def __post_init__(self) -> None:
        if self.chunk_tokens not in (1, 2, 4, 8, 16):
            raise ConfigError(f"chunk_tokens must be 1, 2, 4, 8 or {HASH_TOKENS}, not {with_type(self.chunk_tokens)}")
        object.__setattr__(self, "geometry", Geometry(self.chunk_tokens, 1, 1))
        super().__post_init__()
        if self.index not in DECODE_INDEXES:
            raise ConfigError(unknown_name("index", self.index, DECODE_INDEXES))
        if self.eviction not in WINDOW_POLICIES:
            raise ConfigError(unknown_name("eviction policy", self.eviction, WINDOW_POLICIES))
        if not isinstance(self.window_sizes, str):
            object.__setattr__(self, "window_sizes", tuple(map(tuple, self.window_sizes)))
            if any(not size >= 0 for sizes in self.window_sizes for size in sizes):
                raise ConfigError("window_sizes must not be negative")
        elif self.window_sizes not in ("profiled", "uniform"):
            raise ConfigError(
                f'window_sizes must be "profiled", "uniform" or numbers, not {with_type(self.window_sizes)}'
            )
        if isinstance(self.window, str) and self.window != "auto":
            raise ConfigError(f'window must be "auto" or a number, not {with_type(self.window)}')
        if not self.window_multiple >= 0 or min(self.sinks, self.local, self.prefill_tokens, self.exact_from) < 0:
            raise ConfigError("window, sinks, local, prefill_tokens and exact_from must not be negative")
        if self.observed < 1:
            raise ConfigError(f"observed must be at least 1, not {self.observed}")
        if self.prefill_tokens % HASH_TOKENS or 0 < self.prefill_tokens < 4 * HASH_TOKENS:
            raise ConfigError(
                f"prefill_tokens must be 0, or a multiple of 16 of at least 64, not {self.prefill_tokens}"
            )

    @classmethod
    def paper(cls, budget: float = 0.0156, **settings: Any) -> KVDrive:
        """Return the paper's settings: clusters of chunk means, and prompts that attend to all of their prefix."""
        published: dict[str, Any] = {"index": "clusters", "exact_from": 1}
        return cls(budget, **(published | settings))

    def token_budget(self, prefix_tokens: int) -> int:
        return self._by_index.budgeted_tokens(self.budget, prefix_tokens) if self.selects else prefix_tokens

    def selector(self) -> Selector:
        return self._by_index

    @property
    def profile_name(self) -> str:
        """Settings that selections depend on. A window profile is valid for all methods with the same name."""
        return f"{self.index} {self.budget:g} {self.chunk_tokens} {self.eviction}"

    @property
    def window_multiple(self) -> float:
        """Number for `window`; 2 for "auto"."""
        return _UNPROFILED if isinstance(self.window, str) else self.window

    def with_profiled_windows(self, profiled: Callable[[str, float | None], tuple[float, WindowSizes] | None]) -> Self:
        """Return this method with the window sizes of a profile.

        Args:
            profiled: Function of the profile's name and a window size in multiples, None for the fastest one. It
                returns the window size, and sizes per layer and KV head that take the same memory in total; or None
                without a profile.
        """
        by_head, size = self.window_sizes == "profiled", None if isinstance(self.window, str) else self.window
        if self.eviction == "none" or (size is not None and not by_head):
            return self
        if (profile := profiled(self.profile_name, size)) is None:
            return self
        return replace(self, window=profile[0], window_sizes=profile[1] if by_head else self.window_sizes)

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
        )
