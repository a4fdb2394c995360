"""The shape of one segment: its block groups, where their blocks lie, and which token lies in which of their slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from .codecs import Codec, make_codec, merged_codec
from .errors import FormatError
from .geometry import HASH_TOKENS, BlockGroup, Geometry, KVLayout, Part, block_groups
from .transfers import to_device

NOT_HELD = 0xFFFFFFFF
"""In a token table: the block group does not hold this token."""

IN_ORDER = 0xFFFFFFFF
"""In place of a table's number: the block group holds all tokens, one after the other."""


@dataclass(frozen=True, eq=False)
class TokenTables:
    """Which tokens of a segment its block groups hold, and in which slots. Slot s is in chunk s // chunk tokens.

    Block groups hold tokens in an order of their own, the most important first (IMPRESS, Section 4.4.1: the mapping
    list), or only some of them.

    Args:
        slot_of_token: uint32 `[tables, tokens]`; in each table the slots of the tokens held are 0, 1, 2, ... in any
            order, and the others are `NOT_HELD`.
        of_group: uint32 `[block_groups]`, the number of each block group's table, or `IN_ORDER`.
        importance: float32 `[tokens]`, what a passage's order goes by: tokens of other segments are compared with it.

    Raises:
        FormatError: these are no such tables.
    """

    slot_of_token: np.ndarray
    of_group: np.ndarray
    importance: np.ndarray | None = None

    def __post_init__(self) -> None:
        held = np.sort(self.slot_of_token, axis=1)
        counted = np.arange(self.slot_of_token.shape[1], dtype=np.uint32)
        if ((held != counted) & (held != NOT_HELD)).any():  # sorted, so what is not held is behind what is
            raise FormatError("a token table gives slots twice, or leaves some out")
        if ((self.of_group >= len(self.slot_of_token)) & (self.of_group != IN_ORDER)).any():
            raise FormatError("a block group names a token table that is not there")

    @classmethod
    def by_importance(
        cls, importance: np.ndarray, groups: Sequence[BlockGroup], kept: np.ndarray | None = None
    ) -> TokenTables:
        """The most important tokens first, of equals the first.

        Args:
            importance: float `[layers, heads, tokens]`; 1 layer or head stands for all. A block group goes by its first
                layer's heads together. One with a window, or of an index, is left in order, since it is read in order.
            groups: the segment's block groups.
            kept: see `importance` of the class.
        """
        layers, heads, tokens = importance.shape
        number_of: dict[bytes, int] = {}  # block groups may share an order
        rows: list[np.ndarray] = []
        of_group = np.full(len(groups), IN_ORDER, np.uint32)
        for group in groups:
            if group.window or group.identifies:
                continue
            mine = {head for part in group.parts for head in range(part.first_head, part.first_head + part.heads)}
            some = sorted(mine) if heads > 1 else [0]
            total = importance[group.layers[0] if layers > 1 else 0, some].sum(axis=0)
            row = np.argsort(np.argsort(-total, kind="stable")).astype(np.uint32)
            number = of_group[group.index] = number_of.setdefault(row.tobytes(), len(rows))
            if number == len(rows):
                rows.append(row)
        return cls(np.stack(rows) if rows else np.empty((0, tokens), np.uint32), of_group, kept)

    @classmethod
    def by_layer(
        cls, slot_of_token: np.ndarray, groups: Sequence[BlockGroup], importance: np.ndarray | None = None
    ) -> TokenTables:
        """The same from slots, uint32 `[layers, tokens]` or `[1, tokens]`."""
        number_of: dict[bytes, int] = {}  # layers may share an order
        rows: list[np.ndarray] = []
        of_group = np.full(len(groups), IN_ORDER, np.uint32)
        for group in groups:
            if group.window or group.identifies:
                continue
            row = slot_of_token[group.layers[0] if len(slot_of_token) > 1 else 0]
            number = of_group[group.index] = number_of.setdefault(row.tobytes(), len(rows))
            if number == len(rows):
                rows.append(row)
        tables = np.stack(rows) if rows else np.empty((0, slot_of_token.shape[1]), np.uint32)
        return cls(tables, of_group, importance)

    @classmethod
    def by_pairs(
        cls,
        stored_from: Sequence[int],
        retained: Mapping[tuple[int, int], np.ndarray],
        groups: Sequence[BlockGroup],
        tokens: int,
    ) -> TokenTables:
        """Which tokens lie in a layer's own block groups, and which in those that it shares, each in order.

        A pair shares the tokens that both layers hold, but for those that are retained; each layer holds the rest by
        itself.

        Args:
            stored_from: for each layer the first token that it holds.
            retained: of each pair of the geometry int64 `[n]`, the tokens that stay unmerged; a pair that is not named
                retains none.
            groups: the segment's block groups. One of several layers holds what any of them does.
            tokens: of the segment.
        """
        every, none = np.arange(tokens), np.empty(0, np.int64)
        alone, shared = [every >= first for first in stored_from], {}  # bool [tokens] each
        for pair in {group.layers for group in groups if group.merged}:
            first, second = pair
            shared[pair] = alone[first] & alone[second]
            shared[pair][retained.get((first, second), none)] = False
            alone[first], alone[second] = (alone[layer] & ~shared[pair] for layer in pair)
        number_of: dict[bytes, int] = {}
        rows: list[np.ndarray] = []
        of_group = np.full(len(groups), IN_ORDER, np.uint32)
        for group in groups:
            held = shared[group.layers] if group.merged else np.any([alone[layer] for layer in group.layers], axis=0)
            if held.all():
                continue
            number = of_group[group.index] = number_of.setdefault(held.tobytes(), len(rows))
            if number == len(rows):
                rows.append(np.where(held, np.cumsum(held) - 1, NOT_HELD).astype(np.uint32))
        return cls(np.stack(rows) if rows else np.empty((0, tokens), np.uint32), of_group)

    def as_layers(self, groups: Sequence[BlockGroup], layers: int) -> np.ndarray | None:
        """The reverse of `by_layer`: uint32 `[layers, tokens]`, or None where that does not say it all."""
        tokens = self.slot_of_token.shape[1]
        rows = np.tile(np.arange(tokens, dtype=np.uint32), (layers, 1))
        number_of: dict[int, int] = {}
        for group, number in zip(groups, self.of_group.tolist(), strict=True):
            if group.window or group.identifies:
                if number != IN_ORDER:
                    return None
            elif number_of.setdefault(group.layers[0], number) != number:
                return None  # heads apart
            elif number != IN_ORDER:
                rows[list(group.layers)] = self.slot_of_token[number]
        return None if (rows == NOT_HELD).any() else rows

    def same(self, other: TokenTables | None) -> bool:
        """Whether both say the same of where tokens lie; None says that all lie in order."""
        if other is None:
            return bool((self.of_group == IN_ORDER).all())
        return np.array_equal(self.slot_of_token, other.slot_of_token) and np.array_equal(self.of_group, other.of_group)


@dataclass(frozen=True)
class SegmentShape:
    """The block groups of one segment, where its blocks lie, and where in them its tokens."""

    layout: KVLayout
    geometry: Geometry
    tokens: int
    tables: TokenTables | None = None
    """None: every block group holds all tokens in order."""

    @cached_property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        return block_groups(self.layout, self.geometry)

    @cached_property
    def restoring_groups(self) -> dict[int, list[BlockGroup]]:
        """By layer the block groups that it is restored from: a decoded token asks at each layer."""
        found: dict[int, list[BlockGroup]] = {}
        for group in self.block_groups:
            for layer in () if group.identifies else group.layers:
                found.setdefault(layer, []).append(group)
        return found

    def codec_of(self, group: BlockGroup) -> Codec:
        """What stands between tensors and the bytes of a block group's blocks."""
        return (merged_codec if group.merged else make_codec)(self.geometry.codec)

    # --- blocks

    def chunks_in(self, group: BlockGroup) -> int:
        """How many chunks, and so blocks, a block group has."""
        return self._chunks[group.index]

    def first_block(self, group: int) -> int:
        """The number, in the segment, of a block group's first block."""
        return self._first_blocks[group]

    @property
    def block_count(self) -> int:
        return self._first_blocks[-1]

    @cached_property
    def group_offsets(self) -> tuple[int, ...]:
        """Byte offset of each block group from the first block, and the total at the end."""
        offsets = [0]
        for group in self.block_groups:
            offsets.append(offsets[-1] + group.block_bytes * self.chunks_in(group))
        return tuple(offsets)

    @property
    def blocks_bytes(self) -> int:
        return self.group_offsets[-1]

    @cached_property
    def _chunks(self) -> tuple[int, ...]:
        return tuple(-(-self.tokens_in(group) // self.geometry.chunk_tokens) for group in self.block_groups)

    @cached_property
    def _first_blocks(self) -> tuple[int, ...]:
        return (0, *np.cumsum(self._chunks).tolist())

    # --- tokens

    def in_order(self, group: BlockGroup) -> bool:
        """Whether a block group holds all tokens, one after the other."""
        return self.tables is None or self.tables.of_group[group.index] == IN_ORDER

    def tokens_in(self, group: BlockGroup) -> int:
        """How many tokens a block group holds."""
        return self.tokens if self.in_order(group) else int(self._held_of_table[self._table(group)])

    def slot_of_token(self, group: BlockGroup, tokens: np.ndarray) -> np.ndarray:
        """The slots, int64, of some tokens, int64, in a block group: each `NOT_HELD` or at chunk s // chunk tokens."""
        if self.tables is None or self.in_order(group):
            return tokens
        return self.tables.slot_of_token[self._table(group)][tokens].astype(np.int64)

    def tokens_by_slot(self, group: BlockGroup) -> np.ndarray:
        """int64 `[tokens_in(group)]`: the token in each slot of a block group."""
        tokens = np.arange(self.tokens)
        slots = self.slot_of_token(group, tokens)
        found = np.empty(self.tokens_in(group), np.int64)
        held = slots < len(found)
        found[slots[held]] = tokens[held]
        return found

    def held_by(self, group: BlockGroup, tokens: np.ndarray) -> np.ndarray:
        """Those of `tokens`, int64, that a block group holds."""
        return tokens if self.in_order(group) else tokens[self.slot_of_token(group, tokens) != NOT_HELD]

    @cached_property
    def held(self) -> np.ndarray:
        """bool `[layers, tokens]`: which tokens a layer holds, in whichever of its block groups.

        Raises:
            FormatError: see `check_tables`.
        """
        every = np.arange(self.tokens)
        of_part: dict[tuple[int, str, int], np.ndarray] = {}  # heads, and tensors, may lie apart
        for group in self.block_groups:
            mine = self.slot_of_token(group, every) != NOT_HELD
            for part in group.parts if not group.identifies else ():
                before = of_part.setdefault((part.layer, part.tensor, part.first_head), np.zeros(self.tokens, bool))
                if (before & mine).any():
                    raise FormatError(f"layer {part.layer} holds tokens twice: by itself, and in its pair")
                before |= mine
        held = np.ones((len(self.layout.layers), self.tokens), bool)
        for (layer, *_), tokens in of_part.items():
            held[layer] &= tokens
        return held

    def check_tables(self) -> None:
        """Raises FormatError if a layer holds a token by itself, and once more in its pair."""
        _ = self.held

    @cached_property
    def held_from(self) -> tuple[int, ...]:
        """For each layer the token from which on it holds all: what stands before is for a method to compute."""
        lacking = ~self.held[:, ::-1]  # from the last token on
        return tuple(np.where(lacking.any(1), self.tokens - lacking.argmax(1), 0).tolist())

    def chunks_of(self, group: BlockGroup, tokens: np.ndarray) -> np.ndarray:
        """The chunks of a block group that hold `tokens`, ascending.

        Raises:
            ValueError: it does not hold them.
        """
        slots = self.slot_of_token(group, tokens)
        if len(slots) and slots.max() >= self.tokens_in(group):
            raise ValueError(f"block group {group.index} holds a part of its tokens, and not all that are asked for")
        return np.unique(slots // self.geometry.chunk_tokens)

    def first_token(self, group: BlockGroup, chunk: int) -> int:
        """The first token, in the segment's order, of a chunk."""
        step = self.geometry.chunk_tokens
        first = chunk * step
        return first if self.in_order(group) else int(self.tokens_by_slot(group)[first : first + step].min())

    @cached_property
    def whole_hashes(self) -> int:
        """How many of the segment's prefix hashes, from the first on, cover tokens of which nothing is missing."""
        if self.tables is None or not self._held_of_table.size:
            return self.tokens // HASH_TOKENS
        if self.geometry.pairs:
            missing = (~self.held).any(axis=0)
        else:  # also in what stands beside the layers' own, such as an index
            missing = (self.tables.slot_of_token == NOT_HELD).any(axis=0)
        return int(missing.argmax() if missing.any() else self.tokens) // HASH_TOKENS

    @property
    def whole(self) -> bool:
        """Whether every block group holds all tokens. Those of pairs share them."""
        return not self.geometry.pairs and self.whole_hashes * HASH_TOKENS == self.tokens

    def _table(self, group: BlockGroup) -> int:
        assert self.tables is not None
        return int(self.tables.of_group[group.index])

    @cached_property
    def _held_of_table(self) -> np.ndarray:
        """int64 `[tables]`: how many tokens each holds."""
        assert self.tables is not None
        return (self.tables.slot_of_token != NOT_HELD).sum(axis=1)

    # --- tensors

    def field_views(self, blocks: torch.Tensor, part: Part) -> tuple[torch.Tensor, ...]:
        """The typed views of a part's fields in `blocks`, uint8 `[n, block_bytes]`: `[n, heads, chunk_tokens, dim]`."""
        return tuple(
            blocks[:, slot.offset : slot.offset + slot.nbytes]
            .view(slot.dtype)
            .unflatten(1, (part.heads, self.geometry.chunk_tokens, slot.dim))
            for slot in part.fields
        )

    def pack(self, blocks: torch.Tensor, group: BlockGroup, part: Part, source: torch.Tensor) -> None:
        """Write one part of all tokens, `[heads, tokens, dim]`, into a group's `blocks`, uint8 `[chunks, block_bytes]`.

        Tokens that the block group does not hold are left out.

        Raises:
            ValueError: it is a merged one, which takes two layers (see `codecs.pairs`).
        """
        if group.merged:
            raise ValueError(f"block group {group.index} is of two layers, and cannot be packed from one")
        self.pack_fields(blocks, group, part, self.codec_of(group).encode(source))

    def pack_fields(
        self, blocks: torch.Tensor, group: BlockGroup, part: Part, fields: tuple[torch.Tensor, ...]
    ) -> None:
        """The same of what is coded already, `[heads, tokens, field's dim]` each."""
        chunk = self.geometry.chunk_tokens
        for target, source in zip(self.field_views(blocks, part), fields, strict=True):
            if not self.in_order(group):
                source = source[:, to_device(self.tokens_by_slot(group), source.device)]
            whole, rest = divmod(source.shape[1], chunk)
            if whole:
                target[:whole] = source[:, : whole * chunk].unflatten(1, (whole, chunk)).transpose(0, 1)
            if rest:
                target[whole, :, :rest] = source[:, whole * chunk :]

    def unpack(self, blocks: torch.Tensor, group: BlockGroup, part: Part) -> torch.Tensor:
        """The reverse of `pack`: `[heads, tokens, dim]`, a copy."""
        return self.codec_of(group).decode(self.unpack_fields(blocks, group, part), self.layout.dtype)

    def unpack_fields(self, blocks: torch.Tensor, group: BlockGroup, part: Part) -> tuple[torch.Tensor, ...]:
        """The reverse of `pack_fields`, a copy; zeros for tokens that the block group does not hold."""
        views, held = self.field_views(blocks, part), self.tokens_in(group)
        by_slot = [view.transpose(0, 1).flatten(1, 2)[:, :held] for view in views]  # [heads, held, field's dim]
        if self.in_order(group):
            return tuple(by_slot)
        tokens, found = torch.from_numpy(self.tokens_by_slot(group)), []
        for field in by_slot:
            found.append(field.new_zeros(field.shape[0], self.tokens, field.shape[2]))
            found[-1][:, tokens] = field
        return tuple(found)
