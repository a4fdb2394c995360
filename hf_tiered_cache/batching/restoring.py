"""Stored KV of a prefix, assembled and rotated as the pages of continuous batching hold it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from .. import reasons
from ..cache.forward_pass import kind_of
from ..cache.storage import Storage
from ..identity import varying_rope
from ..layers import DenseSource, sources_for
from ..patches.attach import Attachment, cache_argument
from ..patches.rope import PreRopeKV, RotaryTap
from ..patches.scope import Scope, enter, leave_to
from ..restore.fetch import Fetcher
from ..restore.plan import Plan, RowGroup, SegmentSlice
from ..restore.prefetch import Prefetch, restore_layer
from ..stats import StatsCollector
from ..store.geometry import HASH_TOKENS, LayerKV
from .engine import PagedKV


class LayerRotations:
    """Layout and rotation of each layer's KV, as observed in one pass of `generate()`'s kind over a few tokens.

    Pages hold rotated keys, and are written before the pass that reads them. So the rotation must be known before.

    Args:
        attachment: Attachment of the model, which must not run in continuous batching at the moment.
        fingerprint: Fingerprint of the model.
    """

    def __init__(self, attachment: Attachment, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.tap = RotaryTap(attachment.tables_of(fingerprint))
        cache = _ObservingCache(attachment, self.tap)
        token = enter(Scope(cache, self.tap))
        try:
            with torch.no_grad():
                ids = torch.zeros(1, HASH_TOKENS, dtype=torch.int64, device=attachment.devices[0])
                attachment.model(input_ids=ids, use_cache=True, **{cache_argument(attachment.signature): cache})
        finally:
            leave_to(token)
        self.layers: dict[int, tuple[LayerKV, PreRopeKV]] = cache.observed


def observe_rotations(attachment: Attachment, fingerprint: str) -> LayerRotations | str:
    """Return the rotations of a model's layers, or the reason why its KV cannot be restored into pages."""
    if varying_rope(attachment.config) is not None:
        return reasons.VARYING_ROPE
    rotations = LayerRotations(attachment, fingerprint)
    return rotations if len(rotations.layers) == attachment.depth else reasons.SHARED_LAYERS


def windows_of(attachment: Attachment) -> list[int]:
    """Return the sliding window of each layer in tokens; 0 for full attention."""
    return [source.window for source in sources_for(attachment.model, DenseSource)]


class _ObservingCache(DynamicCache):
    """Cache of one pass that keeps the layout and the unrotated KV of each layer."""

    def __init__(self, attachment: Attachment, tap: RotaryTap) -> None:
        super().__init__(config=attachment.config)
        self._tap, self._windows = tap, windows_of(attachment)
        self.observed: dict[int, tuple[LayerKV, PreRopeKV]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pre_rope = self._tap.take(layer_idx, key_states, value_states)
        self.observed[layer_idx] = kind_of(pre_rope, key_states, value_states, self._windows[layer_idx]), pre_rope
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def assemble(
    plan: Plan,
    first: int,
    rotations: LayerRotations,
    storage: Storage,
    attachment: Attachment,
    collector: StatsCollector,
    ahead_bytes: int,
    is_wanted: Callable[[], bool],
) -> PagedKV | None:
    """Fetch the positions from `first` on that a plan restores, and rotate their keys.

    Args:
        plan: Plan of a prompt of one row whose layers compute exactly the suffix.
        first: First position to restore.
        rotations: Rotations of the layers.
        storage: Store with the blocks.
        attachment: Attachment of the model.
        collector: Statistics of the request.
        ahead_bytes: Maximum number of bytes that are fetched ahead.
        is_wanted: Returns whether the KV is still needed; asked before each layer.

    Returns:
        The KV, or None if it is no longer needed. Layers with a sliding window begin where the suffix's view begins.

    Raises:
        RestoreError: A block could not be fetched or is damaged.
    """
    plan = _without_beginning(plan, first)
    kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    fetcher = Fetcher(storage.residency, collector, attachment.devices.__getitem__, ahead_bytes)
    try:
        prefetch = Prefetch(plan, fetcher, ahead_bytes)
        prefetch.start()
        with torch.no_grad():
            for layer, (kind, like) in rotations.layers.items():
                if not is_wanted():
                    return None
                device, dtype = attachment.devices[layer], like.keys.dtype
                begin = max(first, plan.first_position(kind.window))
                count = max(0, (plan.suffix or 0) - begin)
                keys = torch.empty(1, kind.key_heads, count, kind.key_dim, dtype=dtype, device=device)
                values = torch.empty(1, kind.value_heads, count, kind.value_dim, dtype=dtype, device=device)
                rotate_ = partial(rotations.tap.rotate_, like)
                restore_layer(prefetch, plan, layer, kind, dtype, keys, values, begin, rotate_)
                kv[layer] = keys, values
        fetcher.confirm()
        for device in {keys.device for keys, _ in kv.values()}:
            if device.type != "cpu":
                torch.get_device_module(device.type).current_stream(device).synchronize()
        return kv
    finally:
        fetcher.cancel()


def _without_beginning(plan: Plan, first: int) -> Plan:
    """Return a plan that restores only the positions from `first` on."""
    (group,) = plan.groups
    pieces = []
    for piece in group.pieces:
        skipped = max(0, min(piece.count, first - piece.at))
        if skipped < piece.count:
            pieces.append(_from(piece, skipped))
    return replace(plan, groups=(RowGroup(group.rows, group.pad, tuple(pieces)),))


def _from(piece: SegmentSlice, skipped: int) -> SegmentSlice:
    return replace(piece, first=piece.first + skipped, count=piece.count - skipped, at=piece.at + skipped)
