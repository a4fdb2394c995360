"""What a prompt's question attends to, seen while it runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..patches.scope import on
from ..transfers import to_host

_LARGEST = 1 << 26
"""Attention weights held at a time: 256 MiB of float32."""


Asked = Sequence[np.ndarray | None]
"""What the question of each row attends to: float `[columns]`, not negative; None for a row in which nobody asks."""


class QuestionAttention:
    """Adds up what the last queries of each row attend to, layer by layer.

    Args:
        tokens: how many of the last ones ask, of each row; 0 for none.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._sum: torch.Tensor | None = None  # float32 [batch, columns]

    def note(self, query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, scaling: float | None) -> None:
        """Add a layer with full attention.

        Args:
            query: `[batch, heads, n, dim]`, rotated.
            keys: `[batch, kv_heads, columns, dim]`, rotated.
            mask: `[batch or 1, heads or 1, n, columns]`, what queries may attend to, or what is added to the logits.
            scaling: of the logits; None for dim ** -0.5.
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
        """float32, a sum over the layers; None if no layer was seen. A GPU is waited for."""
        if self._sum is None:
            return None
        return [row if asks else None for row, asks in zip(to_host(self._sum)[0], self.tokens, strict=True)]


def _masked(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits `[kv_heads, group, n, columns]` under a mask `[heads or 1, n, columns]`."""
    wide = mask.expand(logits.shape[0] * logits.shape[1], -1, -1).unflatten(0, logits.shape[:2])
    if mask.dtype == torch.bool:
        return logits.masked_fill(~wide, -torch.inf)
    return logits + wide
