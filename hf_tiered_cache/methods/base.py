"""Method interface: a dataclass that states how KV is cut, planned and restored, readable like a paper's overview."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from transformers import PreTrainedConfig

from ..errors import ConfigError
from ..layers import DenseSource, LayerTensors, SelectedSource
from ..passages.recompute import Asked
from ..restore.observe import CacheObserver, Later
from ..restore.plan import Columns, PlanContext, UnderWay
from ..selection.by_index import WindowSizes
from ..selection.prompt import PREFETCHED, Prefetched
from ..selection.selector import Selector
from ..store.codecs import RAW, coded_provenance
from ..store.format import EXACT
from ..store.geometry import Geometry
from ..store.shape import SegmentShape

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..conversations.sharing import LayerDistances
    from ..store.disk import SegmentStore
    from ..store.relayout import Admit, BlocksOf
    from ..store.segment import SegmentReader

_LARGE_MASK = 1 << 28
_LITTLE = 1 / 8


@dataclass(frozen=True, eq=False)
class IdleConversation:
    """Conversation that is being suspended, with the information needed to compact it.

    Args:
        disk: Store of its segments.
        readers: Readers of its segments, in order.
        blocks_of: Function that returns the blocks of a segment, from memory if they are there.
        admit: Function that puts blocks into memory.
        front: Function that returns the share of the conversation to recompute when it is restored. Its argument is the
            size of the stored KV, as a share of the unmerged size.
        attention: Distances between the layers' attention; None if it was not observed.
        initial_recent: `LayerDistances.initial_recent` of conversations of this model, including this one.
    """

    disk: SegmentStore
    readers: Sequence[SegmentReader]
    blocks_of: BlocksOf
    admit: Admit
    front: Callable[[float], float]
    attention: LayerDistances | None = None
    initial_recent: Sequence[np.ndarray] = ()


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base class of methods: how KV is cut into blocks and restored.

    Arguments are keyword-only, except the main share of a method that has one, which comes first: `ContiguousKV(0.1)`.

    Args:
        geometry: Geometry of new segments. Stored segments are read in any geometry.
        ahead_bytes: Maximum number of bytes that are prefetched ahead of the layers that need them. The default, 128
            MiB, keeps a fast disk busy and bounds the memory of a request. 0 fetches blocks when a layer needs them.
            Otherwise, methods that restore a whole prefix prefetch at least one KV cache group. If a part of the prefix
            is recomputed during loading, all its blocks are prefetched without this limit.
        codec: Encoding of tensors in blocks: "raw", or "int8" or "fp8", which take half the space of bfloat16 and are
            lossy. Only KV that was stored with this codec is restored. None uses the store's codec.
    """

    geometry: Geometry = field(default_factory=Geometry)
    ahead_bytes: int = 128 << 20
    codec: str | None = None

    policy = "lru"
    """Eviction policy that the method was published with: `KVStore(path, policy=method.policy)`."""

    reorder = False
    """True if segments are rewritten in the background, with their tokens ordered by observed importance."""

    reorder_every = 4
    """Number of prompts before the first reordering; the number doubles each time."""

    rechoose = False
    """True if each decoded token reselects what it attends to. If not, the selection for the prompt is kept."""

    prefill_tokens = 0
    """Number of tokens per piece of a longer prompt. Each piece is stored before the next is computed. 0 computes it at
    once."""

    exact_from = 0
    """Minimum number of computed prompt tokens that attend to their whole prefix, of which a part is then kept; 0 for
    never."""

    observed = 0
    """Number of trailing prompt tokens that select this part."""

    decline = False
    """True if a prompt is computed if restoring it was measured to be slower."""

    flat_front = False
    """True if the recomputed prefix is equally long in all layers, instead of shorter in later layers."""

    @property
    def front(self) -> float | Literal["auto"]:
        """Share of a stored prefix that is recomputed while the rest is loaded, or "auto" for the fastest share."""
        return 0.0

    def __post_init__(self) -> None:
        for option in fields(self):
            said = getattr(self, option.name)
            if option.type in ("bool", bool) and not isinstance(said, bool):
                raise ConfigError(f"{option.name} is True or False, not {said!r}")
        if self.geometry.pairs:
            raise ConfigError("pairs of layers are a segment's (see `join_segments`), and of no method's geometry")
        if self.codec is not None:
            object.__setattr__(self, "geometry", replace(self.geometry, codec=self.codec))

    @property
    def provenance(self) -> str:
        """Name of the way this method computes KV, stored with it. Exact look-ups find exact KV only."""
        return coded_provenance(EXACT, self.geometry.codec)

    @property
    def records_approximations(self) -> bool:
        """True if KV computed after approximate KV is stored, under a provenance that exact look-ups do not find."""
        return self.provenance != coded_provenance(EXACT, self.geometry.codec)

    def for_conversation(self, name: str) -> Method:
        """Return this method for one conversation. If its KV must not be shared, the provenance names the conversation.

        Args:
            name: Name of the conversation, 32 hexadecimal digits (see `conversation_name`).
        """
        return self

    def compact(self, idle: IdleConversation) -> str | None:
        """Write the segments of a suspended conversation as one segment, in the form in which it is to be restored.

        The old segments are kept, since the process may be killed at any moment.

        Returns:
            Id of the new segment, or None if the old ones remain as they are.
        """
        return None

    def coded(self, codec: str) -> Method:
        """Return this method with the store's codec, if it has none of its own."""
        settled = self.codec is not None or self.geometry.codec != RAW or codec == RAW
        return self if settled else replace(self, codec=codec)

    def positions_to_compute(self, context: PlanContext) -> tuple[Columns, ...]:
        """Return the padded positions that each layer computes; the others are restored. By default, the suffix.

        The number of positions never grows from layer to layer. Each layer computes the last `context.must_compute`
        positions and all positions from `context.restorable` on.
        """
        first = min(context.restorable, context.columns - context.must_compute)
        suffix = context.columns - first
        # a whole prompt needs no mask; the suffix x columns mask of a suffix costs more than a short prefix saves
        if context.base == 0 and first < _LITTLE * suffix and suffix * context.columns > _LARGE_MASK:
            first = 0
        return (np.arange(first, context.columns),) * context.layers

    def usable_hashes(self, shape: SegmentShape) -> int:
        """Return how many leading prefix hashes of a stored segment a plan of this method can use.

        By default, those of tokens that are complete in the segment. A method that selects tokens reads a layer's
        tokens from one KV cache group, so it cannot use segments with merged layers.
        """
        return 0 if self.selects and shape.geometry.pairs else shape.whole_hashes

    def token_budget(self, prefix_tokens: int) -> int:
        """Return how many of `prefix_tokens` restored tokens a full-attention layer attends to; all by default."""
        return prefix_tokens

    def streams(self, tokens: int) -> bool:
        """Return whether `tokens` computed prompt tokens attend to the whole prefix, of which the budget then stays."""
        return 0 < self.exact_from <= tokens

    @property
    def passages(self) -> str:
        """Provenance of the passages that are searched anywhere in a prompt; "" to restore prefixes only."""
        return ""

    def sink_token(self, config: PreTrainedConfig) -> int | None:
        """Return the token that precedes a passage while its KV is computed, or None."""
        return None

    @property
    def ranked_by(self) -> str:
        """Name of the ranking of a passage's tokens that the method uses; "" for none."""
        return ""

    @property
    def prefetches(self) -> Collection[Prefetched]:
        """Kinds of data that a method with a budget prefetches, within `ahead_bytes`."""
        return PREFETCHED

    @property
    def selects(self) -> bool:
        """True if full-attention layers attend to a part of what is restored."""
        return False

    def regardless(self) -> Method:
        """Return this method with the cost model ignored: stored KV is restored even if computing it is faster."""
        return self

    def misfit(self, geometry: Geometry) -> str:
        """Return why more is read of segments of a geometry than is attended to, and the remedy, or ""."""
        if not self.selects or replace(geometry, codec=self.geometry.codec) == self.geometry:
            return ""
        return (
            f"segments are stored in another geometry than {type(self).__name__} chooses by, so more of them is read "
            "than is attended to; store.relayout(method) lays them out anew"
        )

    def source(self, layer: int) -> DenseSource:
        """Return the cache layer that provides keys and values to a full-attention layer."""
        return SelectedSource(layer) if self.selects else DenseSource(layer)

    def with_calibrated_ratio(self, ratio: Callable[[], float | None]) -> Method:
        """Return this method with its "auto" settings replaced by measured values.

        Args:
            ratio: Function that returns the ratio measured on this machine, or None.
        """
        return self

    def with_measured_budget(self, measured: Callable[[Any], float | None]) -> Self:
        """Return this method with the budget that keeps its quality target, if it has one (see `BudgetMethod`).

        Args:
            measured: Function that returns, for a method with a target, the smallest budget that was measured to keep
                it, 1 if none did, or None without a measurement.
        """
        return self

    def with_profiled_windows(
        self, profiled: Callable[[str, float | None], tuple[float, WindowSizes] | None]
    ) -> Method:
        """Return this method with the window sizes of a profile.

        Args:
            profiled: Function of the profile's name and a window size in multiples, None for the fastest one. It
                returns the window size, and sizes per layer and KV head that take the same memory in total; or None
                without a profile.
        """
        return self

    def under_way(self, context: PlanContext) -> UnderWay | None:
        """Return the deferred parts of an inexact plan, or None if nothing is deferred."""
        return None

    def moved(self, stored: LayerTensors, computed: LayerTensors) -> torch.Tensor:
        """Return the deviation of computed from stored KV, `[batch, heads, n, dim]` each: float32 `[batch, n]`."""
        raise TypeError(f"{type(self).__name__} compares nothing")

    def go_on(
        self, under_way: UnderWay, layer: int, columns: Columns, moved: np.ndarray, attention: Asked | None
    ) -> Columns:
        """Return the positions that are computed from one of the `compare_layers` on.

        Args:
            under_way: Deferred plan.
            layer: Layer that compares.
            columns: Positions computed so far, n per row.
            moved: KV deviation of these positions, float `[rows, n]`; undefined where nothing is stored.
            attention: Attention of each row's query probe in the layers so far, or None if it is not available.
        """
        raise TypeError(f"{type(self).__name__} compares nothing")

    def observer(self, later: Later | None) -> CacheObserver | None:
        """Return an observer of the queries of a cache's passes, for the lifetime of the cache; None by default.

        Args:
            later: Function that runs a task after the requests; None if that would take the processor from the model.
        """
        return None

    def selector(self) -> Selector:
        """Return the selector of the tokens to attend to. Raises TypeError if the method attends to all."""
        raise TypeError(f"{type(self).__name__} attends to everything it restores")
