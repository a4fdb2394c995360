"""Conversations of many turns with Krul: bytes written per turn, and the segments that are left."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import prompt
from thorough import pairs
from transformers import DynamicCache

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.conversations.sharing import MOST_SMALL, SMALL_TOKENS
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import Krul
from hf_tiered_cache.store.geometry import Geometry
from hf_tiered_cache.store.shape import SegmentShape

FAMILY = "qwen2"

LOSSLESS = {"geometry": Geometry(16, 1), "codec": "raw"}
PAIRS = {"change": 1.0, "quality": None}
OPENING = 256


@torch.no_grad()
def logits(model, cache, ids):
    return model(input_ids=ids, past_key_values=cache, logits_to_keep=4).logits


def run_turns(model, store, method, stops, text):
    """Run one turn up to each of `stops`. Return the bytes written in each turn."""
    bytes_written = []
    for stop in stops:
        before = store.stats.bytes_written
        with TieredCache(model, store, conversation="alice", method=method) as cache:
            logits(model, cache, text[:, :stop])
        bytes_written.append(store.stats.bytes_written - before)
    return bytes_written


def bytes_of(store, method, tokens):
    """Return the bytes of KV of so many tokens, unmerged, without the head of a file."""
    layout = storage_of(store).disk.reader(store.segments()[0].id).shape.layout
    return SegmentShape(layout, method.geometry, tokens).blocks_bytes


@pytest.mark.parametrize(
    ("settings", "turn"),
    pairs(
        [{"recompute": 0.4}, {"recompute": 0.7}, {"recompute": 0.0, "layers_shared": 0.7}, {"layers_shared": 0.5}],
        [64, 160],
    ),
    ids=str,
)
@pytest.mark.thin(2)
def test_a_turn_writes_bytes_in_proportion_to_its_tokens(model, root, turn, settings):
    """Rewrites of older segments are rare: all turns together write a small multiple of their own KV."""
    method = Krul(**{"layers_shared": 0.0, "recompute": 0.3} | settings, **PAIRS, **LOSSLESS)
    stops = range(OPENING, OPENING + 20 * turn + 1, turn)
    text = prompt(stops[-1])
    with KVStore(root, engine="posix") as store:
        bytes_written = run_turns(model, store, method, stops, text)[1:]
        new_bytes = bytes_of(store, method, turn) + 5 * 4096
        assert len(bytes_written) == 20
        assert np.median(bytes_written) <= 3 * new_bytes
        assert np.mean(bytes_written) <= 4 * new_bytes
        assert sum(bytes_written[10:]) <= 1.5 * sum(bytes_written[:10])  # not quadratic
        cache = TieredCache(model, store, conversation="alice", method=method, record=False)
        longer_ids = torch.cat([text, prompt(12, seed=7)], dim=1)
        restored_logits = logits(model, cache, longer_ids)
        assert cache.stats.tokens_restored == stops[-1]
    if not method.layers_shared:
        torch.testing.assert_close(restored_logits, logits(model, DynamicCache(), longer_ids), atol=1e-4, rtol=1e-4)


def test_few_small_segments_are_left(model, root):
    method, stops = Krul(0.0, recompute=0.0, **LOSSLESS), range(96, 96 * 40, 96)
    text, most = prompt(stops[-1]), 0
    with KVStore(root, engine="posix") as store:
        for stop in stops:
            run_turns(model, store, method, [stop], text)
            tokens = [row.tokens for row in sorted(store.segments(), key=lambda row: row.position)]
            assert sum(tokens) == stop
            most = max(most, len(tokens))
            assert sum(count < SMALL_TOKENS for count in tokens) <= MOST_SMALL
        assert most > 4  # not rewritten each time


def test_a_small_front_is_not_worth_a_rewrite_of_old_segments(model, root):
    """The segment of the first turn stays the same file until rewriting it saves a fifth."""
    method, text = Krul(0.0, recompute=0.4, **LOSSLESS), prompt(900)
    with KVStore(root, engine="posix") as store:
        run_turns(model, store, method, [512], text)
        (first,) = store.segments()
        run_turns(model, store, method, [576, 640], text)
        assert first.id in {row.id for row in store.segments()}
        run_turns(model, store, method, [832, 896], text)
        assert first.id not in {row.id for row in store.segments()}
        stored_bytes = sum(storage_of(store).disk.reader(row.id).shape.blocks_bytes for row in store.segments())
        assert stored_bytes <= 0.8 * bytes_of(store, method, 896)
