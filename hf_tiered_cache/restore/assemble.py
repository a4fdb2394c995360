"""From blocks to a layer's keys and values: what has arrived is copied to its columns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..errors import RestoreError
from ..geometry import LayerKV
from .plan import Plan
from .prefetch import Prefetch, Unit


def restore_layer(
    prefetch: Prefetch,
    plan: Plan,
    layer: int,
    kind: LayerKV,
    dtype: torch.dtype,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_column: int,
    rotate_: Callable[[torch.Tensor, int], None],
) -> None:
    """Fill the restored columns of a pass for one layer, and rotate them; the computed ones are left to the caller.

    Args:
        prefetch: brings the blocks.
        plan: of the pass.
        layer: which.
        kind: what the model hands over for this layer.
        dtype: of what it hands over, before its rotation (autocast rotates into another one).
        keys: `[batch, key_heads, columns - first_column, key_dim]`; values likewise.
        first_column: the column, in the plan's count, that stands first in `keys` and `values`.
        rotate_: rotates, in place, `[rows, heads, n, dim]` whose first column is the token of that number.

    Raises:
        RestoreError: a block did not arrive, or does not fit.
    """
    check_fit(plan, layer, kind, dtype)
    for unit in prefetch.units(layer):
        copy_unit(unit, layer, plan, keys, values, first_column)
    restored = plan.columns if plan.suffix is None else plan.suffix
    for group in plan.groups:
        begin = max(0, group.pad - plan.base - first_column)  # of the row's tokens in this pass
        end = restored - first_column
        one, others = group.rows[0], list(group.rows[1:])
        if begin < end and kind.rotated:
            rotated = keys if kind.rotated == "key" else values
            rotate_(rotated[one : one + 1, :, begin:end], begin + first_column + plan.base - group.pad)
        for tensor in (keys, values):
            tensor[list(group.rows), :, :begin] = 0  # padding is masked, but must be finite
            if others:
                tensor[others, :, begin:end] = tensor[one, :, begin:end]
    prefetch.done(layer)


def check_fit(plan: Plan, layer: int, kind: LayerKV, dtype: torch.dtype) -> None:
    """A fingerprint promises this much; code that changed under it must not go unnoticed. Raises RestoreError."""
    for reader in {piece.reader for group in plan.groups for piece in group.pieces}:
        layout = reader.shape.layout
        stored = layout.layers[layer] if layer < len(layout.layers) else None
        if stored != kind or layout.dtype != dtype:
            raise RestoreError(
                reader.id, f"layer {layer} stores {stored} in {layout.dtype}, the model has {kind} in {dtype}"
            )


def copy_unit(unit: Unit, layer: int, plan: Plan, keys: torch.Tensor, values: torch.Tensor, first_column: int) -> None:
    """Copy what `unit` holds of `layer` into the first row of each group.

    Args:
        unit: has arrived.
        keys: `[batch, key_heads, columns - first_column, key_dim]`; values likewise.
        first_column: the column, in the plan's count, that stands first in `keys` and `values`.
    """
    shape = unit.reader.shape
    for part in unit.lane.parts:
        if part.layer != layer:
            continue
        target = (keys if part.tensor == "key" else values)[:, part.first_head : part.first_head + part.heads]
        for first_chunk, memory in unit.lease.runs:
            blocks = shape.decoded(memory, part)  # [n, heads, chunk_tokens, dim]
            start = first_chunk * shape.geometry.chunk_tokens
            for group, piece in unit.pieces:
                shift = piece.at - piece.first + group.pad - plan.base - first_column
                low, high = max(piece.first, -shift), min(piece.first + piece.count, target.shape[2] - shift)
                row = target[group.rows[0]]
                if shape.ordered(unit.lane):
                    places = shape.places(unit.lane, np.arange(low, high))
                    copy_places(row[:, low + shift : high + shift], blocks, start, places)
                else:
                    copy_tokens(row, blocks, start, low, high, shift)


def copy_places(target: torch.Tensor, blocks: torch.Tensor, start: int, places: np.ndarray) -> None:
    """Copy what lies in `places` of a segment to the columns of `target`, as far as `blocks` holds it.

    Args:
        target: `[heads, len(places), dim]`.
        blocks: `[n, heads, chunk_tokens, dim]`.
        start: the place that stands first in `blocks`.
        places: int64, in any order.
    """
    inside = places - start
    columns = np.flatnonzero((inside >= 0) & (inside < blocks.shape[0] * blocks.shape[2]))
    chunk, at = (torch.from_numpy(index).to(blocks.device) for index in divmod(inside[columns], blocks.shape[2]))
    every = len(columns) == len(places)
    target[:, slice(None) if every else torch.from_numpy(columns).to(blocks.device)] = blocks[chunk, :, at].transpose(
        0, 1
    )


def copy_tokens(target: torch.Tensor, blocks: torch.Tensor, start: int, low: int, high: int, shift: int) -> None:
    """Copy the tokens `[low, high)` of a segment, as far as `blocks` holds them.

    Args:
        target: `[heads, columns, dim]`.
        blocks: `[n, heads, chunk_tokens, dim]`.
        start: number, in the segment, of the token that stands first in `blocks`.
        shift: column of a token minus its number.
    """
    chunk = blocks.shape[2]
    at, high = max(low, start), min(high, start + blocks.shape[0] * chunk)
    while at < high:
        index, inside = divmod(at - start, chunk)
        whole = (high - at) // chunk if inside == 0 else 0
        if whole:  # any number of whole chunks in one strided copy
            count = whole * chunk
            columns = target[:, at + shift : at + shift + count].unflatten(1, (whole, chunk))
            columns.copy_(blocks[index : index + whole].transpose(0, 1))
        else:  # the ragged ends of a run
            count = min(chunk - inside, high - at)
            target[:, at + shift : at + shift + count] = blocks[index, :, inside : inside + count]
        at += count
