"""Shape of a segment: its KV cache groups, the offsets of their blocks, and the slot of each token in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import FormatError
from .codecs import Codec, checked_decode, checked_encode, make_codec, merged_codec
from .geometry import HASH_TOKENS, BlockGroup, Geometry, JoinedParts, KVLayout, Part, block_groups
from .lazy import torch
from .memory import aligned_bytes, to_device

NOT_HELD = 0xFFFFFFFF
"""Entry of a token table: the KV cache group does not hold this token."""

IN_ORDER = 0xFFFFFFFF
"""Entry in place of a table index: the KV cache group holds all tokens in order."""


@dataclass(frozen=True, eq=False)
class TokenTables:
    """Tokens that the KV cache groups of a segment hold, and their slots.

    Slot s is offset s % chunk_tokens in chunk s // chunk_tokens. KV cache groups may hold the tokens in an order of
    their own, the most important first (IMPRESS, Section 4.4.1: the mapping list), or only some of them.

    Args:
        slot_of_token: uint32 `[tables, tokens]`. In each table, the slots of the held tokens are 0, 1, 2, ... in any
            order, and the other entries are `NOT_HELD`.
        of_group: uint32 `[block_groups]`, the table index of each KV cache group, or `IN_ORDER`.

    Raises:
        FormatError: The arrays are not valid tables.
    """

    slot_of_token: np.ndarray
    of_group: np.ndarray

    def __post_init__(self) -> None:
        sorted_slots = np.sort(self.slot_of_token, axis=1)
        counted = np.arange(self.slot_of_token.shape[1], dtype=np.uint32)
        if ((sorted_slots != counted) & (sorted_slots != NOT_HELD)).any():  # sorted: NOT_HELD comes last
            raise FormatError("a token table contains block offsets twice, or omits some")
        if ((self.of_group >= len(self.slot_of_token)) & (self.of_group != IN_ORDER)).any():
            raise FormatError("a KV cache group refers to a token table that does not exist")

    @classmethod
    def by_importance(cls, importance: np.ndarray, groups: Sequence[BlockGroup]) -> TokenTables:
        """Return tables with the most important tokens first; tokens of equal importance keep their order.

        `importance` is float `[layers, heads, tokens]`; a size of 1 applies to all layers or heads. A KV cache group
        uses the sum over its heads, in its first layer. Groups with a sliding window, and groups of an index, keep
        their order, since they are read in order.
        """
        layers, heads, tokens = importance.shape
        slots: list[np.ndarray | None] = []
        for group in groups:
            if group.window or group.identifies:
                slots.append(None)
                continue
            group_heads = {
                head for part in group.parts for head in range(part.first_head, part.first_head + part.heads)
            }
            ranked_heads = sorted(group_heads) if heads > 1 else [0]
            total = importance[group.layers[0] if layers > 1 else 0, ranked_heads].sum(axis=0)
            slots.append(np.argsort(np.argsort(-total, kind="stable")))
        return cls._by_group(slots, tokens)

    @classmethod
    def by_pairs(
        cls,
        stored_from: Sequence[int],
        retained: Mapping[tuple[int, int], np.ndarray],
        groups: Sequence[BlockGroup],
        tokens: int,
    ) -> TokenTables:
        """Return tables for layers merged in pairs: the tokens of each layer's own groups and of the shared groups.

        A pair shares the tokens that both layers hold, except the retained ones. Each layer holds the other tokens in
        its own groups. All groups keep the order of the tokens.

        Layers hold the tokens from `stored_from` on. `retained` are the tokens that stay unmerged in each pair, int64
        `[n]`; a pair that is missing retains none. A group of several layers holds what any of them holds.
        """
        all_tokens, no_tokens = np.arange(tokens), np.empty(0, np.int64)
        alone, shared = [all_tokens >= first for first in stored_from], {}  # bool [tokens] each
        for pair in {group.layers for group in groups if group.merged}:
            first, second = pair
            shared[pair] = alone[first] & alone[second]
            shared[pair][retained.get((first, second), no_tokens)] = False
            alone[first], alone[second] = (alone[layer] & ~shared[pair] for layer in pair)
        slots: list[np.ndarray | None] = []
        for group in groups:
            is_held = shared[group.layers] if group.merged else np.any([alone[layer] for layer in group.layers], axis=0)
            slots.append(None if is_held.all() else np.where(is_held, np.cumsum(is_held) - 1, NOT_HELD))
        return cls._by_group(slots, tokens)

    @classmethod
    def of_first(cls, counts: Sequence[int], groups: Sequence[BlockGroup], tokens: int) -> TokenTables:
        """Return tables for the first tokens of each layer, `counts` of them: the ones that `by_pairs` leaves out."""
        all_tokens = np.arange(tokens)
        of_group = [max(counts[layer] for layer in group.layers) for group in groups]
        return cls._by_group([np.where(all_tokens < count, all_tokens, NOT_HELD) for count in of_group], tokens)

    @classmethod
    def _by_group(cls, slots: Sequence[np.ndarray | None], tokens: int) -> TokenTables:
        """Return tables for the slots of each group, `[tokens]`, or None: in order. Equal slots share a table."""
        numbers: dict[bytes, int] = {}
        of_group = np.full(len(slots), IN_ORDER, np.uint32)
        for group, slots_of_group in enumerate(slots):
            if slots_of_group is not None:
                of_group[group] = numbers.setdefault(slots_of_group.astype(np.uint32).tobytes(), len(numbers))
        tables = np.frombuffer(b"".join(numbers), np.uint32).reshape(len(numbers), tokens)
        return cls(tables, of_group)

    def same(self, other: TokenTables | None) -> bool:
        """Return whether both tables give the same slots; None means that all tokens are in order."""
        if other is None:
            return bool((self.of_group == IN_ORDER).all())
        return np.array_equal(self.slot_of_token, other.slot_of_token) and np.array_equal(self.of_group, other.of_group)


@dataclass(frozen=True)
class SegmentShape:
    """KV cache groups of a segment, the offsets of its blocks, and the slots of its tokens."""

    layout: KVLayout
    geometry: Geometry
    tokens: int
    tables: TokenTables | None = None
    """Token tables; None if every KV cache group holds all tokens in order."""

    @cached_property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        return block_groups(self.layout, self.geometry)

    @cached_property
    def restoring_groups(self) -> dict[int, list[BlockGroup]]:
        """KV cache groups that restore each layer, by layer. Cached: each decoded token needs them at each layer."""
        groups_by_layer: dict[int, list[BlockGroup]] = {}
        for group in self.block_groups:
            for layer in () if group.identifies else group.layers:
                groups_by_layer.setdefault(layer, []).append(group)
        return groups_by_layer

    def codec_of(self, group: BlockGroup) -> Codec:
        """Return the codec between tensors and the bytes of a KV cache group's blocks."""
        return merged_codec(self.geometry.codec) if group.merged else self._codec

    @cached_property
    def _codec(self) -> Codec:
        return make_codec(self.geometry.codec)

    # --- blocks

    def chunks_in(self, group: BlockGroup) -> int:
        """Return the number of chunks of a KV cache group, which is its number of blocks."""
        return self._chunks[group.index]

    @cached_property
    def first_blocks(self) -> tuple[int, ...]:
        """Index, in the segment, of the first block of each KV cache group, followed by the number of all blocks."""
        return (0, *np.cumsum(self._chunks).tolist())

    @cached_property
    def group_offsets(self) -> tuple[int, ...]:
        """Byte offset of each KV cache group from the first block, followed by the total size."""
        offsets = [0]
        for group in self.block_groups:
            offsets.append(offsets[-1] + group.block_bytes * self.chunks_in(group))
        return tuple(offsets)

    @property
    def blocks_bytes(self) -> int:
        return self.group_offsets[-1]

    @cached_property
    def token_bytes(self) -> float:
        """Bytes of a token's KV in blocks, if no layers are merged, and without the copy for an index."""
        stored_groups = (group for group in self.block_groups if not (group.merged or group.identifies))
        return sum(group.block_bytes for group in stored_groups) / self.geometry.chunk_tokens

    @cached_property
    def _chunks(self) -> tuple[int, ...]:
        return tuple(-(-self.tokens_in(group) // self.geometry.chunk_tokens) for group in self.block_groups)

    # --- tokens

    def in_order(self, group: BlockGroup) -> bool:
        """Return whether a KV cache group holds all tokens in order."""
        return self.tables is None or self.tables.of_group[group.index] == IN_ORDER

    def tokens_in(self, group: BlockGroup) -> int:
        """Return the number of tokens that a KV cache group holds."""
        return self.tokens if self.in_order(group) else int(self._held_of_table[self._table(group)])

    def slot_of_token(self, group: BlockGroup, tokens: np.ndarray) -> np.ndarray:
        """Return the slots of `tokens` in a KV cache group, int64 both; `NOT_HELD` for tokens that it does not hold."""
        if self.tables is None or self.in_order(group):
            return tokens
        return self.tables.slot_of_token[self._table(group)][tokens].astype(np.int64)

    def tokens_by_slot(self, group: BlockGroup) -> np.ndarray:
        """Return the token in each slot of a KV cache group, int64 `[tokens_in(group)]`."""
        tokens = np.arange(self.tokens)
        slots = self.slot_of_token(group, tokens)
        token_of_slot = np.empty(self.tokens_in(group), np.int64)
        is_held = slots < len(token_of_slot)
        token_of_slot[slots[is_held]] = tokens[is_held]
        return token_of_slot

    def held_by(self, group: BlockGroup, tokens: np.ndarray) -> np.ndarray:
        """Return those of `tokens`, int64, that a KV cache group holds."""
        return tokens if self.in_order(group) else tokens[self.slot_of_token(group, tokens) != NOT_HELD]

    @cached_property
    def held(self) -> np.ndarray:
        """Tokens that each layer holds in any KV cache group, bool `[layers, tokens]`. Raises FormatError."""
        all_tokens = np.arange(self.tokens)
        of_part: dict[tuple[int, str, int], np.ndarray] = {}  # heads and tensors may be in separate groups
        for group in self.block_groups:
            is_held = self.slot_of_token(group, all_tokens) != NOT_HELD
            for part in group.parts if not group.identifies else ():
                before = of_part.setdefault((part.layer, part.tensor, part.first_head), np.zeros(self.tokens, bool))
                if (before & is_held).any():
                    raise FormatError(f"layer {part.layer} stores tokens twice: separately, and in its pair")
                before |= is_held
        held_tokens = np.ones((len(self.layout.layers), self.tokens), bool)
        for (layer, *_), tokens in of_part.items():
            held_tokens[layer] &= tokens
        return held_tokens

    def check_tables(self) -> None:
        """Raise FormatError if a layer holds a token both by itself and in its pair."""
        _ = self.held

    @cached_property
    def held_from(self) -> tuple[int, ...]:
        """First token of each layer from which on it holds all tokens. A method has to compute the earlier ones."""
        lacking = ~self.held[:, ::-1]  # from the last token backwards
        return tuple(np.where(lacking.any(1), self.tokens - lacking.argmax(1), 0).tolist())

    def chunks_of(self, group: BlockGroup, tokens: np.ndarray) -> np.ndarray:
        """Return the chunks of a KV cache group that hold `tokens`, ascending. Raises ValueError if any are missing."""
        slots = self.slot_of_token(group, tokens)
        if len(slots) and slots.max() >= self.tokens_in(group):
            raise ValueError(
                f"KV cache group {group.index} holds only a part of its tokens, and lacks some of the requested tokens"
            )
        return np.unique(slots // self.geometry.chunk_tokens)

    def first_token(self, group: BlockGroup, chunk: int) -> int:
        """Return the first token of a chunk, in the order of the segment."""
        step = self.geometry.chunk_tokens
        first = chunk * step
        return first if self.in_order(group) else int(self.tokens_by_slot(group)[first : first + step].min())

    @cached_property
    def whole_hashes(self) -> int:
        """Number of leading prefix hashes of the segment that cover completely stored tokens."""
        if self.tables is None or not self._held_of_table.size:
            return self.tokens // HASH_TOKENS
        if self.geometry.pairs:
            missing = (~self.held).any(axis=0)
        else:  # also in groups that are not of layers, such as an index
            missing = (self.tables.slot_of_token == NOT_HELD).any(axis=0)
        return int(missing.argmax() if missing.any() else self.tokens) // HASH_TOKENS

    @property
    def whole(self) -> bool:
        """True if every KV cache group holds all tokens. False with pairs, which divide them among several groups."""
        return not self.geometry.pairs and self.whole_hashes * HASH_TOKENS == self.tokens

    def _table(self, group: BlockGroup) -> int:
        assert self.tables is not None
        return int(self.tables.of_group[group.index])

    @cached_property
    def _held_of_table(self) -> np.ndarray:
        """Number of tokens in each table, int64 `[tables]`."""
        assert self.tables is not None
        return (self.tables.slot_of_token != NOT_HELD).sum(axis=1)

    # --- tensors

    def room_for(self, group: BlockGroup) -> torch.Tensor:
        """Allocate aligned memory for all blocks of a KV cache group, uint8 `[chunks, block_bytes]`."""
        return aligned_bytes(self.chunks_in(group) * group.block_bytes).view(-1, group.block_bytes)

    def field_views(self, blocks: torch.Tensor, part: Part, heads: int | None = None) -> tuple[torch.Tensor, ...]:
        """Return views of a part's fields in blocks, uint8 `[n, block_bytes]`: `[n, heads, chunk_tokens, dim]` each.

        They have all heads of the part, or its first `heads`.
        """
        heads = part.heads if heads is None else heads
        return tuple(
            blocks[:, slot.offset : slot.offset + slot.nbytes // part.heads * heads]
            .view(slot.dtype)
            .unflatten(1, (heads, self.geometry.chunk_tokens, slot.dim))
            for slot in part.fields
        )

    def joined_views(self, blocks: torch.Tensor, joined: JoinedParts) -> tuple[torch.Tensor, ...]:
        """Return views of the fields of several parts: `[n, parts, heads, chunk_tokens, dim]` each."""
        first = joined.first
        return tuple(
            blocks.as_strided(
                (len(blocks), joined.count, slot.nbytes),
                (blocks.stride(0), joined.pitch, 1),
                blocks.storage_offset() + slot.offset,
            )
            .view(slot.dtype)
            .unflatten(2, (first.heads, self.geometry.chunk_tokens, slot.dim))
            for slot in first.fields
        )

    def decode(self, group: BlockGroup, part: Part, fields: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the tensor, `[..., part.dim]`, that the fields of a part encode, `[..., field's dim]` each."""
        codec = self.codec_of(group)
        if codec.lossless:  # only `Raw` is: plug-ins cannot be
            return fields[0]
        return checked_decode(codec, fields, self.layout.dtype, part.dim)

    def pack(self, blocks: torch.Tensor, group: BlockGroup, part: Part, source: torch.Tensor) -> None:
        """Write one part of all tokens, `[heads, tokens, dim]`, into a group's `blocks`, uint8 `[chunks, block_bytes]`.

        Tokens that the group does not hold are skipped. Raises ValueError for a merged group, which takes two layers.
        """
        if group.merged:
            raise ValueError(f"KV cache group {group.index} has two layers, and cannot be packed from one")
        self.pack_fields(blocks, group, part, checked_encode(self.codec_of(group), source))

    def pack_fields(
        self, blocks: torch.Tensor, group: BlockGroup, part: Part, fields: tuple[torch.Tensor, ...]
    ) -> None:
        """Write fields that are already encoded, `[heads, tokens, field's dim]` each, as `pack` does."""
        chunk = self.geometry.chunk_tokens
        for target, source in zip(self.field_views(blocks, part), fields, strict=True):
            if not self.in_order(group):
                source = source[:, to_device(self.tokens_by_slot(group), source.device)]
            num_full, remainder = divmod(source.shape[1], chunk)
            if num_full:
                target[:num_full] = source[:, : num_full * chunk].unflatten(1, (num_full, chunk)).transpose(0, 1)
            if remainder:
                target[num_full, :, :remainder] = source[:, num_full * chunk :]

    def unpack(self, blocks: torch.Tensor, group: BlockGroup, part: Part) -> torch.Tensor:
        """Return a decoded copy of one part, `[heads, tokens, dim]`: the inverse of `pack`."""
        return self.decode(group, part, self.unpack_fields(blocks, group, part))

    def unpack_fields(self, blocks: torch.Tensor, group: BlockGroup, part: Part) -> tuple[torch.Tensor, ...]:
        """Return copies of the encoded fields of one part, with zeros for missing tokens: see `pack_fields`."""
        views, num_tokens = self.field_views(blocks, part), self.tokens_in(group)
        by_slot = [view.transpose(0, 1).flatten(1, 2)[:, :num_tokens] for view in views]  # [heads, held, field's dim]
        if self.in_order(group):
            return tuple(by_slot)
        tokens, unpacked = to_device(self.tokens_by_slot(group), blocks.device), []
        for field in by_slot:
            unpacked.append(field.new_zeros(field.shape[0], self.tokens, field.shape[2]))
            unpacked[-1][:, tokens] = field
        return tuple(unpacked)
