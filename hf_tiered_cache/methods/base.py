"""Base of all methods: a dataclass that states how KV is cut into blocks, planned and restored.

`BudgetMethod` is the base of methods that attend to a part of the prefix. Other bases are next to their methods: for
passages (`passages.py`), for recomputing the beginning of a prefix (`exact.py`), and for conversations (`krul.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from math import inf
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import ConfigError, check_switches, with_type
from ..restore.plan import Plan
from ..restore.rows import PlanContext, Positions, row_by_row
from ..selection.prompt import PREFETCHED
from ..selection.selectors import Selector, budgeted_tokens
from ..store import EXACT
from ..store.codecs import RAW, coded_provenance, make_codec
from ..store.geometry import Geometry
from ..store.shape import SegmentShape
from ..tiers.scores import make_policy

if TYPE_CHECKING:
    from typing_extensions import Self


DEFAULT_BUDGET = 0.25
"""Default share of the prefix that is attended to."""
UNMEASURED_BUDGET = 0.5
"""Budget for a quality target on a model that was not measured."""


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Base class of methods: how KV is cut into blocks and restored. A method must define `positions_to_compute`.

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

    geometry: Geometry = Geometry()
    ahead_bytes: int = 128 << 20
    codec: str | None = None

    policy = "lru"
    """Eviction policy that the method was published with: `KVStore(path, policy=method.policy)`."""

    def __post_init__(self) -> None:
        names = [option.name for option in fields(self) if option.type in ("bool", bool)]
        check_switches(**{name: getattr(self, name) for name in names})
        require(isinstance(self.geometry, Geometry), "geometry", "a Geometry", self.geometry)
        make_policy(self.policy)  # raises ConfigError for an unknown one
        if self.geometry.pairs:
            raise ConfigError(
                "the geometry of a method has no pairs of layers; only stored segments have them (see `join_segments`)"
            )
        if self.codec is not None:
            object.__setattr__(self, "geometry", replace(self.geometry, codec=self.codec))

    @abstractmethod
    def positions_to_compute(self, context: PlanContext) -> tuple[Positions, ...]:
        """Return the padded positions that each layer computes; the others are restored.

        The number of positions never grows from layer to layer. Each layer computes at least `context.missing`:
        the last `context.must_compute` positions, and those that cannot be restored. `context.suffix_positions()` is
        the plan of prefix reuse.
        """

    def plan(self, context: PlanContext) -> Plan:
        """Return the plan of a pass. Raises ConfigError if `positions_to_compute` did not return valid positions."""
        member = "positions_to_compute"
        positions = self._arrays(member, self.positions_to_compute(context), context.layers, "layers")
        try:
            plan = self._plan_for(context, positions)
            if plan.restored_until > min(context.restorable, context.num_positions - context.must_compute):
                pairs = row_by_row(context.missing, plan.computed[-1])
                if not all(np.isin(missing, row).all() for missing, row in pairs):
                    raise ValueError(f"layer {context.layers - 1} leaves out positions that cannot be restored")
        except ValueError as error:
            raise ConfigError(f"{type(self).__name__}.{member} is wrong: {error}") from error
        return plan

    def _plan_for(self, context: PlanContext, positions: tuple[Positions, ...]) -> Plan:
        """Return the plan in which layers compute these positions. Raises ValueError if they are not valid."""
        return Plan(context.base, context.num_positions, positions, context.groups)

    def _arrays(self, member: str, answer: Any, count: int, owners: str) -> tuple[np.ndarray, ...]:
        """Return the integer arrays that a member of a plug-in returned, one for each of its `count` owners."""
        is_valid = isinstance(answer, tuple | list) and len(answer) == count
        if not is_valid or not all(isinstance(array, np.ndarray) and array.dtype.kind in "iu" for array in answer):
            raise ConfigError(
                f"{type(self).__name__}.{member} returned {with_type(answer)}; it must return {count} int64 arrays, "
                f"one for each of the {owners}"
            )
        return tuple(answer)

    @cached_property
    def provenance(self) -> str:
        """Name of the way this method computes KV, stored with it. Exact lookups find exact KV only."""
        return coded_provenance(EXACT, self.geometry.codec)

    @cached_property
    def lossless(self) -> bool:
        """True if the codec restores every bit."""
        return make_codec(self.geometry.codec).lossless

    @cached_property  # read at every decoded token
    def records_approximations(self) -> bool:
        """True if KV computed after approximate KV is stored, under a provenance that exact lookups do not find."""
        return self.provenance != coded_provenance(EXACT, self.geometry.codec)

    def coded(self, codec: str) -> Self:
        """Return this method with the store's codec, if it has none of its own."""
        has_codec = self.codec is not None or self.geometry.codec != RAW
        return self if has_codec or codec == RAW else replace(self, codec=codec)

    def usable_hashes(self, shape: SegmentShape) -> int:
        """Return how many leading prefix hashes of a stored segment a plan of this method can use.

        By default, those of tokens that are complete in the segment.
        """
        return shape.whole_hashes


@dataclass(frozen=True, kw_only=True)
class BudgetMethod(Method):
    """Base of methods in which full-attention layers attend to a share of the prefix.

    A method must define `selector`.

    Args:
        budget: Share of the prefix that is attended to, in (0, 1]. At 1 the output is that of `Exact`.
        quality: Maximum mean loss of a prompt: KL divergence from full KV, in nats. It replaces `budget` by the
            smallest one with a mean loss of at most a quarter of this target, and half of it in 95 % of the questions,
            when `store.calibrate_quality` measured this model, or by 1 if there is none. The margin is for other text,
            which loses more than the measured text. Without a measurement the budget is 0.5.
    """

    budget: float = field(default=DEFAULT_BUDGET, kw_only=False)
    quality: float | None = None

    reorder = False
    """True if segments are rewritten in the background, with their tokens ordered by observed importance."""

    reorder_every = 4
    """Number of prompts before the first reordering; the number doubles each time."""

    prefetches = PREFETCHED
    """Kinds of data that are prefetched, within `ahead_bytes`."""

    reselect = False
    """True if each decoded token reselects what it attends to. If not, the selection for the prompt is kept."""

    prefill_tokens = 0
    """Number of tokens per piece of a longer prompt. Each piece is stored before the next is computed. 0 computes it at
    once."""

    exact_from = 0
    """Minimum number of computed prompt tokens that attend to their whole prefix, of which a part is then kept; 0 for
    never."""

    observed = 0
    """Number of trailing prompt tokens that select this part."""

    loss_ignores = frozenset(("budget", "quality"))
    """Names of settings that the measured loss at a budget does not depend on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_share = is_number(self.budget, 0, 1) and self.budget > 0
        require(is_share, "budget", "a share of the prefix, a float above 0 and at most 1", self.budget)
        is_loss = self.quality is None or (is_number(self.quality) and self.quality > 0)
        require(is_loss, "quality", "a loss in nats, a float above 0 such as 0.02", self.quality)

    # --- what to attend to

    def token_budget(self, prefix_tokens: int) -> int:
        """Return how many of `prefix_tokens` restored tokens a full-attention layer attends to.

        By default, that is the share `budget` of them, rounded down, but at least one.
        """
        return budgeted_tokens(self.budget, prefix_tokens, 1)

    @abstractmethod
    def selector(self) -> Selector:
        """Return the selector of the tokens to attend to."""

    @property
    def selects(self) -> bool:
        """True if full-attention layers attend to a part of what is restored."""
        return self.budget < 1

    def streams(self, tokens: int) -> bool:
        """Return whether so many computed prompt tokens attend to the whole prefix before the budget applies."""
        return 0 < self.exact_from <= tokens

    def geometry_warning(self, geometry: Geometry) -> str:
        """Return why more is read of segments of a geometry than is attended to, and the remedy, or ""."""
        ignored = ("codec",) if self.geometry.index else ("codec", "index")  # extra copies of keys do not matter
        names = {option.name for option in fields(Geometry)}.difference(ignored)
        if not self.selects or all(getattr(geometry, name) == getattr(self.geometry, name) for name in names):
            return ""
        return (
            f"segments are stored in another geometry than {type(self).__name__} selects by, so more of them is read "
            "than is attended to; call store.relayout(method) to rewrite them"
        )

    def held_tokens(self, prefix_tokens: int) -> int:
        """Return how many of a row's restored tokens a full-attention layer attends to: its budget, or all.

        Raises:
            ConfigError: `token_budget` returned no number of tokens.
        """
        if not prefix_tokens:
            return 0
        budget = self.token_budget(prefix_tokens)
        if not is_count(budget) or budget < 1:
            name = type(self).__name__
            raise ConfigError(
                f"{name}.token_budget({prefix_tokens}) returned {budget!r}; it must be an int of at least 1"
            )
        return min(int(budget), prefix_tokens)

    def budgets(self, context: PlanContext) -> list[int] | None:
        """Return how many restored tokens of each group's rows a full-attention layer attends to; None for all."""
        if context.base or not self.selects:
            return None
        budgets = [self.held_tokens(tokens) for tokens in context.own_prefixes]
        return None if budgets == context.own_prefixes else budgets

    # --- members of every method

    def positions_to_compute(self, context: PlanContext) -> tuple[Positions, ...]:
        """See `Method`. Each row computes what it computes alone, if one of them exceeds its budget."""
        return context.suffix_positions() if self.budgets(context) is None else context.own_suffixes()

    def usable_hashes(self, shape: SegmentShape) -> int:
        """See `Method`. Tokens are selected within one KV cache group, so not in segments with merged layers."""
        return 0 if shape.geometry.pairs and self.selects else shape.whole_hashes

    # --- budget for a quality target

    def with_measured_budget(self, measured: Callable[[Self], float | None]) -> Self:
        """Return this method with the budget that keeps its quality target, if it has one.

        Args:
            measured: Function that returns, for a method with a target, the smallest budget that was measured to keep
                it, 1 if none did, or None without a measurement.
        """
        if self.quality is None:
            return self
        budget = measured(self)
        return replace(self, budget=UNMEASURED_BUDGET if budget is None else budget)


def overlapping(geometry: Geometry, layers: int) -> Geometry:
    """Return a geometry with few layers per block, for a model that computes while blocks are loaded.

    A layer waits for the blocks of all layers that share them: here an eighth of the model's `layers`, at most 4. With
    fewer, there are more blocks to handle. The first layer, which nothing is computed before, has blocks of its own.
    """
    together = max(1, min(4, layers // 8))
    return replace(geometry, layers_per_block=together, solo_layers=int(together > 1))


_Method = TypeVar("_Method", bound=Method)


def with_few_layers(method: _Method, layers: int) -> _Method:
    """Return a method with few layers per block (see `overlapping`), unless its geometry is a user's own."""
    geometry = _geometry_with_few_layers(method.geometry, type(method).geometry, layers)
    return method if geometry == method.geometry else replace(method, geometry=geometry)


@lru_cache  # called for each prompt
def _geometry_with_few_layers(geometry: Geometry, default: Geometry, layers: int) -> Geometry:
    is_default = geometry == replace(default, codec=geometry.codec)
    return overlapping(geometry, layers) if is_default else geometry


def require(is_valid: bool, name: str, expected: str, value: object) -> None:
    """Raise ConfigError if the value of an option is not valid, with a text that says what is expected."""
    if not is_valid:
        raise ConfigError(f"{name} must be {expected}, not {with_type(value)}")


def is_number(value: Any, low: float = -inf, high: float = inf) -> bool:
    """Return whether a value of an option is a number from `low` to `high`; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) <= high


def is_count(value: Any) -> bool:
    """Return whether a value of an option is a whole number of at least 0."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def count_of(share: float, tokens: int) -> int:
    """Return how many tokens a share is, rounded down. 1e-9 corrects rounding: 0.29 * 100 is slightly less than 29."""
    return int(share * tokens + 1e-9)
