"""From blocks to a layer's keys and values: what has arrived is copied to its columns."""

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
    for row, block_group, gather in prefetch.gathers(layer, first_column):
        for part in block_group.parts:
            if part.layer == layer:
                gather.copy(part, (keys if part.tensor == "key" else values)[row])
    restored = plan.columns if plan.suffix is None else plan.suffix
    low = 0
    if plan.fronts:
        low, restored = plan.restored_columns(layer, kind.window)
    for group in plan.groups:
        begin = max(0, group.pad - plan.base - first_column, low - first_column)  # of the row's tokens in this pass
        end = restored - first_column
        one = group.rows[0]
        if begin < end and kind.rotated:
            rotated = keys if kind.rotated == "key" else values
            rotate_(rotated[one : one + 1, :, begin:end], begin + first_column + plan.base - group.pad)
        for tensor in (keys, values):
            share_row(tensor, group.rows, begin, end)
    prefetch.done(layer)


def share_row(tensor: torch.Tensor, rows: Sequence[int], begin: int, end: int) -> None:
    """Copy the columns `[begin, end)` of `tensor`, `[batch, heads, columns, dim]`, from the first row to the others.

    What stands before them, such as padding, becomes zero: it is masked, or computed, but must be finite.
    """
    for row in rows:
        if begin:
            tensor[row, :, :begin].zero_()
        if begin < end and row != rows[0]:
            tensor[row, :, begin:end].copy_(tensor[rows[0], :, begin:end])


def check_fit(plan: Plan, layer: int, kind: LayerKV, dtype: torch.dtype) -> None:
    """A fingerprint promises this much; code that changed under it must not go unnoticed. Raises RestoreError."""
    for reader in plan.readers:
        layout = reader.shape.layout
        stored = layout.layers[layer] if layer < len(layout.layers) else None
        if stored != kind or layout.dtype != dtype:
            raise RestoreError(
                reader.id, f"layer {layer} stores {stored} in {layout.dtype}, the model has {kind} in {dtype}"
            )
