"""Base of all methods: a dataclass that states how KV is cut into blocks, planned and restored.

What only some methods do is in the modules next to this one: attend to a part of a prefix (`budget.py`), reuse passages
(`passages.py`), recompute the beginning of a prefix (`exact.py`), compact conversations (`krul.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, with_type
from ..restore.plan import PlanContext, Positions
from ..store import EXACT
from ..store.codecs import RAW, coded_provenance
from ..store.geometry import Geometry
from ..store.shape import SegmentShape

if TYPE_CHECKING:
    from typing_extensions import Self


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

    geometry: Geometry = field(default_factory=Geometry)
    ahead_bytes: int = 128 << 20
    codec: str | None = None

    policy = "lru"
    """Eviction policy that the method was published with: `KVStore(path, policy=method.policy)`."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.type in ("bool", bool) and not isinstance(value, bool):
                raise ConfigError(f"{option.name} must be True or False, not {with_type(value)}")
        if self.geometry.pairs:
            raise ConfigError(
                "the geometry of a method has no pairs of layers; only stored segments have them (see `join_segments`)"
            )
        if self.codec is not None:
            object.__setattr__(self, "geometry", replace(self.geometry, codec=self.codec))

    @abstractmethod
    def positions_to_compute(self, context: PlanContext) -> tuple[Positions, ...]:
        """Return the padded positions that each layer computes; the others are restored.

        The number of positions never grows from layer to layer. Each layer computes the last `context.must_compute`
        positions and all positions from `context.restorable` on. `context.suffix_positions()` are these alone.
        """

    @cached_property
    def provenance(self) -> str:
        """Name of the way this method computes KV, stored with it. Exact look-ups find exact KV only."""
        return coded_provenance(EXACT, self.geometry.codec)

    @cached_property  # read at every decoded token
    def records_approximations(self) -> bool:
        """True if KV computed after approximate KV is stored, under a provenance that exact look-ups do not find."""
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


def is_number(value: Any) -> bool:
    """Return whether a value of an option is a number; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Return whether a value of an option is a whole number of at least 0."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0
