"""When blocks move: in the order of layers, ahead of them, within a bound, and never to be forgotten."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from families import build, build_deep, prompt
from hypothesis import given
from hypothesis import strategies as st
from reference import assert_like_reference
from test_plans import Plain
from thorough import pairs

from hf_tiered_cache import Exact, KVStore, TieredCache
from hf_tiered_cache.errors import IntegrityError, RestoreError
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import CacheBlend, CacheTune, ContiguousKV, Epic, Krul, Passages
from hf_tiered_cache.patches.tap import PreRopeKV
from hf_tiered_cache.restore.fetch import Fetcher
from hf_tiered_cache.restore.gather import Gather
from hf_tiered_cache.restore.plan import Plan
from hf_tiered_cache.restore.prefetch import Prefetch
from hf_tiered_cache.restore.rows import RowGroup, SegmentSlice
from hf_tiered_cache.store.geometry import ALIGNMENT, Geometry, KVLayout, LayerKV
from hf_tiered_cache.store.shape import SegmentShape, TokenTables
from hf_tiered_cache.tiers.collector import StatsCollector
from hf_tiered_cache.tiers.handles import BlockRequest, FetchedBlocks

CPU = torch.device("cpu")
GREEDY = {"do_sample": False, "max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
LAYERS = 12


@dataclass(eq=False)
class Reader:
    """Reader with the attributes that prefetching needs."""

    id: str
    shape: SegmentShape

    @property
    def held(self):
        return self.shape.held

    @property
    def owners(self):
        return [(self.id, group.index, 0) for group in self.shape.block_groups]


class Lease:
    has_arrived = is_confirmed = True

    def __init__(self, requests, fails):
        self.fetched = [FetchedBlocks(request, request.chunks, parts=[]) for request in requests]
        self.released, self.fails, self.failed = 0, fails, None

    def wait(self):
        if self.fails:
            raise self.fails


class Residency:
    """Residency that records fetches. One KV cache group fails: when it is waited for, or at once."""

    def __init__(self, fails_at=None, error=None, at_once=False):
        self.fetched, self.leases, self.fails_at, self.error, self.at_once = [], [], fails_at, error, at_once

    def fetch(self, requests, device, collector, ahead, later):
        fails = any(block_group == self.fails_at for _, block_group, _ in requests)
        if self.at_once and fails:
            raise self.error
        self.fetched.extend((reader.id, block_group, chunks.tolist()) for reader, block_group, chunks in requests)
        self.leases.append(Lease(requests, self.error if fails else None))
        return self.leases[-1]

    def release(self, lease):
        lease.released += 1


def plan(segments=(320,), suffix=10, windows=(0,) * LAYERS, geometry=None):
    """Plan a prompt of several segments, and a suffix to compute."""
    layout = KVLayout(tuple(LayerKV(2, 16, 2, 16, window=w) for w in windows), torch.float32)
    pieces, at = [], 0
    for number, tokens in enumerate(segments):
        pieces.append(
            SegmentSlice(Reader(str(number), SegmentShape(layout, geometry or Geometry(), tokens)), 0, tokens, at)
        )
        at += tokens
    return Plan(0, at + suffix, (np.arange(at, at + suffix),) * LAYERS, (RowGroup((0,), 0, tuple(pieces)),))


def prefetch(restore_plan, ahead, residency=None):
    residency = residency or Residency()
    fetch = Prefetch(restore_plan, Fetcher(residency, StatsCollector(), lambda layer: CPU, ahead))
    fetch.start()
    return fetch, residency


@given(ahead=st.integers(0, 400), segments=st.lists(st.integers(1, 20).map(lambda n: 16 * n), min_size=1, max_size=3))
def test_it_runs_ahead_within_its_bound_and_in_the_order_of_layers(ahead, segments):
    new_plan = plan(segments)
    fetch, residency = prefetch(new_plan, ahead << 10)
    largest = max(p.reader.shape.group_offsets[1] for p in new_plan.groups[0].pieces)  # bytes of the first block group
    for layer in range(LAYERS):
        list(fetch.units(layer))
        assert fetch._in_flight_bytes <= (ahead << 10) + (len(segments) + 1) * largest  # in use, and one ahead
        fetch.done(layer)
        if ahead == 0:
            assert all(
                block_group * 4 <= layer for _, block_group, _ in residency.fetched
            )  # nothing before it is needed
    block_groups = [block_group for _, block_group, _ in residency.fetched]
    assert block_groups == sorted(block_groups)
    assert len(residency.fetched) == len(segments) * 3
    assert [lease.released for lease in residency.leases] == [1] * len(residency.leases)
    assert fetch._in_flight_bytes == 0


def test_the_next_block_groups_are_under_way_before_the_first_layer_has_its_own():
    fetch, residency = prefetch(plan(), 1 << 30)
    assert [block_group for _, block_group, _ in residency.fetched] == [0, 1, 2]
    fetch.fetcher.cancel()
    fetch.fetcher.cancel()
    assert all(lease.released for lease in residency.leases)


def test_nothing_is_fetched_before_the_start():
    """The caller ensures the cancellation before it starts the prefetch."""
    residency = Residency()
    fetch = Prefetch(plan(), Fetcher(residency, StatsCollector(), lambda layer: CPU, 1 << 30))
    assert residency.fetched == []
    fetch.start()
    assert len(residency.fetched) == 3


def test_one_block_group_is_always_under_way_while_another_is_in_use():
    """The disk is busy while layers compute, for KV cache groups of any size."""
    fetch, residency = prefetch(plan(), 1)
    for layer in range(LAYERS):
        fetch.units(layer)
        assert [block_group for _, block_group, _ in residency.fetched] == list(range(min(3, layer // 4 + 2)))
        fetch.done(layer)
    assert fetch._in_flight_bytes == 0


def test_of_sliding_layers_only_the_chunks_in_sight_are_fetched():
    new_plan = plan((320,), windows=(0, 40) * (LAYERS // 2))
    _, residency = prefetch(new_plan, 1 << 30)
    block_groups = new_plan.groups[0].pieces[0].reader.shape.block_groups
    chunks = {block_group: chunks for _, block_group, chunks in residency.fetched}
    for block_group in block_groups:
        first = (320 - 39) // 16 if block_group.window else 0
        assert chunks[block_group.index] == list(range(first, 20))


@pytest.mark.parametrize("ahead", [0, 1, 1 << 30])
def test_behind_fronts_the_disk_never_pauses(ahead):
    """The exception is a plan that reads nothing ahead."""
    fronts = [320] * 4 + [160] * 4 + [0] * 4
    fetch, residency = prefetch(plan().with_recompute_lengths(fronts), ahead)
    assert [(group, len(chunks)) for _, group, chunks in residency.fetched] == ([(1, 10), (2, 20)] if ahead else [])
    for layer in range(LAYERS):
        assert [unit.block_group.index for unit in fetch.units(layer)] == ([layer // 4] if layer >= 4 else [])
        fetch.done(layer)
    assert len(residency.fetched) == 2
    assert all(lease.released == 1 for lease in residency.leases)


@pytest.mark.parametrize("method", [Exact(ahead_bytes=0), ContiguousKV(0.25, ahead_bytes=0)])
def test_memory_of_a_layer_is_free_when_it_was_copied(tmp_path, monkeypatch, method):
    """Without a tier, blocks use the request's own memory, of a few layers at a time."""
    model, ids = build("llama", num_hidden_layers=8), prompt(200)
    method = replace(method, geometry=Geometry(16, 1)) if isinstance(method, Exact) else method
    allocations, most = [], []

    def allocate(nbytes):
        memory = np.empty(nbytes + 4096, np.uint8)
        start = -memory.ctypes.data % 4096
        allocations.append(weakref.ref(memory))
        most.append(sum(reference().nbytes for reference in allocations if reference() is not None))
        return torch.from_numpy(memory[start : start + nbytes])

    with KVStore(tmp_path, engine="posix", host_memory=0, index_memory=0) as store:
        store.precompute(model, ids, method=method, progress=False)
        monkeypatch.setattr(store._storage.residency.host, "allocate_own", allocate)
        cache = TieredCache(model, store, method=method, record=False)
        model(torch.cat([ids, prompt(16, seed=5)], dim=1), past_key_values=cache, logits_to_keep=1)
    assert cache.stats.tokens_restored == 192
    # of eight layers; on a busy machine threads let go of their last blocks late
    assert max(most) <= 5 * max(most[:1]) < sum(most)


ERRORS = [OSError("planted"), torch.OutOfMemoryError("planted"), MemoryError("planted"), IntegrityError("planted")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_failing_block_names_its_segment(error):
    fetch, residency = prefetch(plan((160, 160)), 1 << 30, Residency(1, error))
    list(fetch.units(0))
    fetch.done(0)
    with pytest.raises(RestoreError) as caught:
        list(fetch.units(4))
    assert caught.value.segment == "0"
    assert caught.value.__cause__ is error
    details = fetch.fetcher.collector.stats.details
    assert (details.verification_failures, details.read_errors) == ((1, 0) if error is ERRORS[-1] else (0, 1))
    fetch.fetcher.cancel()
    assert all(lease.released for lease in residency.leases)


@pytest.mark.parametrize("ahead", [0, 1, 1 << 30])
def test_a_fetch_that_cannot_begin_names_its_segment_and_leaves_nothing_held(ahead):
    residency = Residency(1, RuntimeError("planted"), at_once=True)
    fetch = Prefetch(plan((160, 160)), Fetcher(residency, StatsCollector(), lambda layer: CPU, ahead))
    with pytest.raises(RestoreError, match="planted") as caught:
        fetch.start()
        for layer in range(LAYERS):
            list(fetch.units(layer))
    assert caught.value.segment == "0"
    fetch.fetcher.cancel()
    assert residency.leases
    assert all(lease.released for lease in residency.leases)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prefetching_or_not_gives_the_same_bits(tmp_path, family):
    model, ids = build(family), prompt(200)
    arguments = {"do_sample": False, "max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}
    with KVStore(tmp_path) as store:
        store.precompute(model, ids, progress=False)
    outputs = []
    for ahead in (0, 1, 20_000, 1 << 30):
        for host in ("0", "1GiB"):
            with KVStore(tmp_path, host_memory=host) as store:
                cache = TieredCache(model, store, method=Exact(ahead_bytes=ahead), record=False)
                outputs.append(model.generate(ids, past_key_values=cache, **arguments))
                assert cache.stats.tokens_restored == 192
    for output in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0].logits, output.logits, strict=True))


@pytest.mark.parametrize("method", [Exact(), Exact(ahead_bytes=1), Exact(recompute=0.1, decline=False)], ids=str)
def test_a_prefix_does_not_evict_its_own_blocks_before_their_turn(tmp_path, method):
    """The last layers are in memory, which has room for no others, and the first layers are read."""
    model, ids = build("llama", num_hidden_layers=8), prompt(320 + 16)
    with KVStore(tmp_path) as store:
        store.precompute(model, ids[:, :320], method=Plain(geometry=Geometry(16, 1)), progress=False)
        shape = storage_of(store).disk.reader(store.segments()[0].id).shape
    last_groups = shape.block_groups[4:]
    nbytes = sum(group.block_bytes * shape.chunks_in(group) for group in last_groups)
    with KVStore(tmp_path, host_memory=nbytes + ALIGNMENT) as store:
        storage = storage_of(store)
        reader = storage.disk.reader(store.segments()[0].id)
        requests = [BlockRequest(reader, group.index, np.arange(shape.chunks_in(group))) for group in last_groups]
        handle = storage.residency.fetch(requests, CPU, StatsCollector())
        handle.wait()
        storage.residency.release(handle)
        cache = TieredCache(model, store, method=method, record=False)
        model(ids, past_key_values=cache, logits_to_keep=1)
    is_recomputed = method.recompute == 0.1
    assert cache.stats.tokens_restored == 320 and (cache.stats.tokens_recomputed > 0) == is_recomputed
    assert cache.stats.tiers["host"].bytes >= (0.9 if is_recomputed else 1) * nbytes


@pytest.mark.parametrize(
    ("family", "geometry", "copies"),
    [
        ("llama", Geometry(), 2),
        ("glm4", Geometry(), 2),  # rotates a part of each head
        ("llama", Geometry(split_kv=True), 12),
        ("llama", Geometry(codec="int8"), 2),
        ("deepseek_v3", Geometry(), 12),  # two tensors of different widths
        ("smollm3", Geometry(), 12),  # some layers do not rotate
    ],
    ids=str,
)
def test_layers_of_one_form_are_restored_together(tmp_path, monkeypatch, family, geometry, copies):
    """All layers of a block take one copy; where they differ, keys and values of each layer take one."""
    model, ids, copied, copy = build_deep(family), prompt(100), [], Gather._copy
    monkeypatch.setattr(Gather, "_copy", lambda self, copies: [copied.extend(copies), copy(self, copies)][1])
    with KVStore(tmp_path) as store:
        store.precompute(model, ids, method=Plain(geometry=geometry), progress=False)
        cache = TieredCache(model, store, method=Plain(geometry=geometry), record=False)
        if geometry.codec == "raw":
            assert_like_reference(model, cache, ids, ids, GREEDY)
        else:
            model.generate(ids, past_key_values=cache, **GREEDY)
        assert cache.stats.tokens_restored == 96
    assert len(copied) == copies


JOINING = [CacheTune(0.0), CacheTune(0.3), CacheBlend(0.3), Epic(0.3), Exact(recompute=0.5), Krul(0.0)]


@pytest.mark.parametrize(("method", "codec"), pairs(JOINING, ["raw", "int8"]), ids=str)
@pytest.mark.thin(2)
def test_layers_restored_together_have_the_bits_of_layers_restored_alone(tmp_path, monkeypatch, method, codec):
    """Also if layers compute different positions, and with a part of the prefix recomputed."""
    model, logits, joined, join = build("llama", num_hidden_layers=9), [], [], Prefetch.join
    coded_method = replace(method, geometry=Geometry(16, 3), codec=codec)
    passages = [prompt(96, seed=seed)[0] for seed in (1, 2)]
    is_moved = isinstance(coded_method, Passages)
    ids = torch.cat([*[prompt(30, seed=5)[0]] * is_moved, *passages, prompt(24, seed=3)[0]])[None]

    def noting(self, *args):
        layer_group = join(self, *args)
        joined.extend(layer_group.layers if layer_group else ())
        return layer_group

    with KVStore(tmp_path, codec=codec) as store:
        store.precompute(model, passages if is_moved else ids, passages=is_moved, method=coded_method, progress=False)
        for together in (True, False):
            monkeypatch.setattr(Prefetch, "join", noting if together else lambda *args: None)
            cache = TieredCache(model, store, method=coded_method, record=False)
            logits.append(model.generate(ids, past_key_values=cache, **GREEDY).logits)
            assert cache.stats.tokens_restored > 0
    assert len(set(joined)) >= 3
    assert all(torch.equal(first_logits, second_logits) for first_logits, second_logits in zip(*logits, strict=True))


def test_a_layer_that_rotates_in_another_way_is_restored_alone(tmp_path, monkeypatch):
    model, ids = build_deep("llama"), prompt(100)
    monkeypatch.setattr(PreRopeKV, "rotates_like", lambda self, kv: self is kv)
    with KVStore(tmp_path) as store:
        store.precompute(model, ids, progress=False)
        cache = TieredCache(model, store, record=False)
        assert_like_reference(model, cache, ids, ids, GREEDY)
        assert cache.stats.tokens_restored == 96


def test_what_waits_for_the_other_layer_of_its_pair_keeps_nobody_from_running_ahead():
    """Pairs are far apart and all open in the middle, and as much is read ahead as without pairs."""
    pairs = tuple((i, i + LAYERS // 2) for i in range(LAYERS // 2))
    new_plan = plan(geometry=Geometry(16, 1, pairs=pairs))
    (piece,) = new_plan.groups[0].pieces
    shape = piece.reader.shape
    tables = TokenTables.by_pairs(
        [0] * LAYERS, {pair: np.arange(16) for pair in pairs}, shape.block_groups, shape.tokens
    )
    piece.reader.shape = replace(shape, tables=tables)
    shape = piece.reader.shape
    size = {group.index: shape.chunks_in(group) * group.block_bytes for group in shape.block_groups}
    ahead = 2 * max(size.values())
    fetch, residency = prefetch(new_plan, ahead)
    for layer in range(LAYERS):
        units = list(fetch.units(layer))
        assert sum(layer in unit.block_group.layers for unit in units) == len(units) == 2
        early = {group for _, group, _ in residency.fetched if shape.block_groups[group].layers[0] > layer}
        remaining = [group.index for group in shape.block_groups if group.layers[0] > layer]
        assert early == set(remaining) or sum(size[group] for group in early) > ahead - 2 * max(size.values())
        assert early or not remaining
        assert fetch._in_flight_bytes <= ahead + 2 * max(size.values())
        fetch.done(layer)
    assert len(residency.fetched) == len(shape.block_groups)
    assert [lease.released for lease in residency.leases] == [1] * len(residency.leases)
    assert fetch._in_flight_bytes == 0
