"""Exact reuse: restore the longest stored prefix, compute the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..errors import ConfigError
from .base import Method


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Every layer computes the suffix, and sees every token before it: the output is that of no reuse at all.

    Args:
        recompute: share of a stored prefix that is computed while the rest is loaded, where the disk is slower than
            computing: the first tokens, more of them in early layers than in late ones (Krul, Section 6). What is
            computed this way is exact up to the kernel's rounding, and no more bit for bit what a restore alone gives.
            "auto": what is quickest by what `KVStore.calibrate_prefix` found for this model and device, from where the
            KV lies; without a calibration nothing. Nor is it where a model's attention or layers do not allow it, in
            batches with padding, behind tokens that the cache holds already, and with a codec that loses bits.
        decline: whether a prompt is computed in place of being restored where such a calibration says that this is
            quicker.
    """

    recompute: float | Literal["auto"] = "auto"
    decline: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_front(self.recompute)

    @property
    def front(self) -> float | Literal["auto"]:
        return self.recompute

    def regardless(self) -> Exact:
        return replace(self, recompute=0.0, decline=False)


def check_front(share: float | Literal["auto"]) -> None:
    """Raises ConfigError unless so much of a prefix can be computed while the rest is loaded."""
    if share == "auto":
        return
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f'recompute is a share of the prefix, between 0 and 1, or "auto", not {share!r}')
