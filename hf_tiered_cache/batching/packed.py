"""Captured KV of packed passes, in which the tokens of several requests follow each other in one row."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from ..cache.forward_pass import kind_of
from ..patches.rope import TableCache
from ..patches.scope import Scope, enter, leave_to
from ..patches.tap import RotaryTap
from ..store.geometry import LayerKV
from ..store.memory import to_device

_JOINED_PASSES = 32
"""Number of passes that are joined. Gathering a long answer token by token would take longer than the passes."""


class Packed(NamedTuple):
    """Tokens of one request in a packed pass, in which requests follow each other without gaps."""

    state: Any  # transformers' `RequestState`
    first: int
    """Position of the first token."""
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
    """Unrotated KV of the tokens of one pass. Passes that were joined share their layers."""

    def __init__(self, fingerprint: str, layers: dict[int, CapturedLayer]) -> None:
        self.fingerprint, self.layers = fingerprint, layers
        self.offset = 0
        """Index of the first token in the layers."""

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV of a token."""
        captured = self.layers.values()
        return sum(layer.keys[:, :, 0].nbytes + layer.values[:, :, 0].nbytes for layer in captured)


class GraphKV:
    """Unrotated KV of the latest pass of CUDA graphs, in tensors at fixed addresses: replaying runs no Python.

    Keys have their biases, since a graph would go on to subtract those of the model's state when it was made. A pass
    has at most `tokens` tokens.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._layers: dict[int, CapturedLayer] = {}

    def copy(self, layer: int, captured: CapturedLayer) -> None:
        """Copy a layer. The first copy must not be a part of a graph, since it allocates the tensors.

        Raises ValueError if the layer was copied with another layout before.
        """
        copies = self._layers.get(layer)
        if copies is None:
            keys, values = (
                tensor.new_zeros(*tensor.shape[:2], self._tokens, tensor.shape[3])
                for tensor in (captured.keys, captured.values)
            )
            copies = self._layers[layer] = CapturedLayer(captured.kind, keys, values)
        if copies.kind != captured.kind:
            raise ValueError(f"the layout of layer {layer} changes from pass to pass")
        for target, tensor in ((copies.keys, captured.keys), (copies.values, captured.values)):
            target[:, :, : tensor.shape[2]].copy_(tensor)

    def layers(self, count: int) -> dict[int, CapturedLayer]:
        """Return copies of the first `count` tokens."""
        return {
            layer: CapturedLayer(copies.kind, copies.keys[:, :, :count].clone(), copies.values[:, :, :count].clone())
            for layer, copies in self._layers.items()
        }


class PassCapture:
    """Capture of the unrotated KV of one pass. It is copied to `graph_kv` if the pass becomes a CUDA graph.

    `windows` are the sliding windows of the layers in tokens; 0 for full attention.
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
    first, remaining_pieces = list[Piece](), list[Piece]()
    for piece in pieces:
        num_taken = min(count, piece.count)
        if num_taken:
            first.append(replace(piece, count=num_taken))
        if num_taken < piece.count:
            remaining_pieces.append(replace(piece, row=piece.row + num_taken, count=piece.count - num_taken))
        count -= num_taken
    return first, remaining_pieces


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
    parts = [packed.layers for packed in passes]
    joined = {
        layer: CapturedLayer(
            first.kind,
            torch.cat([layers[layer].keys for layers in parts], dim=2),
            torch.cat([layers[layer].values for layers in parts], dim=2),
        )
        for layer, first in parts[0].items()
    }
    offset = 0
    for packed, layers in zip(passes, parts, strict=True):
        packed.layers, packed.offset = joined, offset
        offset += next(iter(layers.values())).keys.shape[2]


def gather(pieces: Iterable[Piece]) -> dict[int, CapturedLayer]:
    """Return the KV of consecutive pieces of one request, in tensors of their own."""
    runs: list[tuple[dict[int, CapturedLayer], np.ndarray]] = []  # layers, and the indexes of tokens in them
    for _, run in groupby(pieces, lambda piece: id(piece.source.layers)):
        of_run = list(run)
        indexes = [np.arange(piece.count) + (piece.source.offset + piece.row) for piece in of_run]
        runs.append((of_run[0].source.layers, np.concatenate(indexes)))
    gathered: dict[int, CapturedLayer] = {}
    rows: dict[torch.device, list[torch.Tensor]] = {}
    for layer, first in runs[0][0].items():
        device = first.keys.device
        if device not in rows:
            rows[device] = [to_device(index, device) for _, index in runs]
        of_layer = [(layers[layer], index) for (layers, _), index in zip(runs, rows[device], strict=True)]
        keys = [captured.keys.index_select(2, index) for captured, index in of_layer]
        values = [captured.values.index_select(2, index) for captured, index in of_layer]
        gathered[layer] = CapturedLayer(first.kind, _joined(keys), _joined(values))
    return gathered


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=2)
