"""Geometry: how the KV of a segment is cut into blocks, the unit of storage, transfer, caching and eviction.

A `KVLayout` describes the KV that a model keeps per token, and a `Geometry` how it is cut. Together they determine the
*KV cache groups* of a segment (`BlockGroup`): layers, heads and tensors that are stored together. A block is one chunk
of one KV cache group. The blocks of a group are contiguous on disk, so a run of chunks is one sequential read.
`shape.py` maps tokens to positions in these blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from ..errors import ConfigError, FormatError, OtherFormatError, with_type
from .codecs import CODECS, RAW, Codec, make_codec, merged_codec
from .lazy import torch

ALIGNMENT = 4096
"""Alignment in bytes of the sections of a file and of memory, and size of a page."""

BLOCK_ALIGNMENT = 512
"""Alignment in bytes of blocks, in a file and in memory: the sector of most disks, as required by O_DIRECT."""

HASH_TOKENS = 16
"""Number of tokens that one prefix hash covers. The index does not depend on the geometry of a segment."""

_MOST = 1 << 18  # upper bound on the heads of all layers together, on dimensions, and on the tokens of a chunk

TensorName = Literal["key", "value"]


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    """Return `nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class LayerKV:
    """Two tensors that a model passes to its cache for one layer, `[batch, heads, tokens, dim]` each.

    They are keys and values for most models, and latents and rotated parts for MLA.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    window: int = 0
    """Sliding window in tokens; 0 for full attention."""
    rotated: Literal["", "key", "value"] = ""
    """Tensor that is stored before its rotation (deferred RoPE), if any."""
    rotary_dims: int = 0
    """Number of leading dimensions of that tensor that rotate; the rest pass through."""
    position_independent: bool = True
    """True if the stored tensors are valid at other positions than their own (RoPE deferred, or none)."""
    unbiased: bool = False
    """True if the keys are stored without the bias of their projection."""

    def heads(self, tensor: TensorName) -> int:
        return self.key_heads if tensor == "key" else self.value_heads

    def dim(self, tensor: TensorName) -> int:
        return self.key_dim if tensor == "key" else self.value_dim


@dataclass(frozen=True)
class KVLayout:
    """KV that a model keeps per token: one `LayerKV` per layer (None for a layer without KV), and the dtype."""

    layers: tuple[LayerKV | None, ...]
    dtype: torch.dtype

    def to_json(self) -> dict[str, Any]:
        """Return distinct layers once, and an index for each layer: 126 layers fit well under 4 KiB."""
        kinds = list(dict.fromkeys(layer for layer in self.layers if layer is not None))
        rows = [[*astuple(kind)[:7], int(kind.position_independent), *([1] if kind.unbiased else ())] for kind in kinds]
        index = [-1 if layer is None else kinds.index(layer) for layer in self.layers]
        return {"dtype": str(self.dtype).removeprefix("torch."), "kinds": rows, "layers": index}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KVLayout:
        try:
            dtype = getattr(torch, data["dtype"])
            kinds = [LayerKV(*row[:7], *map(bool, row[7:9])) for row in data["kinds"]]
            layout = cls(tuple(None if i < 0 else kinds[i] for i in data["layers"]), dtype)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise FormatError(f"the layout in the header cannot be read: {error!r}") from error
        layout.check()
        return layout

    def layer(self, index: int) -> LayerKV:
        """Return the `LayerKV` of a layer that keeps KV."""
        layer_kv = self.layers[index]
        assert layer_kv is not None
        return layer_kv

    def check(self) -> None:
        """Raise FormatError if no model keeps such KV, so that KV cache groups need no further checks."""
        if not isinstance(self.dtype, torch.dtype):
            raise FormatError(f"{self.dtype!r} is not a dtype")
        cached_layers = [layer for layer in self.layers if layer is not None]
        for layer in set(cached_layers):
            heads, dims = (layer.key_heads, layer.value_heads), (layer.key_dim, layer.value_dim)
            numbers = (*heads, *dims, layer.window, layer.rotary_dims)
            if any(type(number) is not int or not 0 <= number <= _MOST for number in numbers):
                raise FormatError(f"a layer has invalid heads or dimensions: {layer}")
            if layer.unbiased and layer.rotated != "key":
                raise FormatError(f"a layer lacks a bias of keys that are not stored before rotation: {layer}")
            if layer.rotated not in ("", "key", "value"):
                raise FormatError(f"a layer has an invalid tensor stored before rotation: {layer.rotated!r}")
        if not cached_layers or sum(layer.key_heads + layer.value_heads for layer in cached_layers) > _MOST:
            raise FormatError(
                f"the layout has KV in an invalid number of layers or heads ({len(cached_layers)} layers)"
            )

    @cached_property
    def position_independent(self) -> bool:
        """True if all stored tensors are valid at other positions than their own."""
        return all(layer is None or layer.position_independent for layer in self.layers)

    @property
    def unbiased(self) -> bool:
        """True if a layer's keys are stored without the bias of their projection."""
        return any(layer is not None and layer.unbiased for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV that all layers keep for one token."""
        cached_layers = (layer for layer in self.layers if layer is not None)
        return self.dtype.itemsize * sum(k.key_heads * k.key_dim + k.value_heads * k.value_dim for k in cached_layers)


@dataclass(frozen=True)
class FieldSlot:
    """Location of one field of a part in every block: `[heads, chunk_tokens, dim]` of `dtype`."""

    dtype: torch.dtype
    dim: int
    offset: int  # bytes from the start of the block, a multiple of the dtype's
    nbytes: int


@dataclass(frozen=True)
class Part:
    """One tensor of one layer, or some of its heads, in every block of a KV cache group: `[heads, chunk_tokens, dim]`.

    It is stored as the fields that the codec makes of it. In a merged group, the parts of two layers share their first
    field.
    """

    layer: int
    tensor: TensorName
    first_head: int
    heads: int
    dim: int
    fields: tuple[FieldSlot, ...]

    @property
    def end(self) -> int:
        """Byte offset in the block of the end of the part's last field."""
        return self.fields[-1].offset + self.fields[-1].nbytes


@dataclass(frozen=True)
class BlockGroup:
    """KV cache group: parts that are stored together in one block."""

    index: int
    parts: tuple[Part, ...]
    window: int
    identifies: bool = False
    """True if the parts are a separate copy of keys, which selectors read to identify tokens."""
    merged: bool = False
    """True if the group merges two layers: each part is a shared direction, and a factor of its own."""

    @cached_property
    def payload_bytes(self) -> int:
        return self.parts[-1].end

    @cached_property
    def block_bytes(self) -> int:
        return aligned(self.payload_bytes, BLOCK_ALIGNMENT)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({part.layer for part in self.parts}))

    @cached_property
    def joined(self) -> JoinedParts | None:
        """All parts at once, if they are whole layers of one form; else None."""
        first = self.parts[0]
        if self.merged or self.identifies or first.first_head:
            return None
        pitch, tensors = first.end - first.fields[0].offset, [(part.layer, part.tensor) for part in self.parts]
        alike = all(
            part.fields == tuple(replace(slot, offset=slot.offset + number * pitch) for slot in first.fields)
            and (part.first_head, part.heads, part.dim) == (0, first.heads, first.dim)
            for number, part in enumerate(self.parts)
        )
        in_order = tensors == [(layer, tensor) for layer in self.layers for tensor in ("key", "value")]
        return JoinedParts(first, len(self.parts), pitch) if alike and in_order else None


@dataclass(frozen=True)
class JoinedParts:
    """Keys and values of consecutive layers in every block, in this order: `[2 * layers, heads, chunk_tokens, dim]`."""

    first: Part
    count: int
    pitch: int
    """Bytes from the begin of a part to that of the next one."""


@dataclass(frozen=True)
class KeyIndex:
    """Additional copy of keys, in KV cache groups of its own, for selectors to read without the other KV.

    Args:
        every: Period of the layers with keys in the index. Of the layers with full attention, these are the solo
            layers, and then the first of every `every` layers.
        heads: Number of first key-value heads to copy (IMPRESS, Section 4.1: probe heads), or None for all.
    """

    every: int = 1
    heads: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "heads"):
            _check_count(name, getattr(self, name))


@dataclass(frozen=True)
class Geometry:
    """Cutting of a segment into blocks: chunk tokens × layers per block × heads per block.

    Args:
        chunk_tokens: Consecutive tokens per block (ContiguousKV, Section 4.2: c = 16).
        layers_per_block: Layers per block. Layers with and without a sliding window do not share blocks, so that only
            the window of a sliding layer is read.
        heads_per_block: Key-value heads per block, or None for all.
        split_kv: Whether keys and values are stored in separate blocks.
        index: Additional copy of keys, or None.
        solo_layers: Number of first layers without a window that have blocks, and an index, of their own.
        codec: Name of the codec between tensors and bytes (see `codecs`), also of the index.
        pairs: Pairs of layers to merge, the shallower layer first (MiniCache; see `pairs`). Each layer has KV
            cache groups of its own for its unmerged tokens, and each pair has groups for the tokens that its layers
            share; token tables define which tokens these are. Paired layers have full attention and the same `LayerKV`.
            `layers_per_block` must be 1.
    """

    chunk_tokens: int = 16
    layers_per_block: int = 4
    heads_per_block: int | None = None
    split_kv: bool = False
    index: KeyIndex | None = None
    solo_layers: int = 0
    codec: str = RAW
    pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        make_codec(self.codec)
        for name in ("chunk_tokens", "layers_per_block", "heads_per_block"):
            _check_count(name, getattr(self, name))
        if not isinstance(self.solo_layers, int) or self.solo_layers < 0:
            raise ConfigError(f"solo_layers must be a number of layers, an int, not {with_type(self.solo_layers)}")
        self._check_pairs()

    def _check_pairs(self) -> None:
        layers = [layer for pair in self.pairs for layer in pair]
        if any(type(layer) is not int or not 0 <= layer <= _MOST for layer in layers):
            raise ConfigError(f"pairs must consist of layer numbers, not {self.pairs!r}")
        if any(len(pair) != 2 or pair[0] >= pair[1] for pair in self.pairs) or len(set(layers)) < len(layers):
            raise ConfigError(
                "pairs must consist of two layers, the shallower one first, and no layer may occur twice: "
                f"{self.pairs!r}"
            )
        if self.pairs and (self.layers_per_block != 1 or self.index is not None):
            raise ConfigError("pairs require layers_per_block=1, and no index")
        object.__setattr__(self, "pairs", tuple(sorted(tuple(pair) for pair in self.pairs)))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Geometry:
        try:
            if isinstance(codec := data["codec"], str) and codec not in CODECS:
                raise OtherFormatError(
                    f"it is stored with the codec {codec!r}, which this process does not know; install a newer "
                    "version, or the package that registers it"
                )
            index = None if data["index"] is None else KeyIndex(**data["index"])
            pairs = tuple((first, second) for first, second in data["pairs"])
            geometry = cls(**data | {"index": index, "pairs": pairs, "split_kv": bool(data["split_kv"])})
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the geometry in the header cannot be read: {error!r}") from error
        if geometry.chunk_tokens > _MOST:
            raise FormatError(f"the geometry in the header has invalid chunks of {geometry.chunk_tokens} tokens")
        return geometry


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} must be a positive whole number, not {with_type(value)}")


@lru_cache(maxsize=64)
def block_groups(layout: KVLayout, geometry: Geometry) -> tuple[BlockGroup, ...]:
    """Return the KV cache groups of a segment as a pass needs them, those of an index last. Raises FormatError."""
    by_window: dict[int, list[int]] = {}
    for index, layer_kv in enumerate(layout.layers):
        if layer_kv is not None:
            by_window.setdefault(layer_kv.window, []).append(index)
    step = geometry.layers_per_block
    tensors: list[tuple[TensorName, ...]] = [("key",), ("value",)] if geometry.split_kv else [("key", "value")]
    units = [
        (window, group_layers, False)
        for window, layers in by_window.items()
        for group_layers in in_groups(layers, step, 0 if window else geometry.solo_layers)
    ]
    for pair in geometry.pairs:
        first, second = (layout.layers[layer] if layer < len(layout.layers) else None for layer in pair)
        if first is None or first != second or first.window or not first.key_dim or not first.value_dim:
            raise FormatError(f"layers {pair[0]} and {pair[1]} cannot be merged: {first} and {second}")
        units.append((0, list(pair), True))
    group_parts: list[tuple[int, tuple[Part, ...], bool]] = []
    for window, layers, merged in units:
        for names in tensors:
            for head_range in _head_ranges(layout, layers, geometry.heads_per_block):
                if parts := tuple(_parts(layout, geometry, layers, names, head_range, merged)):
                    group_parts.append((window, parts, merged))
    group_parts.sort(key=lambda block_group: block_group[1][0].layer)
    numbered = [
        BlockGroup(number, parts, window, merged=merged) for number, (window, parts, merged) in enumerate(group_parts)
    ]
    if geometry.index is not None:
        heads = None if geometry.index.heads is None else (0, geometry.index.heads)
        for layer, *_ in in_groups(by_window.get(0, []), geometry.index.every, geometry.solo_layers):
            parts = tuple(_parts(layout, geometry, [layer], ("key",), heads))
            numbered.append(BlockGroup(len(numbered), parts, 0, identifies=True))
    return tuple(numbered)


def in_groups(layers: list[int], step: int, solo_layers: int) -> list[list[int]]:
    """Return the first `solo_layers` layers one by one, and the others in groups of `step`."""
    return [[layer] for layer in layers[:solo_layers]] + [
        layers[i : i + step] for i in range(solo_layers, len(layers), step)
    ]


def _head_ranges(layout: KVLayout, layers: list[int], per_block: int | None) -> list[tuple[int, int] | None]:
    if per_block is None:
        return [None]
    most = max(max(layout.layer(i).key_heads, layout.layer(i).value_heads) for i in layers)
    return [(first, first + per_block) for first in range(0, most, per_block)]


def _parts(
    layout: KVLayout,
    geometry: Geometry,
    layers: list[int],
    names: tuple[TensorName, ...],
    heads: tuple[int, int] | None,
    merged: bool = False,
) -> Iterator[Part]:
    """Yield the parts of a KV cache group: of each layer, or of a pair that shares a direction, with a factor each."""
    codec, offset = (merged_codec if merged else make_codec)(geometry.codec), 0
    for index in layers[:1] if merged else layers:
        layer = layout.layer(index)
        for name in names:
            first, stop = (0, layer.heads(name)) if heads is None else heads
            if (count := min(stop, layer.heads(name)) - first) > 0:
                slots = _slots(codec, layout.dtype, layer.dim(name), count * geometry.chunk_tokens, offset)
                yield Part(index, name, first, count, layer.dim(name), slots)
                if merged:
                    direction, factor = slots
                    slots = direction, replace(factor, offset=factor.offset + factor.nbytes)
                    yield Part(layers[1], name, first, count, layer.dim(name), slots)
                offset = slots[-1].offset + slots[-1].nbytes


def _slots(codec: Codec, dtype: torch.dtype, dim: int, vectors: int, offset: int) -> tuple[FieldSlot, ...]:
    """Return the locations in a block of the fields of `vectors` vectors, from byte `offset` on."""
    slots = []
    for field_dtype, field_dim in codec.fields(dtype, dim):
        offset = aligned(offset, field_dtype.itemsize)
        slots.append(FieldSlot(field_dtype, field_dim, offset, vectors * field_dim * field_dtype.itemsize))
        offset += slots[-1].nbytes
    return tuple(slots)
