"""Attention to all restored tokens without holding them: each layer fetches them run by run, and releases each run.

Outputs over disjoint sets of keys are merged into the output over all of them, by the log-sum-exp of their logits
(online softmax: Milakov and Gimelshein 2018; FlashAttention: Dao et al. 2022). The kernels are PyTorch's own, which
compute the log-sum-exp in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..patches.rope import on
from ..patches.scope import AttentionCall
from ..restore.fetch import Fetcher
from ..restore.plan import BudgetPlan
from ..store.memory import to_device
from .fetched import Rotate, RowPrefix, RowTokens, UnitTable

logger = logging.getLogger("hf_tiered_cache")

_LARGEST = 1 << 24  # maximum number of logits held at a time where no kernel returns the log-sum-exp: 64 MiB of float32


@dataclass(eq=False)
class Partial:
    """Attention output, float32 `[batch, heads, n, dim]`, of queries over the keys processed so far.

    `log_total`, float32 `[batch, heads, n]`, is the log-sum-exp of the logits.
    """

    output: torch.Tensor
    log_total: torch.Tensor

    def join(self, rows: slice | torch.Tensor, update: Partial) -> None:
        """Merge, in place, the attention of the batch rows `rows` over other keys."""
        old_total = self.log_total[rows]
        total = torch.logaddexp(old_total, update.log_total)
        output = self.output[rows] * (old_total - total).exp_().unsqueeze(-1)
        output += update.output * (update.log_total - total).exp_().unsqueeze(-1)
        self.output[rows], self.log_total[rows] = output, total

    def with_sinks(self, sinks: torch.Tensor | None) -> torch.Tensor:
        """Return the output if each query head also has a logit in `sinks`, `[heads]`, without a value."""
        if sinks is None:
            return self.output
        total = torch.logaddexp(self.log_total, on(self.log_total.device, sinks).float()[:, None])
        return self.output * (self.log_total - total).exp_().unsqueeze(-1)


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> Partial:
    """Compute the attention of queries, `[batch, heads, n, dim]`, over keys and values, `[batch, kv_heads, k, dim]`.

    The mask, `[batch or 1, heads or 1, n, k]`, is added to the logits, or bool, True for visible keys; None if all are
    visible. Without a mask, the attention may be `causal`: query i sees only the keys up to i. Logits are multiplied by
    `scaling`; None for dim ** -0.5. For `softcap` see `AttentionCall`.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, kv_heads, count = query.shape[1], keys.shape[1], query.shape[2]
    if mask is None and not causal and heads != kv_heads:  # fold the query heads of a group into its kv head
        grouped = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [batch, kv_heads, group * n, dim]
        partial = attention(grouped, keys, values, scaling, softcap=softcap)
        return Partial(
            partial.output.unflatten(2, (-1, count)).flatten(1, 2),
            partial.log_total.unflatten(2, (-1, count)).flatten(1, 2),
        )
    if heads != kv_heads:
        keys, values = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (keys, values))
    kernels = torch.ops.aten
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    if softcap is not None:  # no kernel has it
        return _plain_attention(query, keys, values, scaling, mask, causal, softcap)
    if query.device.type == "cpu" and query.shape[-1] == values.shape[-1]:
        output, log_total = kernels._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, is_causal=causal, attn_mask=mask, scale=scaling
        )
        return Partial(output.float(), log_total)
    aligned = query.shape[-1] == values.shape[-1] and query.shape[-1] % 8 == 0
    if query.device.type != "cuda" or mask is not None or not aligned:
        return _plain_attention(query, keys, values, scaling, mask, causal)
    # what a kernel supports depends on the GPU, not only on the build: flash attention needs capability 8.0
    params = torch.backends.cuda.SDPAParams(query, keys, values, None, 0.0, causal, False)
    if torch.backends.cuda.can_use_flash_attention(params):
        output, log_total, *_ = kernels._scaled_dot_product_flash_attention(
            query, keys, values, is_causal=causal, scale=scaling
        )
    elif torch.backends.cuda.can_use_efficient_attention(params):
        output, log_total, *_ = kernels._scaled_dot_product_efficient_attention(
            query, keys, values, None, True, is_causal=causal, scale=scaling
        )
    else:
        return _plain_attention(query, keys, values, scaling, mask, causal)
    return Partial(output.float(), log_total[..., : query.shape[2]].float())


def _plain_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None,
    causal: bool,
    softcap: float | None = None,
) -> Partial:
    """Compute attention with plain tensor operations, some queries at a time."""
    step = max(1, _LARGEST // (query.shape[0] * query.shape[1] * keys.shape[2]))
    outputs, totals = [], []
    for first in range(0, query.shape[2], step):
        logits = (query[:, :, first : first + step].float() @ keys.float().transpose(2, 3)).mul_(scaling)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            logits += mask[:, :, first : first + step]
        elif causal:
            visible = torch.ones(logits.shape[2:], dtype=torch.bool, device=logits.device).tril(first)
            logits.masked_fill_(~visible, -torch.inf)
        totals.append(logits.logsumexp(-1))
        # a query at a padded position sees no key: its weights are zero
        weights = (logits - totals[-1].unsqueeze(-1)).exp_().nan_to_num_()
        outputs.append(weights @ values.float())
    return Partial(torch.cat(outputs, 2), torch.cat(totals, 2))


_RUN_TOKENS = 8192  # maximum number of tokens of a run: enough to keep a kernel and a disk busy


class StreamedPrefix:
    """Restored tokens of a pass, for `layers` with full attention, ascending, that attend to all of them.

    While a layer attends to one run of tokens, the next is fetched, so two runs of one layer are in memory.
    """

    def __init__(self, plan: BudgetPlan, layers: Sequence[int], fetcher: Fetcher) -> None:
        self._layers, self._fetcher = layers, fetcher
        self._runs: list[tuple[int, RowTokens]] = []  # number of the group of rows, and tokens of the run
        for number, budget in enumerate(plan.budgets):
            row = RowPrefix(budget.group, budget.restored)
            for first in range(0, row.tokens if budget.streamed else 0, _RUN_TOKENS):
                tokens = np.arange(first, min(first + _RUN_TOKENS, row.tokens))
                self._runs.append((number, RowTokens(row, tokens[None])))
        self._tables: dict[tuple[int, int], UnitTable] = {}  # by layer and number of the run

    def start(self) -> None:
        """Start to fetch the first run, if a layer has full attention. Raises RestoreError if that fails."""
        if self._layers:
            self._fetch_run(self._layers[0], 0)

    def attend(
        self, layer: int, call: AttentionCall, rotate_: Rotate, collect: Sequence[torch.Tensor | None] = ()
    ) -> torch.Tensor:
        """Return the output of a layer's attention, `[batch, heads, n, dim]`. Raises RestoreError if a block is gone.

        Rows that are not streamed attend to computed tokens only.

        Args:
            layer: Index of a layer with full attention.
            call: Attention among the computed tokens, with a mask `[batch, 1, n, n]`, or None for a causal one.
            rotate_: Rotates stored keys.
            collect: For each group of rows, `[kv_heads, tokens, dim]` to copy the rotated keys to, or None.
        """
        query, keys, values, mask, scaling, _, softcap, sinks = call
        causal = mask is None and query.shape[2] > 1
        merged = attention(query, keys, values, scaling, mask, causal, softcap)
        for number, (group, run) in enumerate(self._runs):
            self._fetch_run(layer, number)
            if number + 1 < len(self._runs):
                self._fetch_run(layer, number + 1, ahead=True)
            elif (place := self._layers.index(layer) + 1) < len(self._layers):
                self._fetch_run(self._layers[place], 0, ahead=True)
            table, rows = self._tables.pop((layer, number)), list(run.row.group.rows)
            table.wait(layer)
            shape = keys.shape[1], run.tokens.shape[1]
            run_keys = keys.new_empty(*shape, keys.shape[3])  # [kv_heads, run, dim]
            run_values = values.new_empty(*shape, values.shape[3])
            table.restore(run, layer, run_keys, run_values, rotate_)
            if collect and (key_buffer := collect[group]) is not None:
                first = int(run.tokens[0, 0])
                key_buffer[:, first : first + shape[1]] = run_keys
            is_slice = len(rows) == rows[-1] + 1 - rows[0]
            batch_rows = slice(rows[0], rows[-1] + 1) if is_slice else to_device(np.array(rows), query.device)
            batch = len(rows), -1, -1, -1
            all_keys, all_values = run_keys.expand(batch), run_values.expand(batch)
            partial = attention(query[batch_rows], all_keys, all_values, scaling, softcap=softcap)
            merged.join(batch_rows, partial)
            table.finish(layer)
        return merged.with_sinks(sinks).to(query.dtype)

    def _fetch_run(self, layer: int, number: int, ahead: bool = False) -> None:
        """Start to fetch a run for a layer, or the chunks of it that a prefetch had no room for."""
        table = self._tables.setdefault((layer, number), UnitTable(self._fetcher, (layer,)))
        self._fetcher.fetch(table.want(self._runs[number][1], (layer,)), ahead)
