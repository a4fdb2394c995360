"""Choosing again while decoding: what a period attends to follows the queries of the tokens to come.

The keys that the choice is made from stay in memory, rotated. What is chosen takes the columns of what is chosen no
more: attention asks for no order, since every key carries its position. Blocks that were let go come back from the
tiers. Beyond the paper, which chooses once for a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..select.selector import Asked, Selector
from ..stats import Account
from ..store.segment import SegmentReader
from ..tiers.residency import Residency
from .lanes import LaneFetch, LaneFetches, RowPrefix, copy_chosen, restoring_lanes

Rotate = Callable[[torch.Tensor, np.ndarray], None]
"""Rotates, in place, `[1, heads, n, dim]` to the positions int64 `[n]`."""


@dataclass(frozen=True, eq=False)
class LiveSelection:
    """What a cache chooses from as long as it lives.

    Args:
        selector: chooses, one set for all heads.
        residency: the tiers.
        device_of: the device of each layer.
        periods: layers that share a choice.
        prefixes: what is restored of each group of rows.
        keys: by period and prefix the restored tokens' keys at the period's first layer, rotated: `[kv_heads, tokens,
            dim]`, of as many heads as the selector asks.
        columns: restored ones that a layer holds of each row.
        every: columns between two choices.
    """

    selector: Selector
    residency: Residency
    device_of: Callable[[int], torch.device]
    periods: Sequence[Sequence[int]]
    prefixes: Sequence[RowPrefix]
    keys: dict[tuple[int, int], torch.Tensor]
    columns: int
    every: int

    def period_of(self, layer: int) -> int:
        """The number of a layer's period."""
        return next(number for number, period in enumerate(self.periods) if layer in period)


@dataclass(eq=False)
class LiveRow:
    """What one layer holds of one row.

    Args:
        prefix: number of its prefix.
        tokens: int64 `[n]`, those restored ones that it holds, in the order of their columns: the last n of as many as
            a layer holds of each row, for padding stands before them.
    """

    prefix: int
    tokens: np.ndarray


class Rechoice:
    """The choices of one pass.

    Args:
        live: what is chosen from.
        account: counts what happens.
    """

    def __init__(self, live: LiveSelection, account: Account) -> None:
        self._live, self._account = live, account
        self._lanes = LaneFetches(live.residency, account, live.device_of)
        self._chosen: dict[int, list[np.ndarray | None]] = {}  # of each period, for each row int64 [n], ascending
        self._fetches: dict[int, dict[tuple[SegmentReader, int], LaneFetch]] = {}

    def cancel(self) -> None:
        """Let everything go, at whatever point the pass has ended."""
        for fetches in self._fetches.values():
            for fetch in fetches.values():
                fetch.release()

    def follow(
        self,
        layer: int,
        rows: Sequence[LiveRow | None],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
    ) -> list[LiveRow | None]:
        """Put what is chosen for a layer's queries in the place of what is chosen no more.

        Args:
            layer: with full attention.
            rows: what it holds; None for rows of which nothing was restored.
            query: `[batch, heads, n, dim]`, rotated.
            keys: `[batch, kv_heads, columns, dim]`, all that it holds, the restored ones in front; values likewise.
            rotate_: rotates stored keys.
            scaling: of the logits, or None for dim ** -0.5.

        Returns:
            What it holds now.

        Raises:
            RestoreError: a block did not arrive; nothing has changed.
        """
        live, number = self._live, self._live.period_of(layer)
        period = live.periods[number]
        if layer == period[0]:
            self._choose(number, rows, query, keys[:, :, live.columns :], scaling)
            self._bring(number, rows, period)
        else:  # after a pass that failed in between it may lack more than the first layer did
            self._bring(number, rows, (layer,))
        fetches = [fetch for fetch in self._fetches[number].values() if layer in fetch.lane.layers]
        self._lanes.wait_for(fetches)
        now: list[LiveRow | None] = []
        for batch_row, (held, chosen) in enumerate(zip(rows, self._chosen[number], strict=True)):
            if held is None or chosen is None:
                now.append(held)
                continue
            new = np.setdiff1d(chosen, held.tokens, assume_unique=True)
            columns = np.flatnonzero(np.isin(held.tokens, chosen, invert=True, assume_unique=True))
            if len(new):
                prefix, first = live.prefixes[held.prefix], live.columns - len(held.tokens)
                at = torch.from_numpy(columns + first).to(keys.device)
                for name, target in (("key", keys), ("value", values)):
                    came = target.new_empty(target.shape[1], len(new), target.shape[3])  # [kv_heads, new, dim]
                    copy_chosen(fetches, prefix, new[None], layer, name, came)
                    if name == "key":
                        rotate_(came.unsqueeze(0), new)
                    target[batch_row].index_copy_(1, at, came)
            tokens = held.tokens.copy()
            tokens[columns] = new
            now.append(LiveRow(held.prefix, tokens))
        if layer == period[-1]:
            for fetch in self._fetches.pop(number).values():
                self._lanes.finish(fetch)
        return now

    def _choose(
        self,
        number: int,
        rows: Sequence[LiveRow | None],
        query: torch.Tensor,
        own_keys: torch.Tensor,
        scaling: float | None,
    ) -> None:
        """Choose for a period."""
        with self._account.timing("select_seconds"):
            self._chosen[number] = [
                None if held is None else self._chosen_for(number, held, query[row], own_keys[row], scaling)
                for row, held in enumerate(rows)
            ]

    def _bring(self, number: int, rows: Sequence[LiveRow | None], layers: Sequence[int]) -> None:
        """Start to fetch what is chosen and not among `rows`, for some layers of a period."""
        live, fetches = self._live, self._fetches.setdefault(number, {})
        for held, tokens in zip(rows, self._chosen[number], strict=True):
            if held is None or tokens is None:
                continue
            prefix, new = live.prefixes[held.prefix], np.setdiff1d(tokens, held.tokens, assume_unique=True)
            for piece in prefix.pieces() if len(new) else ():
                inside = prefix.inside(piece, new)[1]
                for lane in restoring_lanes(piece.reader.shape, layers) if len(inside) else ():
                    fetch = fetches.setdefault((piece.reader, lane.index), LaneFetch(piece.reader, lane))
                    fetch.used = np.union1d(fetch.used, inside)
                    self._lanes.bring(fetch, fetch.used)

    def _chosen_for(
        self, number: int, held: LiveRow, query: torch.Tensor, own_keys: torch.Tensor, scaling: float | None
    ) -> np.ndarray:
        """int64 `[n]`, ascending: as many tokens as the row holds."""
        live = self._live
        keys = live.keys[number, held.prefix]
        chunks = live.prefixes[held.prefix].chunks
        asked = Asked(query, own_keys, lambda heads: keys, scaling, chunks, len(held.tokens))
        return live.selector.choose(asked).tokens[0]
