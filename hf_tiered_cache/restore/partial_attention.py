"""Attention over a part of the keys: outputs with the log-sum-exp of their logits, so that parts can be merged.

Outputs over disjoint sets of keys are merged into the output over all of them (online softmax: Milakov and Gimelshein
2018; FlashAttention: Dao et al. 2022). The kernels are PyTorch's own, which compute the log-sum-exp in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LARGEST = 1 << 24
"""Maximum number of logits held at a time where no kernel returns the log-sum-exp: 64 MiB of float32."""


@dataclass(eq=False)
class Partial:
    """Attention output of queries over the keys processed so far.

    Args:
        output: float32 `[batch, heads, n, dim]`.
        log_total: float32 `[batch, heads, n]`, log-sum-exp of the logits.
    """

    output: torch.Tensor
    log_total: torch.Tensor

    def join(self, rows: slice | torch.Tensor, other: Partial) -> None:
        """Merge, in place, the attention of the batch rows `rows` over other keys."""
        before = self.log_total[rows]
        total = torch.logaddexp(before, other.log_total)
        output = self.output[rows] * (before - total).exp_().unsqueeze(-1)
        output += other.output * (other.log_total - total).exp_().unsqueeze(-1)
        self.output[rows], self.log_total[rows] = output, total


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> Partial:
    """Compute the attention of queries over the given keys.

    Args:
        query: `[batch, heads, n, dim]`.
        keys: `[batch, kv_heads, k, dim]`; each kv head serves heads / kv_heads query heads.
        values: Like `keys`.
        scaling: Scale of the logits; None for dim ** -0.5.
        mask: `[batch or 1, heads or 1, n, k]`, added to the logits, or bool, True for visible keys; None if all are
            visible.
        causal: Whether query i sees only the keys up to i. For use without a mask.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, kv_heads, count = query.shape[1], keys.shape[1], query.shape[2]
    if mask is None and not causal and heads != kv_heads:  # fold the query heads of a group into its kv head
        grouped = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [batch, kv_heads, group * n, dim]
        found = _attention(grouped, keys, values, scaling, None, False)
        return Partial(
            found.output.unflatten(2, (-1, count)).flatten(1, 2),
            found.log_total.unflatten(2, (-1, count)).flatten(1, 2),
        )
    if heads != kv_heads:
        keys, values = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (keys, values))
    return _attention(query, keys, values, scaling, mask, causal)


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None,
    causal: bool,
) -> Partial:
    kernels = torch.ops.aten
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    if query.device.type == "cpu" and query.shape[-1] == values.shape[-1]:
        output, log_total = kernels._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, is_causal=causal, attn_mask=mask, scale=scaling
        )
        return Partial(output.float(), log_total)
    aligned = query.shape[-1] == values.shape[-1] and query.shape[-1] % 8 == 0
    if query.device.type == "cuda" and mask is None and aligned:
        half = query.dtype in (torch.float16, torch.bfloat16) and torch.backends.cuda.is_flash_attention_available()
        if half and query.shape[-1] <= 256:
            output, log_total, *_ = kernels._scaled_dot_product_flash_attention(
                query, keys, values, is_causal=causal, scale=scaling
            )
        else:
            output, log_total, *_ = kernels._scaled_dot_product_efficient_attention(
                query, keys, values, None, True, is_causal=causal, scale=scaling
            )
        return Partial(output.float(), log_total[..., : query.shape[2]].float())
    return _by_arithmetic(query, keys, values, scaling, mask, causal)


def _by_arithmetic(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None,
    causal: bool,
) -> Partial:
    """Compute attention with plain tensor operations, some queries at a time."""
    step = max(1, _LARGEST // (query.shape[0] * query.shape[1] * keys.shape[2]))
    outputs, totals = [], []
    for first in range(0, query.shape[2], step):
        logits = (query[:, :, first : first + step].float() @ keys.float().transpose(2, 3)).mul_(scaling)
        if mask is not None:
            logits += mask[:, :, first : first + step]
        elif causal:
            seen = torch.ones(logits.shape[2:], dtype=torch.bool, device=logits.device).tril(first)
            logits.masked_fill_(~seen, -torch.inf)
        totals.append(logits.logsumexp(-1))
        # a query at a padded position sees no key: its weights are zero
        weights = (logits - totals[-1].unsqueeze(-1)).exp_().nan_to_num_()
        outputs.append(weights @ values.float())
    return Partial(torch.cat(outputs, 2), torch.cat(totals, 2))
