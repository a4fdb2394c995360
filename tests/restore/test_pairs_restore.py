"""Restoring segments whose layers are merged in pairs: the model sees what the same arithmetic gives on its own KV."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from families import build_deep as build
from families import prompt
from reference import Remembering, assert_same, kv_of, prefilled
from side_stream import with_device
from test_selective import GREEDY, ask, fill, question
from thorough import pairs

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import METHODS, Exact, Impress, Method
from hf_tiered_cache.reasons import MERGED
from hf_tiered_cache.restore.prefetch import units_of
from hf_tiered_cache.store.codecs import coded_provenance, make_codec, merged_codec
from hf_tiered_cache.store.geometry import BLOCK_ALIGNMENT, Geometry, aligned, block_groups
from hf_tiered_cache.store.pairs import encode
from hf_tiered_cache.store.relayout import join_segments
from hf_tiered_cache.store.shape import TokenTables
from hf_tiered_cache.tiers.collector import StatsCollector

pytestmark = pytest.mark.usefixtures("unfolded")

PAIRS = ((1, 4), (2, 3))  # of six layers, one pair inside the other
RETAINED = {(1, 4): np.array([0, 3, 50, 51, 95]), (2, 3): np.array([17])}
FRONTS = (80, 64, 33, 32, 5, 0)
PREFIX = 96


@dataclass(frozen=True, kw_only=True)
class Paired(Method):
    """Method that restores segments with pairs, and computes the missing recomputed prefix."""

    @property
    def provenance(self):
        return coded_provenance("paired", self.geometry.codec)

    def usable_hashes(self, shape):
        return shape.tokens // 16

    def positions_to_compute(self, context):
        positions = list(context.suffix_positions())
        for group in context.groups:
            for piece in group.pieces:
                start, front = piece.at + group.pad - context.base - piece.first, 0
                for layer in reversed(range(context.layers)):
                    front = max(front, start + piece.reader.shape.held_from[layer])
                    if front > start:
                        positions[layer] = np.union1d(np.arange(start, front), positions[layer])
        return tuple(positions)


def suspend(store, pairs=PAIRS, fronts=(0,) * 6, retained=RETAINED):
    """Replace all segments, which are a chain, by one with pairs."""
    disk = store._storage.disk
    readers = [disk.reader(row.id) for row in sorted(store.segments(), key=lambda row: row.position)]
    geometry, layout = Geometry(16, 1, pairs=pairs), readers[0].shape.layout
    tokens = sum(reader.shape.tokens for reader in readers)
    tables = TokenTables.by_pairs(fronts, retained, block_groups(layout, geometry), tokens)
    header, chain, blocks = join_segments(readers, geometry, tables)
    assert disk.publish(header, chain, blocks)
    disk.remove([reader.id for reader in readers])
    store._storage.residency.clear()
    return disk.reader(header.id)


@torch.no_grad()
def merged_kv(model, ids, tokens, fronts, monkeypatch, codec="raw", pairs=PAIRS, retained=RETAINED):
    """Return the KV of a prompt whose first `tokens` were merged before rotation, without our cache or patches."""
    modeling, calls = importlib.import_module(type(model).__module__), []
    rotate = modeling.apply_rotary_pos_emb

    def noting(query, key, cos, sin, *more, **named):
        calls.append((query, key.clone(), cos, sin, more, named))
        return rotate(query, key, cos, sin, *more, **named)

    cache = Remembering(model)
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "apply_rotary_pos_emb", noting)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    plain, shared = make_codec(codec), merged_codec(codec)

    def through(tensor, front):
        coded = plain.decode(plain.encode(tensor), tensor.dtype)
        tensor = tensor.clone()
        tensor[:, :, front:tokens] = coded[:, :, front:tokens]
        return tensor

    kv = [[t[1], value] for t, (_, value) in zip(calls, cache.all(), strict=True)]
    kv = [[through(states, front) for states in layer] for layer, front in zip(kv, fronts, strict=True)]
    for first, second in pairs:
        common = np.setdiff1d(np.arange(max(fronts[first], fronts[second]), tokens), retained.get((first, second), []))
        for tensor in (0, 1):
            of_pair = encode(kv[first][tensor][:, :, common], kv[second][tensor][:, :, common], shared)
            for layer, fields in zip((first, second), of_pair, strict=True):
                kv[layer][tensor][:, :, common] = shared.decode(fields, kv[layer][tensor].dtype)
    rotated = []
    for (query, _, cos, sin, more, named), (key, value) in zip(calls, kv, strict=True):
        rotated.append((rotate(query, key, cos, sin, *more, **named)[1], value))
    return rotated


def cut_for(codec="raw"):
    return Paired(geometry=Geometry(16, 1), codec=codec)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def family(request):
    return request.param


@pytest.mark.parametrize(("codec", "dtype"), pairs(["raw", "int8", "fp8"], [torch.float32, torch.bfloat16]), ids=str)
def test_logits_are_those_of_a_dynamic_cache_whose_layers_were_merged(family, dtype, codec, tmp_path, monkeypatch):
    """Bits are equal, from disk and from host memory."""
    model, ids, method = build(family, dtype), prompt(PREFIX), cut_for(codec)
    kv = merged_kv(model, ids, PREFIX, (0,) * 6, monkeypatch, codec)
    assert not torch.equal(kv[4][0], kv_of(model, ids)[4][0])
    reference_output = model.generate(question(ids), past_key_values=prefilled(model, [kv], PREFIX), **GREEDY)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, method)
        suspend(store)
        for tier in ("disk", "host"):
            output, cache = ask(model, store, question(ids), method)
            assert (cache.stats.tokens_restored, cache.stats.tier) == (PREFIX, tier)
            assert_same(output, reference_output)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_front_that_is_missing_is_computed_and_the_rest_is_restored(family, codec, tmp_path, monkeypatch):
    """Results are equal within the rounding of kernels, since other queries use another kernel."""
    model, ids, method = build(family), prompt(PREFIX), cut_for(codec)
    kv = merged_kv(model, ids, PREFIX, FRONTS, monkeypatch, codec)
    reference_output = model.generate(question(ids), past_key_values=prefilled(model, [kv], PREFIX), **GREEDY)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, method)
        reader = suspend(store, fronts=FRONTS)
        assert reader.shape.held_from == FRONTS and reader.shape.whole_hashes == 0
        output, cache = ask(model, store, question(ids), method)
        assert torch.equal(output.sequences, reference_output.sequences)
        for a, b in zip(output.logits, reference_output.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * float(b.abs().max()))
        # each block that is stored is read once, and what two layers share counts once
        stats = cache.stats
        assert stats.bytes_read == reader.shape.blocks_bytes
        vector = (
            sum(slot.nbytes for slot in reader.shape.block_groups[0].parts[0].fields) // 16 * 2
        )  # a token's, k and v
        factors = 2 * 2 * 4  # of one layer: both tensors, two heads
        sizes = {layer: PREFIX - front for layer, front in enumerate(FRONTS)}
        counts = {pair: len(np.setdiff1d(np.arange(FRONTS[pair[0]], PREFIX), RETAINED[pair])) for pair in PAIRS}
        expected = sum(sizes[layer] * vector for layer in sizes) - sum(count * vector for count in counts.values())
        if codec == "raw":
            expected += sum(2 * count * factors for count in counts.values())
        else:
            expected += sum(count * factors for count in counts.values())
        assert stats.details.bytes_used == expected
        assert stats.read_amplification < 4  # tiny blocks, padded to 4 KiB


def test_what_was_merged_goes_on_and_is_merged_again(family, tmp_path, monkeypatch):
    """Turn after turn: a merged segment, what follows it, and one again."""
    model, ids, method = build(family), prompt(160), cut_for()
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids[:, :PREFIX], method)
        suspend(store)
        cache = TieredCache(model, store, method=method)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        assert cache.stats.tokens_restored == PREFIX
        cache.store_now()
        store.flush()
        assert sorted((row.position, row.tokens) for row in store.segments()) == [(0, PREFIX), (PREFIX, 64)]
        before, cache = ask(model, store, question(ids), method)
        assert cache.stats.tokens_restored == 160
        first = store._storage.disk.reader(min(store.segments(), key=lambda row: row.position).id)
        stored_tokens = first.shape.tokens
        retained = {(1, 4): RETAINED[1, 4], (2, 3): np.concatenate([RETAINED[2, 3], np.arange(stored_tokens, 160)])}
        retained[1, 4] = np.concatenate([retained[1, 4], np.arange(stored_tokens, 160)])
        suspend(store, retained=retained)  # what is new stays as it is
        (row,) = store.segments()
        assert row.tokens == 160
        after, cache = ask(model, store, question(ids), method)
        assert cache.stats.tokens_restored == 160
        assert_same(after, before)
        suspend(store)
        second_output, cache = ask(model, store, question(ids), method)
        assert cache.stats.tokens_restored == 160
        assert not torch.equal(second_output.logits[0], after.logits[0])


def test_what_a_method_leaves_out_is_computed_all_the_same(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Careless(Paired):
        def positions_to_compute(self, context):
            return context.suffix_positions()

    model, ids = build("qwen2"), prompt(PREFIX)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, cut_for())
        reader = suspend(store, fronts=(0, 0, 0, 0, 5, 0))
        careless = Careless(geometry=Geometry(16, 1))
        cache = TieredCache(model, store, method=careless, record=False)
        asking, sequence = cache._executor.admit(cache, {"input_ids": question(ids), "logits_to_keep": 1})
        with pytest.raises(ValueError, match=f"segment {reader.id} lacks tokens of layer 4"):
            units_of(sequence.plan(asking, StatsCollector()))  # and nothing is taken for what is missing
        output, cache = ask(model, store, question(ids), careless)
        assert (cache.stats.tokens_restored, cache.stats.tokens_recomputed) == (PREFIX, round(5 * 5 / 6))
        expected, _ = ask(model, store, question(ids), cut_for())
        torch.testing.assert_close(torch.stack(output.logits), torch.stack(expected.logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize("fronts", [(0,) * 6, FRONTS], ids=["whole", "a front missing"])
@pytest.mark.parametrize("ahead", [0, 1, 128 << 20])
def test_a_plan_brings_the_same_however_far_ahead(fronts, ahead, tmp_path):
    model, ids = build("qwen2"), prompt(PREFIX)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, cut_for())
        suspend(store, fronts=fronts)
        expected, first = ask(model, store, question(ids), cut_for())
        output, cache = ask(model, store, question(ids), Paired(geometry=Geometry(16, 1), ahead_bytes=ahead))
        assert_same(output, expected)
        assert cache.stats.bytes_read == first.stats.bytes_read > 0


def test_left_padded_rows_that_share_a_segment(tmp_path):
    model, ids, method = build("qwen2"), prompt(PREFIX), cut_for()
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, method)
        suspend(store, fronts=FRONTS)
        request_ids = question(ids)
        alone, _ = ask(model, store, request_ids, method)
        rows = torch.cat([torch.zeros(1, 7, dtype=torch.int64), request_ids], dim=1).repeat(2, 1)
        mask = torch.ones_like(rows)
        mask[:, :7] = 0
        output, cache = ask(model, store, rows, method, attention_mask=mask)
        assert cache.stats.tokens_restored == 2 * (PREFIX - FRONTS[-1])
        assert cache.stats.tokens_recomputed == round(2 * (np.mean(FRONTS) - FRONTS[-1]))
        for a, b in zip(output.logits, alone.logits, strict=True):
            torch.testing.assert_close(a, b.repeat(2, 1), rtol=0, atol=1e-4 * float(b.abs().max()))


def damage(reader, path, group):
    """Change a bit of a block group's last block."""
    at = reader.header.blocks.offset + reader.shape.group_offsets[group.index + 1] - group.block_bytes + 5
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    return int(reader.shape.tokens_by_slot(group)[16 * (reader.shape.chunks_in(group) - 1)]) // 16 * 16


@pytest.mark.parametrize("direct", [False, True], ids=["by way of the host", "straight to a device, checked there"])
def test_a_damaged_block_of_any_group_is_computed_and_never_served(direct, tmp_path, monkeypatch):
    """What stands before it is restored as ever; bit for bit a cache of that, and the rest computed."""
    model, ids, method = build("llama"), prompt(PREFIX), cut_for()
    kv = merged_kv(model, ids, PREFIX, (0,) * 6, monkeypatch)
    with KVStore(tmp_path / "whole", engine="posix") as store:
        fill(store, model, ids, method)
        reader = suspend(store)
    for group in reader.shape.block_groups:
        root = tmp_path / str(group.index)
        KVStore(root).close()
        path = root / "segments" / f"{reader.id}.kv"
        path.write_bytes((tmp_path / "whole" / "segments" / path.name).read_bytes())
        good = damage(reader, path, group)
        reference_output = model.generate(question(ids), past_key_values=prefilled(model, [kv], good), **GREEDY)
        store = with_device(monkeypatch, root)[0] if direct else KVStore(root, engine="posix", host_memory=0)
        with store:
            output, cache = ask(model, store, question(ids), method)
            assert (cache.stats.details.verification_failures, cache.stats.tokens_restored) == (1, good)
            if good:
                assert_same(output, reference_output)
            else:
                assert_same(output, model.generate(question(ids), **GREEDY))


def test_device_memory_keeps_and_serves_them(tmp_path, monkeypatch):
    model, ids, method = build("qwen2"), prompt(PREFIX), cut_for()
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, method)
        suspend(store, fronts=FRONTS)
        expected, _ = ask(model, store, question(ids), method)
    store, _ = with_device(monkeypatch, tmp_path)
    with store:
        for tier in ("disk", "device"):
            output, cache = ask(model, store, question(ids), method)
            assert_same(output, expected)
            assert cache.stats.tier == tier
        assert cache.stats.bytes_read == 0


def test_methods_that_choose_say_why_they_restore_nothing(tmp_path):
    """The segment's provenance is lent to them, which they do not have."""
    model, ids = build("qwen2"), prompt(PREFIX)

    @dataclass(frozen=True, kw_only=True)
    class Choosing(Impress):
        provenance = "paired"

    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, cut_for())
        suspend(store)
        _, cache = ask(model, store, question(ids), Choosing(0.25))
        assert (cache.stats.tokens_restored, cache.stats.reason) == (0, MERGED)
        for name in METHODS:  # under their own they see none of it
            _, cache = ask(model, store, question(ids), name)
            assert cache.stats.tokens_restored == 0


def test_the_rest_of_a_store_goes_by_such_segments_unharmed(tmp_path, run):
    model, ids, method = build("qwen2"), prompt(PREFIX), cut_for()
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, method)
        reader = suspend(store, fronts=FRONTS)
        expected, _ = ask(model, store, question(ids), method)
        assert store.relayout(Exact().geometry, progress=False) == 0 == store.reorder(progress=False)
        assert store.verify().ok
        store.gc()
        longer = question(ids)
        lookup = store.lookup(model, longer, method=method)
        assert sum(lookup.bytes.values()) == reader.shape.blocks_bytes
        store._storage.residency.clear()
        assert store.warm(model, longer, method=method, progress=False).bytes["host"] == reader.shape.blocks_bytes
        second_output, cache = ask(model, store, question(ids), method)
        assert cache.stats.tier == "host" and cache.stats.bytes_read == 0
        assert_same(second_output, expected)
    assert "paired" in run("ls", tmp_path)[1]
    _, out, _ = run("stat", tmp_path, reader.id[:8])
    assert "merged layers: 1 with 4, 2 with 3" in out and "merged keys and values" in out
    described = json.loads(run("stat", tmp_path, reader.id, "--json")[1])
    assert described["geometry"]["pairs"] == [[1, 4], [2, 3]]
    assert [group["layers"] for group in described["block_groups"] if group["merged"]] == [[1, 4], [2, 3]]
    assert run("verify", tmp_path)[0] == 0


def test_half_of_the_layers_in_pairs_take_three_quarters(tmp_path):
    """Two pairs of 8 layers with 5 % retained tokens, in bfloat16 and int8 with heads of 64 dimensions."""
    changes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8}
    ids, model = prompt(512), build("qwen2", torch.bfloat16, **changes)
    pairs = ((4, 5), (6, 7))
    retained = {pair: np.arange(0, 512, 20) for pair in pairs}  # 26 of 512
    for codec, vector in (("raw", 128), ("int8", 68)):
        with KVStore(tmp_path / codec, engine="posix") as store:
            fill(store, model, ids, cut_for(codec))
            (row,) = store.segments()
            raw = store._storage.disk.reader(row.id).shape.blocks_bytes
            shape = suspend(store, pairs, (0,) * 8, retained).shape
            block = 16 * 4 * vector * 2  # a chunk's tokens, heads and tensors
            merged_bytes = block + 16 * 4 * 2 * 4 * (2 if codec == "raw" else 1)  # with both layers' factors
            block, merged_bytes = aligned(block, BLOCK_ALIGNMENT), aligned(merged_bytes, BLOCK_ALIGNMENT)
            assert raw == 8 * 32 * block
            assert shape.blocks_bytes == 4 * 32 * block + 4 * 2 * block + 2 * 31 * merged_bytes
            assert 0.75 < shape.blocks_bytes / raw < 0.87
