"""Attention of a query probe (the last tokens of a prompt), summed while the model runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..patches.scope import on
from ..transfers import to_host

_LARGEST = 1 << 26
"""Maximum number of attention weights held at a time: 256 MiB of float32."""


Asked = Sequence[np.ndarray | None]
"""Attention of each row's query probe to each position: float `[columns]`, non-negative; None for a row without one."""


class QuestionAttention:
    """Sum over layers of the attention of each row's query probe.

    Args:
        tokens: Number of probe tokens at the end of each row; 0 for a row without a probe.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._sum: torch.Tensor | None = None  # float32 [batch, columns]

    def note(self, query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, scaling: float | None) -> None:
        """Add the attention of one layer with full attention.

        Args:
            query: `[batch, heads, n, dim]`, rotated.
            keys: `[batch, kv_heads, columns, dim]`, rotated.
            mask: `[batch or 1, heads or 1, n, columns]`: bool, True where a query may attend, or an additive mask.
            scaling: Scale of the logits; None for dim ** -0.5.
        """
        batch, heads, _, dim = query.shape
        kv_heads, columns = keys.shape[1], keys.shape[2]
        scaling = dim**-0.5 if scaling is None else scaling
        total = torch.zeros(batch, columns, device=query.device)
        step = max(1, _LARGEST // max(1, heads * columns))
        for row in range(batch):
            if not self.tokens[row]:
                continue
            wide = keys[row].float().transpose(1, 2)  # [kv_heads, dim, columns]
            for begin in range(query.shape[2] - self.tokens[row], query.shape[2], step):
                some = slice(begin, begin + step)
                asking = query[row, :, some].float().unflatten(0, (kv_heads, -1))  # [kv_heads, group, n, dim]
                logits = (asking.flatten(1, 2) @ wide).unflatten(1, asking.shape[1:3]).mul_(scaling)
                if mask is not None:
                    logits = _masked(logits, mask[min(row, mask.shape[0] - 1), :, some])
                total[row] += logits.softmax(-1).sum((0, 1, 2))
            total[row] /= heads * self.tokens[row]
        self._sum = total if self._sum is None else self._sum + on(self._sum.device, total)

    def result(self) -> Asked | None:
        """Return the sum over layers as float32, or None if no layer was added. Waits for the GPU."""
        if self._sum is None:
            return None
        return [row if asks else None for row, asks in zip(to_host(self._sum)[0], self.tokens, strict=True)]


def _masked(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return logits, `[kv_heads, group, n, columns]`, with a mask, `[heads or 1, n, columns]`, applied."""
    wide = mask.expand(logits.shape[0] * logits.shape[1], -1, -1).unflatten(0, logits.shape[:2])
    if mask.dtype == torch.bool:
        return logits.masked_fill(~wide, -torch.inf)
    return logits + wide
