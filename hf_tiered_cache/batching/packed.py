"""Captured KV of packed passes, in which the tokens of several requests follow each other in one row."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ..cache.forward_pass import kind_of
from ..patches.rope import RotaryTap, TableCache
from ..patches.scope import Scope, enter, leave_to
from ..store.geometry import LayerKV
from ..store.memory import to_device

_JOINED_PASSES = 32
"""Number of passes that are joined. Gathering a long answer token by token would take longer than the passes."""


_KEYS_AND_VALUES: tuple[Literal[1], Literal[2]] = (1, 2)
"""Indexes of the tensors in `CapturedLayer`."""


class Packed(NamedTuple):
    """Tokens of one request in a packed pass.

    Args:
        state: State of the request (transformers' `RequestState`).
        first: Position of the first token.
        num_tokens: Number of tokens. Requests follow each other in the pass without gaps.
    """

    state: Any
    first: int
    num_tokens: int


class CapturedLayer(NamedTuple):
    """Layout, unrotated keys and values of a layer, `[1, heads, tokens, dim]` each."""

    kind: LayerKV
    keys: torch.Tensor
    values: torch.Tensor


def without_biases(layers: dict[int, CapturedLayer], tables: TableCache) -> dict[int, CapturedLayer]:
    """Return layers without the key biases that are not stored; those of a graph have them."""
    tap, unbiased = RotaryTap(tables), dict[int, CapturedLayer]()
    for layer, (kind, keys, values) in layers.items():
        if kind.rotated == "key" and not kind.unbiased:
            keys, bias = tap.unbiased(layer, keys)
            kind = replace(kind, unbiased=bias is not None)
        unbiased[layer] = CapturedLayer(kind, keys, values)
    return unbiased


class PackedKV:
    """Unrotated KV of the tokens of one pass, or of several joined ones."""

    def __init__(self, fingerprint: str, layers: dict[int, CapturedLayer]) -> None:
        self.fingerprint, self.layers = fingerprint, layers
        self._joined: tuple[PackedKV, int] | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(next(iter(self.layers.values())).keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers.values())

    def resolve(self) -> tuple[PackedKV, int]:
        """Return the object that holds the KV now, and the index of this object's first token in it."""
        if self._joined is None:
            return self, 0
        target, offset = self._joined[0].resolve()
        return target, offset + self._joined[1]

    def join(self, target: PackedKV, offset: int) -> None:
        """Leave the KV to another object, which holds it from token `offset` on."""
        self._joined, self.layers = (target, offset), {}


class GraphKV:
    """Unrotated KV of the latest pass of CUDA graphs, in tensors at fixed addresses: replaying runs no Python.

    Keys have their biases, since a graph would go on to subtract those of the model's state when it was made.

    `tokens` is the maximum number of tokens of a pass.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._layers: dict[int, CapturedLayer] = {}

    def copy(self, layer: int, captured: CapturedLayer) -> None:
        """Copy a layer. The first copy must not be a part of a graph, since it allocates the tensors.

        Raises:
            ValueError: The layer was copied with another layout before.
        """
        kept = self._layers.get(layer)
        if kept is None:
            keys, values = (
                entry.new_zeros(*entry.shape[:2], self._tokens, entry.shape[3]) for entry in (captured[1], captured[2])
            )
            kept = self._layers[layer] = CapturedLayer(captured.kind, keys, values)
        if kept.kind != captured.kind:
            raise ValueError(f"the layout of layer {layer} changes from pass to pass")
        for part in _KEYS_AND_VALUES:
            kept[part][:, :, : captured[part].shape[2]].copy_(captured[part])

    def layers(self, count: int) -> dict[int, CapturedLayer]:
        """Return copies of the first `count` tokens."""
        return {
            layer: CapturedLayer(kept.kind, kept.keys[:, :, :count].clone(), kept.values[:, :, :count].clone())
            for layer, kept in self._layers.items()
        }


class PassCapture:
    """Capture of the unrotated KV of one pass.

    Args:
        tables: RoPE tables of the model.
        windows: Sliding window of each layer in tokens; 0 for full attention.
        graph_kv: Where to copy it if the pass becomes a CUDA graph.
    """

    def __init__(self, tables: TableCache, windows: Sequence[int], graph_kv: GraphKV | None = None) -> None:
        self._tap, self._windows, self._graph_kv = RotaryTap(tables), windows, graph_kv
        self._layers: dict[int, CapturedLayer] = {}

    def enclose(self, run: Callable[[], None]) -> None:
        """Run the pass."""
        token = enter(Scope(self, self._tap))
        try:
            run()
        finally:
            leave_to(token)

    def add(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Capture a layer of the running pass: rotated keys and values, `[1, heads, tokens, dim]` each."""
        pre_rope = self._tap.take(layer, keys, values)
        kind = kind_of(pre_rope, keys, values, self._windows[layer])
        captured = CapturedLayer(kind, pre_rope.keys, pre_rope.values)
        if self._graph_kv is None:
            self._layers[layer] = captured
        else:
            self._graph_kv.copy(layer, captured)

    def layers(self, count: int) -> dict[int, CapturedLayer]:
        """Return the KV of at least the first `count` tokens; padding may follow them."""
        return self._layers if self._graph_kv is None else self._graph_kv.layers(count)


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one request in a pass: `count` tokens from the token with index `row` on."""

    source: PackedKV
    row: int
    count: int


def split(pieces: Iterable[Piece], count: int) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces of the first `count` tokens, and those of the other tokens."""
    first, rest = list[Piece](), list[Piece]()
    for piece in pieces:
        taken = min(count, piece.count)
        if taken:
            first.append(replace(piece, count=taken))
        if taken < piece.count:
            rest.append(replace(piece, row=piece.row + taken, count=piece.count - taken))
        count -= taken
    return first, rest


class PassJoiner:
    """Joins the KV of many passes, so that gathering the tokens of a request takes few steps."""

    def __init__(self) -> None:
        self._passes: list[weakref.ref[PackedKV]] = []

    def add(self, packed: PackedKV) -> None:
        """Add the KV of a pass, and join passes if there are many."""
        self._passes.append(weakref.ref(packed))
        if len(self._passes) < _JOINED_PASSES:
            return
        passes = [alive for reference in self._passes if (alive := reference()) is not None]
        self._passes.clear()
        alike: dict[tuple[object, ...], list[PackedKV]] = {}
        for packed in passes:
            kinds = tuple((layer, captured.kind) for layer, captured in packed.layers.items())
            alike.setdefault((packed.fingerprint, *kinds), []).append(packed)
        for group in alike.values():
            if len(group) > 1:
                _join(group)


def _join(passes: Sequence[PackedKV]) -> None:
    layers = {}
    for layer, first in passes[0].layers.items():
        captured = [packed.layers[layer] for packed in passes]
        keys, values = (torch.cat([entry[part] for entry in captured], dim=2) for part in _KEYS_AND_VALUES)
        layers[layer] = CapturedLayer(first.kind, keys, values)
    target, offset = PackedKV(passes[0].fingerprint, layers), 0
    for packed in passes:
        tokens = packed.tokens
        packed.join(target, offset)
        offset += tokens


def gather(pieces: Iterable[Piece]) -> dict[int, CapturedLayer]:
    """Return the KV of consecutive pieces of one request, in tensors of their own."""
    runs = list(_runs(pieces))
    layers: dict[int, CapturedLayer] = {}
    rows: dict[torch.device, list[torch.Tensor]] = {}
    for layer, first in runs[0][0].layers.items():
        device = first.keys.device
        if device not in rows:
            rows[device] = [to_device(index, device) for _, index in runs]
        captured = [packed.layers[layer] for packed, _ in runs]
        keys, values = (
            _joined([entry[part].index_select(2, row) for entry, row in zip(captured, rows[device], strict=True)])
            for part in _KEYS_AND_VALUES
        )
        layers[layer] = CapturedLayer(first.kind, keys, values)
    return layers


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=2)


def _runs(pieces: Iterable[Piece]) -> Iterator[tuple[PackedKV, np.ndarray]]:
    """Yield the objects that hold some pieces, each with the indexes of its tokens, int64."""
    current: PackedKV | None = None
    indexes: list[np.ndarray] = []
    for piece in pieces:
        source, offset = piece.source.resolve()
        if source is not current and current is not None:
            yield current, np.concatenate(indexes)
            indexes = []
        current = source
        indexes.append(np.arange(piece.row + offset, piece.row + offset + piece.count))
    if current is not None:
        yield current, np.concatenate(indexes)
