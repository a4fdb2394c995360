"""Attention to all restored tokens without holding them: each layer fetches them run by run, and releases each run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .chosen import Gathers, RowPrefix
from .fetch import Fetcher, FetchUnit
from .live import Rotate
from .partial_attention import attention
from .plan import Plan

_RUN_TOKENS = 8192
"""Maximum number of tokens of a run: enough to keep a kernel and a disk busy."""


class StreamedPrefix:
    """Restored tokens of a pass, for layers with full attention that attend to all of them.

    While a layer attends to one run of tokens, the next is fetched, so two runs of one layer are in memory.

    Args:
        plan: Plan of the pass.
        layers: Layers with full attention, ascending.
        fetcher: Fetcher of the pass.
    """

    def __init__(self, plan: Plan, layers: Sequence[int], fetcher: Fetcher) -> None:
        self._layers, self._fetcher = layers, fetcher
        suffix = plan.suffix or 0
        rows = [RowPrefix(group, suffix - group.pad) for group in plan.groups if suffix > group.pad]
        self._runs: list[tuple[int, Gathers]] = []  # row number, and tokens of the run
        for number, row in enumerate(rows):
            for first in range(0, row.tokens, _RUN_TOKENS):
                tokens = np.arange(first, min(first + _RUN_TOKENS, row.tokens))
                self._runs.append((number, Gathers(row, tokens[None])))
        self._units: dict[tuple[int, int], list[FetchUnit]] = {}  # by layer and number of the run

    def start(self) -> None:
        """Start to fetch the first run.

        Raises:
            RestoreError: A fetch could not be started.
        """
        self._bring(self._layers[0], 0)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        rotate_: Rotate,
        scaling: float | None,
        collect: Sequence[torch.Tensor | None] = (),
    ) -> torch.Tensor:
        """Return the output of a layer's attention, `[batch, heads, n, dim]`.

        Args:
            layer: Index of a layer with full attention.
            query: `[batch, heads, n, dim]`, rotated.
            keys: `[batch, kv_heads, n, dim]`, keys of the same tokens, rotated.
            values: Like `keys`.
            mask: Mask among these tokens, `[batch, 1, n, n]`; None for a causal one.
            rotate_: Rotates stored keys.
            scaling: Scale of the logits; None for dim ** -0.5.
            collect: For each row group that restores tokens, `[kv_heads, tokens, dim]` to copy their rotated keys to,
                or None.

        Raises:
            RestoreError: A block did not arrive.
        """
        found = attention(query, keys, values, scaling, mask, causal=mask is None and query.shape[2] > 1)
        for number, (place, gathers) in enumerate(self._runs):
            self._bring(layer, number)
            self._bring_next(layer, number)
            units = self._units.pop((layer, number))
            self._fetcher.wait_for(units)
            tokens, rows = gathers.chosen, list(gathers.row.group.rows)
            shape = keys.shape[1], tokens.shape[1]
            some_keys = keys.new_empty(*shape, keys.shape[3])  # [kv_heads, run, dim]
            some_values = values.new_empty(*shape, values.shape[3])
            gathers.copy(units, layer, "key", some_keys)
            gathers.copy(units, layer, "value", some_values)
            rotate_(some_keys, tokens, gathers.row.tokens)
            if place < len(collect) and (whole := collect[place]) is not None:
                whole[:, tokens[0]] = some_keys
            asking = slice(rows[0], rows[-1] + 1) if len(rows) == rows[-1] + 1 - rows[0] else torch.tensor(rows)
            batch = len(rows), -1, -1, -1
            seen = attention(query[asking], some_keys.expand(batch), some_values.expand(batch), scaling)
            found.join(asking, seen)
            gathers.note_use(units, (layer,))
            gathers.forget(units)
            self._fetcher.finish(units)
        return found.output.to(query.dtype)

    def _bring(self, layer: int, number: int, ahead: bool = False) -> None:
        """Start to fetch a run for a layer, or the chunks of it that a prefetch had no room for."""
        gathers = self._runs[number][1]
        known = self._units.setdefault((layer, number), [])
        units = {(unit.reader, unit.block_group.index): unit for unit in known}
        wanted = []
        for piece, block_group, tokens in gathers.wanted((layer,)):
            name = piece.reader, block_group.index
            if name not in units:
                units[name] = FetchUnit(piece.reader, block_group)
                known.append(units[name])
            wanted.append((units[name], units[name].chunks_of(tokens)))
        self._fetcher.bring(wanted, ahead)

    def _bring_next(self, layer: int, number: int) -> None:
        if number + 1 < len(self._runs):
            self._bring(layer, number + 1, ahead=True)
        elif (place := self._layers.index(layer) + 1) < len(self._layers):
            self._bring(self._layers[place], 0, ahead=True)
