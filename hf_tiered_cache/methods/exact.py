"""Exact reuse: restore the longest stored prefix, compute the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .base import Method


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Every layer computes the suffix, and sees every token before it: the output is that of no reuse at all.

    Args:
        decline: whether a prompt is computed in place of being restored where `KVStore.calibrate_prefix` found that to
            be quicker, for this model and device, from where its KV lies. Without a calibration all is restored.
    """

    decline: bool = True

    def regardless(self) -> Exact:
        return replace(self, decline=False)
