"""The method interface: a choice of parts, as a dataclass that reads like the overview of a paper."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from transformers import PreTrainedConfig

from ..codecs import RAW, coded_provenance
from ..errors import ConfigError
from ..geometry import Geometry
from ..restore.asking import Asked
from ..restore.columns import Columns
from ..restore.observe import CacheObserver, Later
from ..restore.plan import PlanContext, UnderWay
from ..restore.selective import PREFETCHED, Prefetched
from ..select.by_index import WindowSizes
from ..select.selector import Selector
from ..shape import SegmentShape
from ..sources import DenseSource, LayerTensors, SelectedSource
from ..store.format import EXACT

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..select.sharing import LayerDistances
    from ..store.disk import SegmentStore
    from ..store.merging import Admit
    from ..store.relayout import BlocksOf
    from ..store.segment import SegmentReader

_LARGE_MASK = 1 << 28
_LITTLE = 1 / 8


@dataclass(frozen=True, eq=False)
class IdleConversation:
    """A conversation that goes idle, and what is known of it.

    Args:
        disk: where its segments lie.
        readers: of these, in order.
        blocks_of: gives their blocks, from memory as far as they lie there.
        admit: puts blocks in memory.
        front: gives the share of it to compute when it comes back, if its KV takes a share of what it does unmerged.
        attention: how alike the layers' attention was; None if nobody has watched it.
        initial_recent: for conversations of this model, this one among them, `LayerDistances.initial_recent`.
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
    """How KV is cut and restored.

    Arguments are given by name, but for the share of a method that has one, which comes first: `ContiguousKV(0.1)`.

    Args:
        geometry: how new segments are cut. Stored ones are read in whatever geometry they have.
        ahead_bytes: how far blocks are fetched ahead of the layers that need them: enough to keep a fast disk busy,
            little enough to bound what a request takes. 0 fetches them when they are needed. Who restores a whole
            prefix runs at least one block group ahead. Where a front is computed beside loading, all are fetched
            without a pause.
        codec: what stands between tensors and the bytes of blocks: "raw", or "int8" or "fp8", which halve what bfloat16
            takes and lose bits. It restores what was stored with this codec, and nothing else. None: the store's.
    """

    geometry: Geometry = field(default_factory=Geometry)
    ahead_bytes: int = 128 << 20
    codec: str | None = None

    policy = "lru"
    """The eviction policy it was published with: `KVStore(path, policy=method.policy)`."""

    reorder = False
    """Whether segments are laid out by how important their tokens turn out to be, in the background."""

    reorder_every = 4
    """Prompts before the first time; then twice as many, and so on."""

    rechoose = False
    """Whether each decoded token chooses what is attended to again; if not, the prompt's choice stays."""

    prefill_tokens = 0
    """A longer prompt is computed in pieces of so many tokens, each stored before the next; 0: at once."""

    exact_from = 0
    """So many computed tokens of a prompt, or more, attend to all of its prefix, of which a part stays; 0: none do."""

    observed = 0
    """What stays is then chosen for so many of the last ones."""

    decline = False
    """Whether what was measured to be slower to restore than to compute is computed."""

    flat_front = False
    """Whether that front is the same in all layers, and does not become shorter with depth."""

    @property
    def front(self) -> float | Literal["auto"]:
        """Share of a stored prefix that is computed while the rest is loaded, or "auto" for what is quickest."""
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
        """How KV that is computed under this method comes about. Exact look-ups see exact records only."""
        return coded_provenance(EXACT, self.geometry.codec)

    @property
    def records_approximations(self) -> bool:
        """Whether what is computed behind approximate KV is stored: under a provenance that no exact look-up sees."""
        return self.provenance != coded_provenance(EXACT, self.geometry.codec)

    def for_conversation(self, name: str) -> Method:
        """This method for one conversation. Where KV is not to be shared with others, the provenance names whose it is.

        Args:
            name: of the conversation, 32 hexadecimal digits (see `conversation_name`).
        """
        return self

    def compact(self, idle: IdleConversation) -> str | None:
        """A conversation goes idle: make one segment of those that hold it, as it is to come back.

        The old ones stay: the process may be killed at any moment.

        Returns:
            The new one's id, or None if they stay as they are.
        """
        return None

    def coded(self, codec: str) -> Method:
        """This method with the store's codec, if it names none of its own."""
        settled = self.codec is not None or self.geometry.codec != RAW or codec == RAW
        return self if settled else replace(self, codec=codec)

    def positions_to_compute(self, context: PlanContext) -> tuple[Columns, ...]:
        """For each layer the columns to compute; the others are restored. The suffix, unless said otherwise.

        They never become more with depth, and hold the last `context.must_compute` columns and all columns from
        `context.restorable` on.
        """
        first = min(context.restorable, context.columns - context.must_compute)
        suffix = context.columns - first
        # a whole prompt needs no mask, a suffix one of suffix x columns: for a little spared that costs more
        if context.base == 0 and first < _LITTLE * suffix and suffix * context.columns > _LARGE_MASK:
            first = 0
        return (np.arange(first, context.columns),) * context.layers

    def usable_hashes(self, shape: SegmentShape) -> int:
        """How many of a stored segment's prefix hashes, from the first on, a plan of this method can do with.

        Those of tokens of which nothing is missing, unless a method computes that. Who chooses among tokens reads them
        layer by layer, each from one place, which tokens of merged layers do not have.
        """
        return 0 if self.selects and shape.geometry.pairs else shape.whole_hashes

    def token_budget(self, prefix_tokens: int) -> int:
        """How many of `prefix_tokens` restored tokens a layer with full attention attends to: all, by default."""
        return prefix_tokens

    def streams(self, tokens: int) -> bool:
        """Whether so many computed tokens of a prompt attend to all of the prefix, of which the budget's stay."""
        return 0 < self.exact_from <= tokens

    @property
    def passages(self) -> str:
        """The provenance of passages that are looked for anywhere in a prompt; "" restores prefixes only."""
        return ""

    def sink_token(self, config: PreTrainedConfig) -> int | None:
        """What stands before a passage while its KV is computed, or None."""
        return None

    @property
    def ranked_by(self) -> str:
        """The name of the ranking of their tokens that it goes by; "" if it goes by none."""
        return ""

    @property
    def prefetches(self) -> Collection[Prefetched]:
        """What a method with a budget fetches ahead, within `ahead_bytes`."""
        return PREFETCHED

    @property
    def selects(self) -> bool:
        """Whether layers with full attention attend to less than what is restored."""
        return False

    def regardless(self) -> Method:
        """This method, restoring whatever that is expected to take."""
        return self

    def misfit(self, geometry: Geometry) -> str:
        """Why more is read of segments that are cut like this than is attended to, and what to do, or ""."""
        if not self.selects or replace(geometry, codec=self.geometry.codec) == self.geometry:
            return ""
        return (
            f"segments are stored in another geometry than {type(self).__name__} chooses by, so more of them is read "
            "than is attended to; store.relayout(method) lays them out anew"
        )

    def source(self, layer: int) -> DenseSource:
        """Where a layer with full attention gets its keys and values from."""
        return SelectedSource(layer) if self.selects else DenseSource(layer)

    def with_calibrated_ratio(self, ratio: Callable[[], float | None]) -> Method:
        """This method with what was left to measurement filled in: `ratio` gives what was found on this machine."""
        return self

    def with_measured_budget(self, measured: Callable[[Any], float | None]) -> Self:
        """Return this method with the budget that keeps its target, if it has one (see `BudgetMethod`).

        Args:
            measured: gives, for a method with a target, the least budget that was found to keep it, 1 if none was, or
                None if nothing was measured.
        """
        return self

    def with_profiled_windows(
        self, profiled: Callable[[str, float | None], tuple[float, WindowSizes] | None]
    ) -> Method:
        """This method with the windows that were measured: `profiled` gives, for its choices, by name, those by layer
        and head in the memory of windows of one size, or of the quickest one, and that size.
        """
        return self

    def under_way(self, context: PlanContext) -> UnderWay | None:
        """What of a plan that is not exact is settled while it is followed; None for nothing."""
        return None

    def first_computed(self, context: PlanContext, attention: Asked | None) -> tuple[Columns, ...]:
        """What `positions_to_compute` would say if it knew what the question attends to.

        Args:
            attention: of each row, or None where that is not to be had.
        """
        return self.positions_to_compute(context)

    def moved(self, stored: LayerTensors, computed: LayerTensors) -> torch.Tensor:
        """How far computed keys and values, `[batch, heads, n, dim]`, are from stored ones: float32 `[batch, n]`."""
        raise TypeError(f"{type(self).__name__} compares nothing")

    def go_on(
        self, under_way: UnderWay, layer: int, columns: Columns, moved: np.ndarray, attention: Asked | None
    ) -> Columns:
        """The columns that are computed from one of the `compare_layers` on.

        Args:
            under_way: of the plan.
            layer: which.
            columns: those that were computed up to there, n of each row.
            moved: how far their KV is from what is stored, float `[rows, n]`; without meaning where nothing is.
            attention: as for `first_computed`, in the same pass.
        """
        raise TypeError(f"{type(self).__name__} compares nothing")

    def observer(self, later: Later | None) -> CacheObserver | None:
        """Who watches the queries of a cache's passes, as long as the cache lives; nobody, by default.

        Args:
            later: runs something behind the requests; None where that would take the model's own processor from it.
        """
        return None

    def selector(self) -> Selector:
        """Who chooses these tokens, where they are fewer."""
        raise TypeError(f"{type(self).__name__} attends to everything it restores")
