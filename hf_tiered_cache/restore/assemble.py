"""Assembly of a layer's keys and values: fetched blocks are copied to their positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import RestoreError
from ..geometry import LayerKV
from .plan import Plan
from .prefetch import Prefetch


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
    """Fill and rotate the restored positions of one layer; the caller fills the computed positions.

    Args:
        prefetch: Provides the blocks.
        plan: Plan of the pass.
        layer: Layer index.
        kind: Layout of the tensors that the model passes to the cache for this layer.
        dtype: Dtype of these tensors before rotation (autocast may rotate into another dtype).
        keys: `[batch, key_heads, columns - first_column, key_dim]`, filled in place.
        values: Like `keys`.
        first_column: Position, counted as in the plan, of the first entry of `keys` and `values`.
        rotate_: Rotates `[rows, heads, n, dim]` in place; its second argument is the index of the first token.

    Raises:
        RestoreError: A block did not arrive, or its layout does not match.
    """
    check_fit(plan, layer, kind, dtype)
    for row, block_group, gather in prefetch.gathers(layer, first_column):
        for part in block_group.parts:
            if part.layer == layer:
                gather.copy(part, (keys if part.tensor == "key" else values)[row])
    restored = plan.columns if plan.suffix is None else plan.suffix
    low = 0
    if plan.fronts:
        low, restored = plan.restored_columns(layer, kind.window)
    for group in plan.groups:
        begin = max(0, group.pad - plan.base - first_column, low - first_column)  # where the row's tokens begin
        end = restored - first_column
        one = group.rows[0]
        if begin < end and kind.rotated:
            rotated = keys if kind.rotated == "key" else values
            rotate_(rotated[one : one + 1, :, begin:end], begin + first_column + plan.base - group.pad)
        for tensor in (keys, values):
            share_row(tensor, group.rows, begin, end)
    prefetch.done(layer)


def share_row(tensor: torch.Tensor, rows: Sequence[int], begin: int, end: int) -> None:
    """Copy positions `[begin, end)` of `tensor`, `[batch, heads, columns, dim]`, from the first row to the others.

    Earlier positions, such as padding, are set to zero in all rows: they are masked or computed, but must be finite.
    """
    for row in rows:
        if begin:
            tensor[row, :, :begin].zero_()
        if begin < end and row != rows[0]:
            tensor[row, :, begin:end].copy_(tensor[rows[0], :, begin:end])


def check_fit(plan: Plan, layer: int, kind: LayerKV, dtype: torch.dtype) -> None:
    """Check that stored layer and dtype match the model, in case its code changed under the same fingerprint.

    Raises:
        RestoreError: They differ.
    """
    for reader in plan.readers:
        layout = reader.shape.layout
        stored = layout.layers[layer] if layer < len(layout.layers) else None
        if stored != kind or layout.dtype != dtype:
            raise RestoreError(
                reader.id, f"layer {layer} stores {stored} in {layout.dtype}, the model has {kind} in {dtype}"
            )
