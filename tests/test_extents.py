"""Extents: each head's chunks lie cluster by cluster (KVDRIVE, Section 7.2): other places, fewer reads, the same KV."""

from __future__ import annotations

import gc
import os
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import processes
import pytest
import torch
from families import build, prompt
from hypothesis import given
from hypothesis import strategies as st
from segments import LAYOUT, hashes, open_store, read_back, segment
from test_relayout import tensors
from test_selective import GREEDY, ask, fill, question, same

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import FormatError
from hf_tiered_cache.geometry import Geometry, KeyIndex, KVLayout, LayerKV, block_groups
from hf_tiered_cache.methods import ContiguousKV, Impress, KVDrive
from hf_tiered_cache.restore import window
from hf_tiered_cache.select import DECODE_INDEXES
from hf_tiered_cache.select.clusters import ClusterIndex
from hf_tiered_cache.shape import IN_ORDER, SegmentShape, TokenTables
from hf_tiered_cache.store.engines import PosixEngine
from hf_tiered_cache.store.format import segment_id
from hf_tiered_cache.store.memory import aligned_bytes
from hf_tiered_cache.store.relayout import relayout_segment

METHOD = KVDrive(budget=0.2, local=16, index="clusters", extents=True)
PLAIN = KVDrive(budget=0.2, local=16, index="clusters", extents=False)
TOKENS = 400


@pytest.fixture(scope="module")
def model():
    return build("qwen2")


class CountingEngine(PosixEngine):
    """Counts reads, and the bytes that they bring."""

    reads = nbytes = 0
    lock = threading.Lock()

    def read(self, call):
        done = super().read(call)
        with self.lock:
            self.reads, self.nbytes = self.reads + 1, self.nbytes + done
        return done


def asked(model, store, ids, method):
    """The answer, and what the cache counted; nothing of the cache is left."""
    found, cache = ask(model, store, question(ids), method)
    kept, stats = without_cache(found), cache.stats
    del cache, found
    gc.collect()
    return kept, stats


def without_cache(output):
    """What `same` compares of an answer."""
    return SimpleNamespace(sequences=output.sequences, logits=output.logits)


def shape_of(store):
    """The shape of the one segment, and its id."""
    (row,) = store.segments()
    return store._storage.disk.reader(row.id).shape, row.id


def clustered(clusters=12, each=6, heads=2, dim=16):
    """An index of chunks of 8 tokens, each near the direction of one cluster; those of a cluster lie anywhere."""
    random = torch.Generator().manual_seed(0)
    cluster_of = (torch.arange(clusters * each) % clusters)[torch.randperm(clusters * each, generator=random)]
    directions = torch.nn.functional.normalize(torch.randn(heads, clusters, dim, generator=random), dim=-1)
    keys = directions[:, cluster_of].repeat_interleave(8, dim=1)
    keys = keys + 0.01 * torch.randn(keys.shape, generator=random)
    return ClusterIndex.build(keys, 8, tokens_per_centroid=8 * each)


def clusters_in(index, head):
    """The chunks of each cluster, and its centroid's direction from the mean of all."""
    starts = index.starts[head].tolist()
    chunks = [index.chunk_order[head, begin:end].tolist() for begin, end in pairwise(starts)]
    centroids = index.centroids[head]
    return chunks, torch.nn.functional.normalize(centroids - centroids.mean(0), dim=-1)


# --- the order


def test_tables_by_chunk():
    layout = KVLayout((LayerKV(2, 4, 2, 4), LayerKV(2, 4, 2, 4, window=8), None, LayerKV(2, 4, 2, 4)), torch.float32)
    order = {0: np.array([[2, 0, 1], [0, 1, 2]]), 1: np.array([[2, 1, 0]] * 2), 3: np.array([[1, 2, 0], [1, 0, 2]])}
    groups = block_groups(layout, Geometry(2, 1, 1, index=KeyIndex()))
    tables = TokenTables.by_chunk(order, 2, groups, 6)
    assert tables.of_group.tolist() == [0, IN_ORDER, IN_ORDER, IN_ORDER, 1, 2, IN_ORDER, IN_ORDER]
    assert tables.slot_of_token.tolist() == [[2, 3, 4, 5, 0, 1], [4, 5, 0, 1, 2, 3], [2, 3, 0, 1, 4, 5]]
    assert not tables.same(None)
    apart = TokenTables.by_chunk({0: order[0]}, 2, block_groups(layout, Geometry(2, 1, 1, split_kv=True)), 6)
    assert apart.of_group.tolist()[:4] == [0, IN_ORDER, 0, IN_ORDER]  # keys and values of the first head
    assert TokenTables.by_chunk({0: np.array([[0, 1, 2]] * 2)}, 2, groups, 6).same(None)
    shapes = [SegmentShape(layout, Geometry(chunk, 1, 1, index=KeyIndex()), 6, tables) for chunk in (2, 1, 3)]
    assert [all(map(shape.keeps_chunks, groups)) for shape in shapes] == [True, True, False]
    short = TokenTables.by_chunk({0: np.array([[2, 0, 1]] * 2)}, 2, groups, 5)  # the last chunk has one token
    assert short.slot_of_token[0].tolist() == [1, 2, 3, 4, 0]
    for wrong in ([0, 0, 1], [0, 1], [0, 1, 3], [-1, 0, 1]):
        with pytest.raises(FormatError, match="no order"):
            TokenTables.by_chunk({0: np.array([wrong] * 2)}, 2, groups, 6)


def test_clusters_lie_in_one_piece_and_those_that_are_alike_side_by_side():
    index = clustered()
    for head, order in enumerate(index.order().tolist()):
        chunks, directions = clusters_in(index, head)
        left, last = {number for number, some in enumerate(chunks) if some}, None
        while order:
            likeness = [] if last is None else (directions @ directions[last]).tolist()
            wanted = 0 if last is None else max(sorted(left), key=likeness.__getitem__)
            assert order[: len(chunks[wanted])] == chunks[wanted]
            order, last = order[len(chunks[wanted]) :], wanted
            left.remove(wanted)
        assert not left


@given(st.sampled_from([1, 2, 4, 8, 16]), st.booleans(), st.integers(1, 7), st.integers(0, 99))
def test_any_order_of_chunks_and_back_is_the_identity(tmp_path_factory, chunk_tokens, split, count, seed):
    store, geometry = open_store(tmp_path_factory.mktemp("store")), Geometry(chunk_tokens, 1, 1, split)
    header, chain, blocks = segment(hashes(count))
    assert store.publish(header, chain, blocks)
    random, chunks = np.random.default_rng(seed), 16 * count // chunk_tokens
    order = {layer: random.permuted(np.tile(np.arange(chunks), (2, 1)), axis=1) for layer in (0, 1, 3)}
    tables = TokenTables.by_chunk(order, chunk_tokens, block_groups(LAYOUT, geometry), 16 * count)
    expected, last = tensors(store.reader(header.id), read_back(store, header.id)), store.reader(header.id)
    for cut, each in ((geometry, None if tables.same(None) else tables), (Geometry(), None)):
        new, new_chain, blocks = relayout_segment(last, cut, each)
        assert store.publish(new, new_chain, blocks)
        last = store.reader(new.id)
        found = tensors(last, read_back(store, last.id))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        for group in last.shape.block_groups if each is not None else ():
            if group.layers[0] in order:  # block i holds the chunk that the order has there
                firsts = last.shape.tokens_by_slot(group)[::chunk_tokens] // chunk_tokens
                assert firsts.tolist() == order[group.layers[0]][group.parts[0].first_head].tolist()


# --- reads


def test_a_cluster_is_one_read(tmp_path):
    """Through the engine: in the order of tokens it is several, even with gaps read through."""
    index = clustered()
    tokens, layout = 8 * index.chunks, KVLayout((LayerKV(2, 256, 2, 256),), torch.float32)
    groups, reads = block_groups(layout, METHOD.geometry), {}
    ordered = TokenTables.by_chunk({0: index.order().numpy()}, 8, groups, tokens)
    with KVStore(tmp_path, engine=CountingEngine(), host_memory=0) as store:
        disk, engine = store._storage.disk, store._engine
        header, chain, _ = segment(hashes(tokens // 16))
        for name, tables in (("tokens", None), ("clusters", ordered)):
            head = header_with(header, chain, layout, tables)
            assert disk.publish(
                head, chain, [torch.zeros(72, group.block_bytes, dtype=torch.uint8) for group in groups]
            )
            reader = disk.reader(head.id)
            for group in groups:
                for cluster in clusters_in(index, group.parts[0].first_head)[0]:
                    if cluster:
                        chunks = reader.shape.chunks_of(group, (np.array(cluster)[:, None] * 8 + np.arange(8)).ravel())
                        memory = aligned_bytes(len(chunks) * group.block_bytes).view(-1, 1, group.block_bytes)
                        before = engine.reads
                        reader.read(group.index, list(zip(chunks.tolist(), memory, strict=True))).result()
                        reads.setdefault(name, []).append(engine.reads - before)
    assert set(reads["clusters"]) == {1}
    assert sum(reads["tokens"]) > 3 * sum(reads["clusters"])


def header_with(header, chain, layout, tables):
    shape = SegmentShape(layout, METHOD.geometry, header.shape.tokens, tables)
    return replace(header, shape=shape, id=segment_id(header.parent, chain[-1], shape, header.provenance))


def test_chunks_in_extents_are_copied_whole(model, tmp_path, monkeypatch):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, METHOD)
        expected, _ = asked(model, store, ids, PLAIN)
        assert store.relayout(METHOD, progress=False) == 1
        monkeypatch.setattr(window, "_gather_tokens", None)  # the slow way, token by token
        same(asked(model, store, ids, METHOD)[0], expected)


def test_decoding_asks_the_disk_for_fewer_reads(model, tmp_path):
    """A text of a few words, again and again: chunks of a word are wanted together, and lie anywhere."""
    words = np.random.default_rng(2).integers(0, 6, TOKENS // 8)
    ids = prompt(6 * 8, seed=3)[0].view(6, 8)[words].view(1, -1)
    engine = CountingEngine()
    method = KVDrive(budget=0.2, local=16, index="clusters", window=1, extents=False)
    with KVStore(tmp_path, engine=engine, host_memory=0) as store:
        fill(store, model, ids, method)
        expected, _ = asked(model, store, ids, method)  # makes the index
        engine.reads = engine.nbytes = 0
        _, before = asked(model, store, ids, method)
        in_order, nbytes = engine.reads, engine.nbytes
        assert store.relayout(METHOD, progress=False) == 1
        asked(model, store, ids, method)
        engine.reads = engine.nbytes = 0
        found, after = asked(model, store, ids, method)
        same(found, expected)
    assert engine.reads < 0.9 * in_order
    assert after.bytes_used == before.bytes_used
    for stats, least in ((before, nbytes), (after, engine.nbytes)):
        assert least - 2 * 2**20 < stats.bytes_read <= least  # gaps are counted; the index is not of the request's KV


# --- when


def test_what_was_used_lies_in_extents_when_nobody_uses_it(model, tmp_path, monkeypatch):
    """Another geometry first, then another order; index and importance come along, and all methods read the same."""
    ids, impress = prompt(TOKENS), Impress(budget=0.25, probe_heads=2, chunk_tokens=16)
    for number, stored in enumerate((METHOD, None)):
        methods = {"exact": None, "kv_drive": PLAIN}
        if stored is METHOD:  # it chooses by the chunks that a segment is cut into
            methods["contiguous"] = ContiguousKV(0.25, reorder=False)
        with KVStore(tmp_path / str(number), engine="posix", host_memory=0) as store:
            fill(store, model, ids, stored)
            shape, name = shape_of(store)
            store.pin([name])
            asked(model, store, ids, impress)
            before = {name: asked(model, store, ids, method) for name, method in methods.items()}
            store.flush()
            mass = store._storage.rewriter.importance.of(name)
            assert shape_of(store) == (shape, name)  # nobody has asked for extents
            cache = TieredCache(model, store, method=METHOD, record=False)
            answer = without_cache(model.generate(question(ids), past_key_values=cache, **GREEDY))
            store.flush()
            assert shape_of(store)[1] == name  # it is in use
            twin = cache.fork()
            del cache
            gc.collect()
            store.flush()
            assert shape_of(store)[1] == name  # still
            del twin
            gc.collect()
            store.flush()
            shape, new = shape_of(store)
            assert new != name and shape.geometry == METHOD.geometry and shape.tables is not None
            assert store.pinned() == {new}
            assert not store.verify().bad
            sizes = store._storage.disk.beside.sizes()
            assert set(sizes) == {new} and set(sizes[new]) >= {"clusterindex_8", "importance"}
            assert np.array_equal(store._storage.rewriter.importance.of(new), mass)
            for kind in DECODE_INDEXES.values():
                monkeypatch.setattr(kind, "build", None)
            again = {name: asked(model, store, ids, method) for name, method in methods.items()}
            monkeypatch.undo()
            for name, (output, _) in before.items():
                same(again[name][0], output)
            same(again["kv_drive"][0], answer)
            assert again["kv_drive"][1].index_seconds == 0
            assert again["kv_drive"][1].bytes_used == before["kv_drive"][1].bytes_used
            asked(model, store, ids, METHOD)
            asked(model, store, ids, KVDrive(0.2, chunk_tokens=16, extents=True))
            store.flush()
            assert shape_of(store)[1] == new  # once is enough
        with KVStore(tmp_path / str(number), engine="posix", host_memory=0) as store:
            for kind in DECODE_INDEXES.values():
                monkeypatch.setattr(kind, "build", None)
            assert shape_of(store)[1] == new
            assert store._storage.disk.beside.kept(store._storage.disk.reader(new), "importance", {}) is not None
            same(asked(model, store, ids, METHOD)[0], answer)
            monkeypatch.undo()
            store.flush()
            assert shape_of(store)[1] == new


@pytest.mark.parametrize(
    "method",
    [
        PLAIN,
        KVDrive(0.2, index="page_bounds", extents=True),
        KVDrive(1.0, extents=True),
        ContiguousKV(0.2, reorder=False),
    ],
    ids=["off", "no clusters", "whole", "other"],
)
def test_nothing_moves_without_extents(method, model, tmp_path):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        before = shape_of(store)[1]
        asked(model, store, ids, method)
        store.flush()
        assert shape_of(store)[1] == before


def test_relayout_goes_by_the_index_that_is_kept_and_else_by_position(model, tmp_path, caplog):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        store.precompute(model, ids, progress=False)
        assert store.relayout(METHOD, progress=False) == 1
        assert "in the order of their tokens" in caplog.text
        shape, _ = shape_of(store)
        assert shape.geometry == METHOD.geometry and shape.tables is None
        assert store.relayout(METHOD, progress=False) == 0
        expected, _ = asked(model, store, ids, PLAIN)
        caplog.clear()
        assert store.relayout(PLAIN, progress=False) == 0
        assert store.relayout(METHOD, progress=False) == 1
        assert shape_of(store)[0].tables is not None
        assert store.relayout(METHOD, progress=False) == store.relayout(PLAIN, progress=False) == 0
        same(asked(model, store, ids, METHOD)[0], expected)
        assert store.relayout("exact", progress=False) == store.relayout(METHOD, progress=False) == 1
        same(asked(model, store, ids, METHOD)[0], expected)
        assert "in the order of their tokens" not in caplog.text  # the index went along both times


def test_a_request_that_comes_meanwhile_is_not_disturbed(model, tmp_path, monkeypatch):
    """What is being laid out is given up, and done when that request is over."""
    ids, caches = prompt(TOKENS), []
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        before, rewriter = shape_of(store)[1], store._storage.rewriter

        def replacing(*what, real=rewriter._replace):
            if not caches:
                caches.append(TieredCache(model, store, method=METHOD, record=False))
                with torch.no_grad():
                    model(input_ids=question(ids), past_key_values=caches[0], logits_to_keep=1)
            return real(*what)

        monkeypatch.setattr(rewriter, "_replace", replacing)
        asked(model, store, ids, METHOD)
        store.flush()
        assert caches and shape_of(store)[1] == before
        assert list((store.path / "tmp").iterdir()) == []
        caches[0] = None
        gc.collect()
        store.flush()
        assert shape_of(store)[1] != before


# --- faults


def test_an_index_that_gives_no_order_moves_nothing(model, tmp_path):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, METHOD)
        asked(model, store, ids, PLAIN)
        before, beside = shape_of(store)[1], store._storage.disk.beside
        reader = store._storage.disk.reader(before)
        ((kind, arrays, facts),) = beside.all_of(reader)
        for name, wrong in (("chunk_order", 0), ("starts", 10**6), ("centroids", None)):
            forged = {key: value.clone() for key, value in arrays.items()}
            if wrong is None:
                forged = {key: value for key, value in forged.items() if not key.endswith(name)}
            else:
                forged[f"0.{name}"].fill_(wrong)
            assert beside.keep(reader, kind, forged, facts)
            store._storage.rewriter._lay_out_unused(before, METHOD)
            assert store.relayout(METHOD, progress=False) == 0
            assert shape_of(store)[1] == before


def test_the_quota_holds_and_without_room_all_stays(model, tmp_path):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, METHOD)
        before = shape_of(store)[1]
        store.pin([before])
        expected, _ = asked(model, store, ids, PLAIN)
        used = store._storage.disk.used_bytes()
    for more, moved in ((store_bytes(tmp_path) // 2, False), (3 * store_bytes(tmp_path), True)):
        with KVStore(tmp_path, engine="posix", host_memory=0, disk_quota=used + more) as store:
            same(asked(model, store, ids, METHOD)[0], expected)
            store.flush()
            assert (shape_of(store)[1] != before) == moved
            assert store.stats.dropped_writes == (not moved)
            assert store._storage.disk.used_bytes() <= used + more
            assert not store.verify().bad


def store_bytes(path):
    return sum(file.stat().st_size for file in (path / "segments").iterdir())


@pytest.mark.parametrize("step", ["first write", "half", "linked", "index", "removed"])
def test_kill_9_while_it_is_laid_out_leaves_one_whole_segment(step, model, tmp_path):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, METHOD)
        expected, _ = asked(model, store, ids, PLAIN)
        _, before = shape_of(store)
    code = f"""
import os, signal, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from hf_tiered_cache import KVStore
from hf_tiered_cache.methods import KVDrive
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
step, writes = {step!r}, 0
store = KVStore({str(tmp_path)!r}, engine="posix", host_memory=0)
pwrite, link, rename, unlink = os.pwrite, os.link, os.rename, os.unlink
def writing(fd, data, offset):
    global writes
    writes += 1
    if (step, writes) in (("first write", 1), ("half", 5)): pwrite(fd, bytes(data)[:4096], offset); die()
    return pwrite(fd, data, offset)
def after(name, real):
    def call(*paths, **more):
        real(*paths, **more)
        if step == name: die()
    return call
os.pwrite, os.link, os.rename = writing, after("linked", link), after("index", rename)
disk = store._storage.disk
disk.remove = after("removed", disk.remove)
store.relayout(KVDrive(budget=0.2, local=16, index="clusters", extents=True), progress=False)
"""
    done = processes.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        there = {path.stem for path in Path(tmp_path, "segments").iterdir()}
        assert (before in there) == (step != "removed") and len(there) == (2 if step in ("linked", "index") else 1)
        assert not store.verify().bad
        found, stats = asked(model, store, ids, METHOD)
        same(found, expected)
        assert stats.tokens_restored == TOKENS and stats.recomputed == 0
        store.flush()
        store.gc()
        assert not store.verify().bad
        same(asked(model, store, ids, METHOD)[0], expected)
        if step == "removed":
            assert set(store._storage.disk.beside.sizes()) == {shape_of(store)[1]}
