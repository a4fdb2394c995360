"""Ranking the tokens of stored passages: from the KV that is stored, and what another lead makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from tqdm.auto import tqdm

from .errors import ConfigError, IntegrityError
from .methods import Method, Passages, make_method
from .restore.spectral import KV
from .shape import SegmentShape
from .storage import Storage
from .store.format import is_passage
from .store.segment import SegmentReader


def passages_method(method: Method | str | None) -> Passages:
    """A method that reuses passages. Raises ConfigError if it does not."""
    method = make_method(method or "cache_tune")
    if not isinstance(method, Passages):
        raise ConfigError(f"{type(method).__name__} restores prefixes only; precompute for it without segments=True")
    return method


def rank_stored(storage: Storage, method: Passages, ids: Iterable[str] | None, progress: bool) -> int:
    """Rank stored passages by their KV alone.

    Args:
        ids: of the segments; all passages, if None.

    Returns:
        How many were ranked. What cannot be read, or kept, is not, which is counted.

    Raises:
        ConfigError: the ranking looks at more than the stored KV.
    """
    if not method.ranked_by:
        raise ConfigError(f"{type(method).__name__} goes by no ranking of tokens; CacheTune does")
    if method.ranks_in_context:
        raise ConfigError(
            f"the ranking {method.ranking!r} computes passages, of which the store has no tokens: "
            "store.precompute(model, passages, segments=True) ranks those that are not ranked so"
        )
    storage.flush()
    rows = [row for row in storage.segments() if is_passage(row.provenance)]
    wanted = {row.id for row in rows} if ids is None else set(ids)
    bar = tqdm([row.id for row in rows if row.id in wanted], unit="passage", desc="rank", disable=not progress)
    readers = (storage.disk.reader(name) for name in bar)
    return sum(rank_one(storage, method, reader) for reader in readers if reader is not None)


def rank_one(
    storage: Storage, method: Passages, reader: SegmentReader | None, kv_in_context: Iterable[KV] | None = None
) -> bool:
    """Rank a stored passage, and keep that beside it. Returns whether it is there now.

    Args:
        kv_in_context: its keys and values behind another lead, for rankings that look at these.
    """
    if reader is None or not reader.shape.whole:
        return False
    try:
        scores = method.rank(_stored_kv(storage, reader), kv_in_context)
    except (IntegrityError, OSError) as error:
        storage.disk.report(reader.id, error)
        return False
    return storage.rankings.keep(reader, {method.ranked_by: scores})


def _stored_kv(storage: Storage, reader: SegmentReader) -> Iterator[KV]:
    """A whole segment's keys, before their rotation, and values, layer by layer: `[heads, tokens, dim]` each.

    Raises:
        IntegrityError, OSError: a block cannot be read.
    """
    shape, blocks = reader.shape, dict[int, torch.Tensor]()
    for layer, kind in enumerate(shape.layout.layers):
        if kind is None:
            continue
        groups = {group.index: group for group in shape.restoring_groups[layer]}
        blocks = {index: blocks[index] if index in blocks else storage.blocks_of(reader, index) for index in groups}
        unpack = partial(_heads, shape, layer, blocks)
        yield unpack("key"), unpack("value")


def _heads(shape: SegmentShape, layer: int, blocks: dict[int, torch.Tensor], tensor: str) -> torch.Tensor:
    """All heads of a layer's keys or values, from the blocks of its block groups by number."""
    parts = [
        (part.first_head, shape.unpack(blocks[group.index], group, part))
        for group in shape.restoring_groups[layer]
        for part in group.parts
        if (part.layer, part.tensor) == (layer, tensor)
    ]
    return torch.cat([heads for _, heads in sorted(parts, key=lambda part: part[0])])
