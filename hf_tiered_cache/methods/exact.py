"""Exact reuse: the longest stored prefix is restored, the rest computed."""

from __future__ import annotations

from dataclasses import dataclass

from .prefix import PrefixMethod


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

    The first cache of a model on a store and a device measures both, which takes some seconds, and saves the result.
    Each prompt on a CPU corrects it. The output equals that of `Exact` up to the kernel's rounding.
    """

    calibrates = True
