"""Ranking of the tokens of stored passages, from their stored KV and from their KV after another lead."""

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
    """Return a method that reuses passages; CacheTune if `method` is None.

    Raises:
        ConfigError: The method restores prefixes only.
    """
    method = make_method(method or "cache_tune")
    if not isinstance(method, Passages):
        raise ConfigError(f"{type(method).__name__} restores prefixes only; precompute for it without segments=True")
    return method


def rank_stored(storage: Storage, method: Passages, ids: Iterable[str] | None, progress: bool) -> int:
    """Rank the tokens of stored passages from their KV alone.

    Args:
        storage: Store of the passages.
        method: Method that defines the ranking.
        ids: Ids of the segments; None for all passages.
        progress: Whether to show a progress bar.

    Returns:
        Number of passages that were ranked. Passages that cannot be read, or scores that cannot be kept, are skipped
        and counted in the store's statistics.

    Raises:
        ConfigError: The method has no ranking, or one that needs more than the stored KV.
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
    """Rank the tokens of a stored passage, and keep the scores in its sidecar.

    Args:
        storage: Store of the passage.
        method: Method that defines the ranking.
        reader: Segment of the passage, or None if it cannot be read.
        kv_in_context: Keys and values of the passage after another lead, for rankings that compare with these.

    Returns:
        Whether the scores are stored now.
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
    """Yield the unrotated keys and the values of a whole segment, layer by layer: `[heads, tokens, dim]` each.

    Raises:
        IntegrityError, OSError: A block cannot be read.
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
    """Return all heads of a layer's keys or values, `[heads, tokens, dim]`.

    Args:
        shape: Shape of the segment.
        layer: Index of the layer.
        blocks: Blocks of the layer's KV cache groups, by group index.
        tensor: "key" or "value".
    """
    parts = [
        (part.first_head, shape.unpack(blocks[group.index], group, part))
        for group in shape.restoring_groups[layer]
        for part in group.parts
        if (part.layer, part.tensor) == (layer, tensor)
    ]
    return torch.cat([heads for _, heads in sorted(parts, key=lambda part: part[0])])
