"""Recomputation of passages: the fastest share of tokens (CacheTune, Section 4.3), and attention of the query probe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..patches.rope import on
from ..patches.scope import AttentionCall
from ..store.memory import to_host

LOWEST = 0.15
"""Lowest ratio; below it, quality suffers (Section 5.2)."""

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Costs:
    """Cost of a token in one layer, in seconds.

    Args:
        compute: t_c, to compute it.
        load: t_i, to load its KV from its tier.
        overhead: t_o, fixed cost of a layer.
    """

    compute: float
    load: float
    overhead: float

    @property
    def balanced(self) -> float:
        """Ratio r0 = t_i / (t_c + t_i), at which computing and loading take equally long (Equation 11)."""
        return self.load / (self.compute + self.load)


def fastest_ratio(seconds: Callable[[float], float], warm: float, width: float = 0.01) -> float:
    """Return the ratio with the least `seconds`, to within `width`, if `seconds` falls and then rises.

    A golden-section search. The paper's Algorithm 1 takes the warm value for one of its two probes, which then do not
    divide the interval as the search needs them to. Here the warm value and one probe narrow the interval first, and
    then both probes are chosen again.

    Args:
        seconds: Function to minimize; called at most 14 times at the default width.
        warm: Expected minimum.
        width: Width of the final interval.
    """
    low, high = LOWEST, 1.0
    seconds_by_ratio: dict[float, float] = {}

    def at(ratio: float) -> float:
        if ratio not in seconds_by_ratio:
            seconds_by_ratio[ratio] = seconds(ratio)
        return seconds_by_ratio[ratio]

    warm = min(max(warm, low), high)
    distance = high - warm if high - warm > warm - low else low - warm
    second_probe = warm + (1 - _GOLDEN) * distance
    lower_probe, upper_probe = sorted((warm, second_probe))
    if at(lower_probe) <= at(upper_probe):
        high = upper_probe
    else:
        low = lower_probe
    lower_probe, upper_probe = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    while high - low > width:
        if at(lower_probe) <= at(upper_probe):
            high, upper_probe = upper_probe, lower_probe
            lower_probe = high - _GOLDEN * (high - low)
        else:
            low, lower_probe = lower_probe, upper_probe
            upper_probe = low + _GOLDEN * (high - low)
    return min(seconds_by_ratio, key=seconds_by_ratio.__getitem__)


_LARGEST = 1 << 26  # maximum number of attention weights held at a time: 256 MiB of float32


ProbeAttention = Sequence[np.ndarray | None]
"""Attention of each row's query probe to each position: float `[positions]`, at least 0; None for a row without one."""


class ProbeAttentionSum:
    """Sum over layers of the attention of each row's query probe: its last `tokens` tokens, 0 for a row without one."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._sum: torch.Tensor | None = None  # float32 [batch, positions]

    def note(self, call: AttentionCall) -> None:
        """Add the attention of one layer with full attention.

        The mask is `[batch or 1, heads or 1, n, positions]`: bool, True where a query may attend, or additive.
        """
        query, keys, _, mask, scaling, *_ = call
        batch, heads, _, dim = query.shape
        kv_heads, num_keys = keys.shape[1], keys.shape[2]
        scaling = dim**-0.5 if scaling is None else scaling
        total = torch.zeros(batch, num_keys, device=query.device)
        step = max(1, _LARGEST // max(1, heads * num_keys))
        for row in range(batch):
            if not self.tokens[row]:
                continue
            transposed_keys = keys[row].float().transpose(1, 2)  # [kv_heads, dim, positions]
            for begin in range(query.shape[2] - self.tokens[row], query.shape[2], step):
                span = slice(begin, begin + step)
                probe_query = query[row, :, span].float().unflatten(0, (kv_heads, -1))  # [kv_heads, group, n, dim]
                logits = probe_query.flatten(1, 2) @ transposed_keys
                logits = logits.unflatten(1, probe_query.shape[1:3]).mul_(scaling)
                if mask is not None:
                    logits = _masked(logits, mask[min(row, mask.shape[0] - 1), :, span])
                total[row] += logits.softmax(-1).sum((0, 1, 2))
            total[row] /= heads * self.tokens[row]
        self._sum = total if self._sum is None else self._sum + on(self._sum.device, total)

    def result(self) -> ProbeAttention | None:
        """Return the sum over layers as float32, or None if no layer was added. Waits for the GPU."""
        if self._sum is None:
            return None
        return [row if num_tokens else None for row, num_tokens in zip(to_host(self._sum)[0], self.tokens, strict=True)]


def _masked(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return logits, `[kv_heads, group, n, positions]`, with a mask, `[heads or 1, n, positions]`, applied."""
    wide_mask = mask.expand(logits.shape[0] * logits.shape[1], -1, -1).unflatten(0, logits.shape[:2])
    if mask.dtype == torch.bool:
        return logits.masked_fill(~wide_mask, -torch.inf)
    return logits + wide_mask
