"""Restoring within a budget: what a period attends to is chosen when its first layer has its queries.

Before that, the keys that the choice is made from are on their way, and so are, on a guess, the chunks that the period
before has chosen, as long as such guesses come true. Attention sees the period's own choice alone, so what is guessed
changes nothing but the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ..geometry import in_groups
from ..select.selector import Asked, Choice, Selector
from ..stats import Account
from ..store.segment import SegmentReader
from ..tiers.importance import TokenImportance
from ..tiers.residency import Residency
from ..tiers.resident import CoarseKeys
from .lanes import LaneFetch, LaneFetches, RowPrefix, copy_chosen, key_lanes, restoring_lanes, sets_of
from .plan import Plan
from .rechoose import LiveRow, LiveSelection, Rotate


class SelectiveRestore:
    """One pass that attends to a part of what it restores.

    Args:
        plan: with `attended`.
        layers: with full attention, ascending; the others are none of ours.
        selector: chooses.
        residency: the tiers.
        account: counts what happens.
        device_of: the device of each layer.
        guesses: whether the chunks of one period are fetched for the next before it chooses.
        importance: is told what attention each token gets, if not None.
        rechoose: columns between two choices while decoding; 0 for never.
    """

    def __init__(
        self,
        plan: Plan,
        layers: list[int],
        selector: Selector,
        residency: Residency,
        account: Account,
        device_of: Callable[[int], torch.device],
        guesses: bool = True,
        importance: TokenImportance | None = None,
        rechoose: int = 0,
    ) -> None:
        self.plan, self.selector = plan, selector
        self._rechoose = rechoose
        self._kept: dict[tuple[int, int], torch.Tensor] = {}  # keys that were chosen from, by period and row of _rows
        self.residency, self.account, self.device_of, self.guesses = residency, account, device_of, guesses
        self.importance = importance
        self._periods = in_groups(layers, selector.period, selector.lead)
        self._period_of = {layer: number for number, period in enumerate(self._periods) for layer in period}
        self._rows = [RowPrefix(group, plan.suffix - group.pad) for group in plan.groups if plan.suffix > group.pad]
        self._chosen: list[np.ndarray] = []  # for each of _rows int64 [sets, its tokens]
        self._fetches: dict[int, dict[tuple[SegmentReader, int], LaneFetch]] = {}  # of each period
        self._keys: dict[int, dict[tuple[SegmentReader, int], LaneFetch]] = {}  # of each period, in lanes of their own
        self._coarse: dict[tuple[SegmentReader, int], CoarseKeys] = {}  # by segment and layer
        self._lanes = LaneFetches(residency, account, device_of)
        self._live: LiveSelection | None = None

    def start(self) -> None:
        """Start to fetch what the first choice is made from. Call `cancel` in the end, also if this fails."""
        self._fetch_keys(0, self.selector.probe_heads)

    def cancel(self) -> None:
        """Let everything go, at whatever point the pass has ended."""
        for fetches in (*self._fetches.values(), *self._keys.values()):
            for fetch in fetches.values():
                fetch.release()

    def fill(
        self,
        layer: int,
        query: torch.Tensor,
        own_keys: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotate_: Rotate,
        scaling: float | None,
    ) -> None:
        """Bring what `layer`'s queries attend to.

        Args:
            query: `[batch, heads, queries, dim]`, rotated.
            own_keys: `[batch, kv_heads, queries, dim]`, rotated.
            keys: `[batch, kv_heads, attended, dim]`, to be filled; values likewise.
            rotate_: gives stored keys their rotation.
            scaling: of the logits, or None for dim ** -0.5.

        Raises:
            RestoreError: a block did not arrive.
        """
        number = self._period_of[layer]
        if layer == self._periods[number][0]:
            self._choose(number, query, own_keys, rotate_, scaling)
        fetches = self._fetches[number].values()
        mine = [fetch for fetch in fetches if layer in fetch.lane.layers]
        for fetch in mine:
            self._lanes.bring(fetch, fetch.used)  # what there was no room for before
        self._lanes.wait_for(mine)
        for row, chosen in zip(self._rows, self._chosen, strict=True):
            one, others = row.group.rows[0], list(row.group.rows[1:])
            begin = self.plan.attended - chosen.shape[1]  # a short row has fewer tokens: padding stands before them
            for tensor, name in ((keys, "key"), (values, "value")):
                copy_chosen(mine, row, chosen, layer, name, tensor[one, :, begin:])
            for heads, tokens in sets_of(chosen, keys.shape[1]):
                rotate_(keys[one : one + 1, heads, begin:], tokens)
            for tensor in (keys, values):
                tensor[list(row.group.rows), :, :begin] = 0  # padding is masked, but must be finite
                if others:
                    tensor[others, :, begin:] = tensor[one, :, begin:]
        for fetch in mine:
            if max(set(fetch.lane.layers) & set(self._periods[number])) == layer:
                self._lanes.finish(fetch)

    def live(self, layer: int, batch: int) -> tuple[LiveSelection, list[LiveRow | None]] | None:
        """What to choose from while decoding, and what a layer that was filled holds of each row; None for never."""
        if not self._rechoose:
            return None
        if self._live is None:
            columns, rows = self.plan.num_selected, self._rows
            self._live = LiveSelection(
                self.selector, self.residency, self.device_of, self._periods, rows, self._kept, columns, self._rechoose
            )
        held: list[LiveRow | None] = [None] * batch
        for place, (row, chosen) in enumerate(zip(self._rows, self._chosen, strict=True)):
            for one in row.group.rows:
                held[one] = LiveRow(place, chosen[0])
        return self._live, held

    # --- choosing

    def _choose(
        self, number: int, query: torch.Tensor, own_keys: torch.Tensor, rotate_: Rotate, scaling: float | None
    ) -> None:
        """Choose for a period, start to fetch all of it, and what can be known or guessed of the next one."""
        before, self._chosen, stalled = self._chosen, [], self.account.stats.stall_seconds
        with self.account.timing("select_seconds"):
            for place, row in enumerate(self._rows):
                one = row.group.rows[0]
                asked = Asked(
                    query[one],
                    own_keys[one],
                    partial(self._keys_of, number, place, rotate_),
                    scaling,
                    row.chunks,
                    min(self.plan.attended, row.tokens),
                )
                choice = self.selector.choose(asked)
                self._chosen.append(choice.tokens)
                self._note(number, row, choice)
        if before:
            right = [np.isin(now, then).mean() for now, then in zip(self._chosen, before, strict=True)]
            self.residency.guesses.note((self.selector, number), float(np.mean(right)))
        self.account.add(select_stall_seconds=self.account.stats.stall_seconds - stalled)
        for fetch in self._keys.pop(number, {}).values():
            self._lanes.finish(fetch)
        self._fetch(number, wanted=True)
        if number + 1 < len(self._periods):
            self._fetch_keys(number + 1, self.selector.probe_heads, ahead=True)
            if self.guesses and self.residency.guesses.worth((self.selector, number + 1)):
                self._fetch(number + 1, wanted=False)

    def _note(self, number: int, row: RowPrefix, choice: Choice) -> None:
        """Tell the tiers which chunks were chosen and what attention they get, and the store what its tokens get."""
        tokens, times = np.unique(choice.tokens, return_counts=True)
        share = times / len(choice.tokens)  # of the sets that want a token
        for piece in row.pieces():
            shape = piece.reader.shape
            if self.importance is not None:
                mass = choice.mass[piece.at : piece.at + piece.count]
                held, size = slice(piece.first, piece.first + len(mass)), (len(shape.layout.layers), shape.tokens)
                for layer in self._periods[number]:
                    self.importance.note(piece.reader.id, size, layer, held, mass)
            first, inside = row.inside(piece, tokens)
            mine = slice(first, first + len(inside))
            for lane in restoring_lanes(shape, self._periods[number]) if len(inside) else ():
                step = shape.geometry.chunk_tokens
                chunks, which = np.unique(shape.places(lane, inside) // step, return_inverse=True)
                held = np.minimum(step, shape.tokens - chunks * step)  # tokens of each
                self.residency.note_attention(
                    piece.reader.owner(lane.index),
                    shape.chunks,
                    chunks,
                    np.bincount(which, choice.mass[tokens[mine]]),
                    np.bincount(which, share[mine]) / held,
                )

    def _fetch(self, number: int, wanted: bool) -> None:
        """Start to fetch what is chosen for period `number`, or as long as nothing is, guess it."""
        fetches = self._fetches.setdefault(number, {})
        asked: dict[tuple[SegmentReader, int], list[np.ndarray]] = {}
        for row, chosen in zip(self._rows, self._chosen, strict=True):
            tokens = np.unique(chosen)
            for piece in row.pieces():
                inside = row.inside(piece, tokens)[1]
                for lane in restoring_lanes(piece.reader.shape, self._periods[number]) if len(inside) else ():
                    name = piece.reader, lane.index
                    fetches.setdefault(name, LaneFetch(piece.reader, lane))
                    asked.setdefault(name, []).append(inside)
        for name in sorted(asked, key=lambda name: fetches[name].lane.layers[0]):
            fetch, tokens = fetches[name], np.unique(np.concatenate(asked[name]))
            if wanted:
                fetch.used = tokens
            self._lanes.bring(fetch, tokens, ahead=not wanted or self._periods[number][0] not in fetch.lane.layers)

    # --- keys to choose by

    def _fetch_keys(self, number: int, heads: int | None, ahead: bool = False) -> None:
        """Start to fetch what a period's choice is made from, of some heads or all. What is done is not done again."""
        layer = self._periods[number][0]
        for row in self._rows:
            for piece in row.pieces():
                tokens = np.arange(piece.first, piece.first + min(piece.count, row.tokens - piece.at))
                if self.selector.resident:
                    tokens = np.arange(piece.reader.shape.tokens)  # the next prompt may share more of the segment
                    if (coarse := self._find_coarse(piece.reader, layer)) is not None:
                        self._coarse[piece.reader, layer] = coarse  # from here on in hand
                        continue
                for lane in key_lanes(piece.reader.shape, layer, heads):
                    # what also holds what is attended to is held on to
                    fetches = (self._keys if lane.identifies else self._fetches).setdefault(number, {})
                    fetch = fetches.setdefault((piece.reader, lane.index), LaneFetch(piece.reader, lane))
                    fetch.identifies = True
                    self._lanes.bring(fetch, tokens, ahead)

    def _keys_of(self, number: int, place: int, rotate_: Rotate, heads: int | None) -> torch.Tensor:
        """`[kv_heads, tokens, dim]`: the rotated keys of a row's restored tokens at a period's first layer."""
        row = self._rows[place]
        self._fetch_keys(number, heads)
        layer, every = self._periods[number][0], np.arange(row.tokens)
        keys = self._empty_keys(row.group.pieces[0].reader, layer, heads, row.tokens)
        for piece in row.pieces():
            if (coarse := self._coarse.get((piece.reader, layer))) is not None:
                coarse.write(keys[:, piece.at : piece.at + piece.count], piece.first)
                continue
            apart, among = (held.get(number, {}) for held in (self._keys, self._fetches))
            names = [(piece.reader, lane.index) for lane in key_lanes(piece.reader.shape, layer, heads)]
            fetches = [apart.get(name) or among[name] for name in names]
            self._lanes.wait_for(fetches)
            if self.selector.resident:
                coarse = self._coarsen(piece.reader, layer, fetches)
                coarse.write(keys[:, piece.at : piece.at + piece.count], piece.first)
            else:
                copy_chosen(fetches, row, every[None], layer, "key", keys)
        rotate_(keys.unsqueeze(0), every)
        if self._rechoose:
            self._kept[number, place] = keys
        return keys

    def _empty_keys(self, reader: SegmentReader, layer: int, heads: int | None, tokens: int) -> torch.Tensor:
        layout = reader.shape.layout
        kind = layout.layers[layer]
        count = kind.key_heads if heads is None else min(heads, kind.key_heads)
        return torch.empty(count, tokens, kind.key_dim, dtype=layout.dtype, device=self.device_of(layer))

    def _find_coarse(self, reader: SegmentReader, layer: int) -> CoarseKeys | None:
        return self.residency.resident.get(reader.key_owner(layer), self.device_of(layer))

    def _coarsen(self, reader: SegmentReader, layer: int, fetches: list[LaneFetch]) -> CoarseKeys:
        """Make a segment's keys resident. Also where they have just come whole, the coarse ones choose."""
        keys = self._empty_keys(reader, layer, None, reader.shape.tokens)
        tokens = np.arange(reader.shape.tokens)
        for fetch in fetches:
            for part in fetch.parts(layer, "key"):
                fetch.copy(part, slice(part.first_head, part.first_head + part.heads), tokens, keys, 0)
        coarse = self._coarse[reader, layer] = CoarseKeys.of(keys)
        if not reader.gone:
            self.residency.resident.admit(reader.key_owner(layer), coarse)
        return coarse
