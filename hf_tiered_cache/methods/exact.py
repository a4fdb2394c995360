"""Exact reuse: the longest stored prefix is restored, the rest computed. `PrefixMethod` is also the base of `Krul`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ..restore.rows import PlanContext, Positions
from ..restore.schedule import STEEPNESS
from .base import Method, is_number, require, with_few_layers

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class PrefixMethod(Method):
    """Base of methods that restore a whole prefix or recompute its first tokens meanwhile, whatever is faster.

    Args:
        recompute: Share of a stored prefix that is recomputed while the rest is loaded, or "auto" for the fastest share
            that was measured.
    """

    recompute: float | Literal["auto"] = "auto"

    decline = True
    """True if a prompt is computed if restoring it was measured to be slower."""

    calibrates = False
    """True if the first cache measures the costs of restoring and computing, if the store has none."""

    recompute_steepness: ClassVar[Sequence[float]] = STEEPNESS
    """How fast the length of the recomputed prefix may fall with depth, see `recompute_lengths`; the first one for a
    fixed share."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_valid = self.recompute == "auto" or is_number(self.recompute, 0, 1)
        require(is_valid, "recompute", 'a share of the prefix, a float between 0 and 1, or "auto"', self.recompute)

    def positions_to_compute(self, context: PlanContext) -> tuple[Positions, ...]:
        """See `Method`. The cost model adds the recomputed prefix."""
        return context.suffix_positions()

    def with_likely_recompute(self, measured_share: float, layers: int) -> Self:
        """Return this method with few layers per block if a prefix is likely to be recomputed while the rest is loaded.

        If nothing is recomputed, fewer and larger blocks are restored sooner. A geometry of the user's own is kept.
        `measured_share` is the fastest share to recompute; 0 without a calibration.
        """
        fixed = 0.0 if self.recompute == "auto" else self.recompute
        can_recompute = self.lossless or self.records_approximations
        return with_few_layers(self, layers) if (fixed or measured_share) and can_recompute else self


@dataclass(frozen=True, kw_only=True)
class Exact(PrefixMethod):
    """Exact reuse: every layer computes the suffix and attends to all tokens before it. The output is that of no reuse.

    Args:
        recompute: Share of a stored prefix that is recomputed while the rest is loaded, for disks that are slower than
            computing: the first tokens, more of them in early layers than in late ones (Krul, Section 6). Recomputed KV
            is exact up to the kernel's rounding, so the output is no longer bit-identical to that of a full restore.
            "auto" is the fastest share that `KVStore.calibrate_prefix` measured for this model, this device and the
            tier that holds the KV; 0 without a calibration. Nothing is recomputed if the model's attention or layers do
            not support it, in batches with padding, if the cache already holds tokens, and with a lossy codec.
        decline: Whether a prompt is computed instead of restored if such a calibration says that this is faster.
    """

    decline: bool = True


@dataclass(frozen=True, kw_only=True)
class Auto(Exact):
    """Exact reuse in the way that is measured to be fastest: restore a prompt, compute it, or do both at once.

    The first cache of a model on a store and a device measures both, which takes up to about 20 seconds for a small
    model on two CPU cores, and saves the result. Each prompt on a CPU corrects it. The output equals that of
    `Exact` up to the kernel's rounding.
    """

    calibrates = True
