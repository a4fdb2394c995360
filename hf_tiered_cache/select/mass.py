"""Attention that the queries of a prompt pay to each restored token, and the tokens with most of it."""

from __future__ import annotations

import torch

_LARGEST = 1 << 26
"""Maximum number of attention weights held at a time: 256 MiB of float32."""


def head_mass(
    query: torch.Tensor, keys: torch.Tensor, own_keys: torch.Tensor, scaling: float | None = None
) -> torch.Tensor:
    """Return the share of attention that each restored token gets from the queries of each KV head.

    The softmax runs over the restored tokens and, causally, over the computed ones (ContiguousKV, Section 4.2: sum over
    all query tokens and query heads). The sum is divided by the number of queries and query heads, so that long prompts
    weigh no more than short ones in stored statistics.

    Args:
        query: `[heads, queries, dim]`, rotated: queries of the last tokens, in order.
        keys: `[kv_heads, tokens, dim]`, rotated: keys of the restored tokens; each KV head serves heads / kv_heads
            query heads.
        own_keys: `[kv_heads, own, dim]`, rotated: keys of the computed tokens after them; the last ones belong to the
            queries.
        scaling: Scale of the logits; None for dim ** -0.5.

    Returns:
        float32 `[kv_heads, tokens]`, non-negative; the sum of a row is at most 1.
    """
    heads, queries, dim = query.shape
    kv_heads, tokens, _ = keys.shape
    scaling = dim**-0.5 if scaling is None else scaling
    grouped = query.unflatten(0, (kv_heads, heads // kv_heads))  # [kv_heads, group, queries, dim]
    own = _logits(grouped, own_keys, scaling).unflatten(1, grouped.shape[1:3])  # [kv_heads, group, queries, own]
    if queries > 1:  # a single query sees all keys
        future = torch.ones(queries, own.shape[-1], dtype=torch.bool, device=query.device)
        own = own.masked_fill_(future.triu(1 + own.shape[-1] - queries), -torch.inf)
    own_total = own.logsumexp(-1, keepdim=True)  # [kv_heads, group, queries, 1]
    mass = torch.zeros(kv_heads, tokens, dtype=torch.float32, device=query.device)
    rows = max(1, _LARGEST // max(1, heads * tokens))
    for begin in range(0, queries, rows):
        some = slice(begin, begin + rows)
        logits = _logits(grouped[:, :, some], keys, scaling)  # [kv_heads, group * rows, tokens]
        behind = own_total[:, :, some].flatten(1, 2)  # [kv_heads, group * rows, 1]
        most = torch.maximum(logits.amax(-1, keepdim=True), behind)
        weights = logits.sub_(most).exp_()
        total = weights.sum(-1, keepdim=True) + (behind - most).exp_()
        mass += (total.reciprocal_().transpose(1, 2) @ weights).squeeze(1)  # each row's share, summed over rows
    return mass * (kv_heads / (heads * queries))


def _logits(grouped: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return float32 `[kv_heads, group * n, tokens]`: one product per KV head, without copying keys for its group."""
    return (grouped.flatten(1, 2) @ keys.transpose(-1, -2)).float().mul_(scaling)


def top_of_each(mass: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` largest columns of each row of `[rows, tokens]`, first on ties: int64 ascending."""
    return mass.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values
