"""Attention of a selection to stored chunks and tokens.

The tiers evict chunks by it (`tiers/scores.py`), and segments are rewritten with their tokens ordered by it
(`cache/rewriter.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..store.segment import SegmentReader
from ..tiers.scores import Attention, TokenImportance
from .fetched import RowPrefix, RowTokens, restoring_groups


def note_importance(importance: TokenImportance, layers: Sequence[int], row: RowPrefix, mass: np.ndarray) -> None:
    """Record the attention to a row's restored tokens, for each of some layers.

    Args:
        importance: Importance of the tokens of all segments.
        layers: Layers that share the selection.
        row: Restored tokens of the row.
        mass: float32 `[heads or 1, tokens]`, attention to each of them.
    """
    for piece in row.pieces:
        tokens = slice(piece.first, piece.first + piece.count)
        for layer in layers:
            importance.note(piece.reader.id, piece.reader.shape, layer, tokens, mass[:, piece.at : piece.stop])


def attention_of(
    selected: RowTokens,
    mass: np.ndarray,
    layers: Collection[int],
    scanned_groups: Collection[tuple[SegmentReader, int]],
) -> list[Attention]:
    """Return the attention to each selected chunk of a row.

    Args:
        selected: Selected tokens.
        mass: float32 `[heads or 1, tokens]`, attention to each restored token of the row.
        layers: Layers that share the selection.
        scanned_groups: KV cache groups, by index, that the selection has read as a whole.
    """
    attention: list[Attention] = []
    for piece in selected.row.pieces:
        reader, shape, stop = piece.reader, piece.reader.shape, piece.first + piece.count
        piece_mass = mass[:, piece.at : piece.stop]
        scanned = {group for scanned_reader, group in scanned_groups if scanned_reader is reader}
        for block_group in restoring_groups(shape, layers):
            if block_group.index in scanned:
                continue
            heads, _, sets = zip(*selected.in_group(piece, block_group), strict=True)
            tokens, counts = np.unique(np.concatenate(sets), return_counts=True)
            if not len(tokens):
                continue
            head_mass = piece_mass[list(heads)] if len(piece_mass) > 1 else piece_mass
            token_mass = head_mass.mean(axis=0)[tokens - piece.first]
            step = shape.geometry.chunk_tokens
            chunks, chunk_index = np.unique(shape.slot_of_token(block_group, tokens) // step, return_inverse=True)
            token_counts = np.minimum(step, shape.tokens_in(block_group) - chunks * step)  # tokens of each chunk
            share = np.bincount(chunk_index, counts / len(sets)) / token_counts  # of heads that select a token
            owner, num_chunks = reader.owners[block_group.index], shape.chunks_in(block_group)
            attention.append((owner, num_chunks, chunks, np.bincount(chunk_index, token_mass), share))
        for index in scanned:  # every selection reads all of these chunks, and all attention depends on them
            block_group = shape.block_groups[index]
            chunks = shape.chunks_of(block_group, np.arange(piece.first, stop))
            total = np.full(len(chunks), mass.sum() / len(mass))
            attention.append((reader.owners[index], shape.chunks_in(block_group), chunks, total, np.ones(len(chunks))))
    return attention
