"""Krul: what goes idle in less space comes back as the merged KV it is, and, with nothing shared, as it was."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from extras import need_eval
from families import build_deep as build
from families import prompt
from hypothesis import given
from hypothesis import strategies as st
from reference import kv_of, prefilled
from test_pairs_restore import merged_kv
from thorough import pairs
from transformers import DynamicCache

from eval.baselines import MiniCache
from hf_tiered_cache import ConfigError, KVStore, TieredCache, reasons
from hf_tiered_cache.cache import executor
from hf_tiered_cache.cache.calibrations import PrefixCosts, keep_prefix_costs, keep_records, records_of
from hf_tiered_cache.cache.cost_model import idle_recompute_ratio
from hf_tiered_cache.conversations.distances import AttentionDistances
from hf_tiered_cache.identity import Fingerprinter
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import Exact, Krul, describe_method, krul, make_method
from hf_tiered_cache.methods.krul import share_of_bytes
from hf_tiered_cache.store import segment
from hf_tiered_cache.store.geometry import Geometry, KVLayout, LayerKV, block_groups
from hf_tiered_cache.store.shape import SegmentShape, TokenTables
from hf_tiered_cache.tiers import residency

XS = Path(__file__).parents[2] / "eval" / "reference" / "xs"
CPU = torch.device("cpu")
TOKENS = 200
LOSSLESS = {"geometry": Geometry(16, 1), "codec": "raw"}
EVERY = {"change": 1.0, "quality": None} | LOSSLESS
"""Layers of random weights are not alike: so that some share all the same."""


@pytest.fixture(scope="module")
def model():
    return build("qwen2")


@torch.no_grad()
def said(model, cache, ids):
    return model(input_ids=ids, past_key_values=cache, logits_to_keep=4).logits


def begun(model, root, method, ids, name="alice"):
    """Suspend a conversation, and return the store's description of it."""
    with KVStore(root, engine="posix") as store:
        with TieredCache(model, store, conversation=name, method=method) as cache:
            said(model, cache, ids)
        return next(info for info in store.conversations() if info.id == name)


def resumed(model, root, method, ids, name="alice", **settings):
    """Return the logits of the next turn in a newly opened store, and the cache's statistics."""
    with KVStore(root, engine="posix") as store:
        cache = TieredCache(model, store, conversation=name, method=method, **settings)
        return said(model, cache, ids), cache.stats


def shapes(root):
    with KVStore(root, engine="posix") as store:
        disk = storage_of(store).disk
        return [disk.reader(row.id).shape for row in store.segments()]


def next_turn(ids, more=12, seed=7):
    return torch.cat([ids, prompt(more, seed=seed)], dim=1)


@pytest.mark.parametrize(("family", "recompute"), pairs(["llama", "qwen3", "gemma3", "gpt_neox"], [0.0, 0.3, 0.8]))
def test_nothing_shared_is_lossless(family, recompute, root):
    model, ids, method = build(family), prompt(TOKENS), Krul(0.0, recompute=recompute, **LOSSLESS)
    begun(model, root, method, ids)
    (shape,) = shapes(root)
    assert not shape.geometry.pairs and (sum(shape.held_from) > 0) == (recompute > 0)
    turn = next_turn(ids)
    logits, stats = resumed(model, root, method, turn)
    assert stats.tokens_restored == TOKENS // 16 * 16
    assert stats.tokens_recomputed == round(np.mean(shape.held_from))
    expected = prefilled(model, [kv_of(model, ids)], stats.tokens_restored)
    torch.testing.assert_close(logits, said(model, expected, turn[:, stats.tokens_restored :]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_resumed_conversation_is_what_merged_kv_gives(model, root, codec, monkeypatch):
    """The same as from a segment that is merged by hand; what that gives stands in test_pairs_restore.py."""
    ids, method = prompt(TOKENS), Krul(0.7, recompute=0.0, retained=0.0, toward=0.6, **EVERY | {"codec": codec})
    info = begun(model, root, method, ids)
    (shape,) = shapes(root)
    pairs, tokens = shape.geometry.pairs, info.tokens
    assert pairs and info.bytes
    logits, stats = resumed(model, root, method, next_turn(ids), record=False)
    assert stats.tokens_restored == tokens and stats.tokens_recomputed == 0
    expected = prefilled(model, [merged_kv(model, ids, tokens, (0,) * 6, monkeypatch, codec, pairs, {})], tokens)
    torch.testing.assert_close(logits, said(model, expected, next_turn(ids)[:, tokens:]), atol=1e-5, rtol=1e-5)


def test_how_far_towards_the_deeper_layer_is_a_setting(model, root):
    ids, method = prompt(TOKENS), Krul(0.7, recompute=0.0, **EVERY)
    all_logits = []
    for toward in (0.0, 0.4, 1.0):
        name = f"at {toward}"
        begun(model, root, replace(method, toward=toward), ids, name)
        all_logits.append(resumed(model, root, method, next_turn(ids), name, record=False)[0])
    unmerged_logits = said(model, DynamicCache(), next_turn(ids))
    assert not any(
        torch.equal(first, second) for first, second in itertools.combinations([*all_logits, unmerged_logits], 2)
    )


def test_turn_after_turn_pairs_stay_and_merged_tokens_do_not_change(model, root):
    """Bits are equal if all tokens are merged; the retained ones may change with every turn."""
    ids, method = prompt(TOKENS), Krul(0.5, recompute=0.0, retained=0.0, **EVERY)
    begun(model, root, method, ids)
    (first,) = shapes(root)
    before, _ = resumed(model, root, method, next_turn(ids), record=False)
    for turn in range(3):
        ids = next_turn(ids, 40, seed=20 + turn)
        begun(model, root, method, ids)
        assert all(set(shape.geometry.pairs) >= set(first.geometry.pairs) for shape in shapes(root))
        assert sum(shape.tokens for shape in shapes(root)) == ids.shape[1] // 16 * 16
    with KVStore(root, engine="posix") as store:
        assert store.conversations()[0].turns == 4
    output, stats = resumed(model, root, method, next_turn(ids[:, :TOKENS]), record=False)
    assert stats.tokens_restored == TOKENS // 16 * 16  # the history as it was after the first turn
    assert torch.equal(output, before)


def test_the_front_never_shrinks_for_what_was_not_stored(model, root):
    ids = prompt(TOKENS)
    begun(model, root, Krul(0.0, recompute=0.6, **LOSSLESS), ids)
    (first,) = shapes(root)
    ids = next_turn(ids, 60)
    begun(model, root, Krul(0.0, recompute=0.0, **LOSSLESS), ids)
    assert {shape.held_from for shape in shapes(root)} == {first.held_from, (0,) * 6}
    logits, stats = resumed(model, root, Krul(0.0, recompute=0.0, **LOSSLESS), next_turn(ids))
    assert stats.tokens_restored == ids.shape[1] // 16 * 16
    torch.testing.assert_close(logits, said(model, DynamicCache(), next_turn(ids)), atol=1e-4, rtol=1e-4)


def test_conversations_share_nothing_with_others(model, root):
    ids, method = prompt(TOKENS), Krul(0.7, recompute=0.0, **EVERY)
    begun(model, root, method, ids)
    for name, other_method in (("bob", method), ("alice", Exact()), ("alice", MiniCache())):
        _, stats = resumed(model, root, other_method, next_turn(ids), name, record=False)
        assert stats.tokens_restored == 0
    with KVStore(root, engine="posix") as store:
        cache = TieredCache(model, store, record=False)
        said(model, cache, next_turn(ids))
        assert cache.stats.tokens_restored == 0


def test_an_edited_history_comes_back_up_to_the_edit(model, root):
    ids, method = prompt(TOKENS), Krul(0.5, recompute=0.4, **EVERY)
    begun(model, root, method, ids)
    edited = ids.clone()
    edited[0, 100] = 3 if ids[0, 100] != 3 else 4
    logits, stats = resumed(model, root, method, next_turn(edited), record=False)
    assert stats.tokens_restored == 96
    lossless = replace(method, layers_shared=0.0)
    begun(model, root, lossless, ids, "carol")
    logits, stats = resumed(model, root, lossless, next_turn(edited), "carol", record=False)
    assert stats.tokens_restored == 96
    torch.testing.assert_close(logits, said(model, DynamicCache(), next_turn(edited)), atol=1e-4, rtol=1e-4)


def test_a_chain_that_an_edit_has_cut_lacks_what_is_left_of_it(model, root):
    """If another segment continues inside a segment, only the part before it counts."""
    ids, method = prompt(TOKENS), Krul(0.0, recompute=0.6, **LOSSLESS)
    begun(model, root, method, ids)
    (first_shape,) = shapes(root)
    edited = next_turn(ids[:, :96], 104)
    begun(model, root, replace(method, recompute=0.0), edited)
    (shape,) = shapes(root)
    assert max(first_shape.held_from) > 96 >= max(shape.held_from)
    logits, stats = resumed(model, root, method, next_turn(edited), record=False)
    assert stats.tokens_restored == TOKENS // 16 * 16
    torch.testing.assert_close(logits, said(model, DynamicCache(), next_turn(edited)), atol=1e-4, rtol=1e-4)


def test_what_an_edit_has_left_behind_goes_with_its_conversation(model, root):
    for seed in range(2):  # nothing of the first history is in the second
        begun(model, root, Krul(0.5, recompute=0.4, **EVERY), prompt(TOKENS, seed=seed))
    begun(model, root, Krul(0.5, **EVERY), prompt(TOKENS), "bob")
    with KVStore(root, engine="posix") as store:
        bobs = next(info for info in store.conversations() if info.id == "bob").segments
        assert len(store.segments()) == 3
        store.remove_conversation("alice")
        assert [row.id for row in store.segments()] == bobs


def test_what_lacks_its_front_is_computed_where_that_cannot_be_done(model, root):
    ids, method = prompt(TOKENS), Krul(0.0, recompute=0.5, **LOSSLESS)
    begun(model, root, method, ids)
    turn = next_turn(ids)
    with KVStore(root, engine="posix") as store:
        cache = TieredCache(model, store, conversation="alice", method=method, record=False, restore=True)
        said(model, cache, turn[:, :10])
        logits = said(model, cache, turn[:, 10:])  # behind tokens that the cache holds
        assert cache.stats.tokens_restored == 0
        padded = torch.cat([torch.zeros(1, 8, dtype=torch.int64), turn], dim=1)
        rows, mask = padded.repeat(2, 1), (padded != 0).long().repeat(2, 1)
        plain = TieredCache(model, store, method=method.for_conversation(cache.method.conversation), record=False)
        model.generate(rows, attention_mask=mask, past_key_values=plain, max_new_tokens=2, do_sample=False)
        assert (plain.stats.tokens_restored, plain.stats.reason) == (0, reasons.PREFIX_NOT_STORED)
    torch.testing.assert_close(logits, said(model, DynamicCache(), turn), atol=1e-4, rtol=1e-4)


def test_without_a_conversation_nothing_is_merged(model, root):
    with KVStore(root, engine="posix") as store, TieredCache(model, store, method=Krul(**EVERY)) as cache:
        said(model, cache, prompt(TOKENS))
    assert [shape.geometry.pairs for shape in shapes(root)] == [()]


def refusing(*args, **more):
    return False


def failing(*args, **more):
    raise ValueError("a segment holds a part of its tokens")


@pytest.mark.parametrize(("function", "instead"), [("publish", refusing), ("merge_segments", failing)])
def test_where_it_cannot_be_laid_out_anew_what_there_was_stays(model, root, monkeypatch, function, instead):
    ids, method = prompt(TOKENS), Krul(0.7, recompute=0.3, **EVERY)
    with KVStore(root, engine="posix") as store:
        cache = TieredCache(model, store, conversation="alice", method=method)
        said(model, cache, ids)
        cache.store_now()
        store.flush()
        monkeypatch.setattr(storage_of(store).disk if function == "publish" else krul, function, instead)
        suspended = cache.suspend()
        monkeypatch.undo()
        assert suspended.tokens == store.conversations()[0].tokens == TOKENS // 16 * 16
        assert function == "publish" or "the conversation could not be rewritten" in suspended.reason
    (shape,) = shapes(root)
    assert not shape.geometry.pairs
    _, stats = resumed(model, root, method, next_turn(ids), record=False)
    assert stats.tokens_restored == TOKENS // 16 * 16


# --- what is chosen


def test_alike_layers_of_a_trained_model_share_and_strategies_differ(tmp_path):
    need_eval()
    from eval.reference.check import contexts
    from eval.reference.language import KINDS
    from eval.reference.queries import language_of, load

    model, language, strategies = load(XS), language_of(XS), set()
    for number, (context, _) in enumerate(contexts(language, 480, 6, 3, KINDS)):
        ids = torch.tensor([[token for document in context.documents for token in document]])
        with KVStore(tmp_path / str(number), engine="posix") as store:
            with TieredCache(model, store, conversation="a", method=Krul(recompute=0.0)) as cache:
                said(model, cache, ids)
            (row,) = store.segments()
            pairs = storage_of(store).disk.reader(row.id).shape.geometry.pairs
        assert all(1 <= first < second <= 6 for first, second in pairs)  # 0 and 7 are like no other
        strategies.add(pairs)
    assert len(strategies) > 1 and any(strategies)


def test_layers_that_are_not_alike_share_nothing(model, root):
    begun(model, root, Krul(recompute=0.0, change=0.001), prompt(TOKENS))
    assert [shape.geometry.pairs for shape in shapes(root)] == [()]


def test_passes_are_observed_only_if_attention_proposes_pairs():
    assert Krul().observer() is None and Krul(0.0, pairs_by="attention").observer() is None
    assert isinstance(Krul(pairs_by="attention").observer(), AttentionDistances)
    assert isinstance(Krul.paper().observer(), AttentionDistances)


def test_mini_cache_shares_the_deeper_half(model, root):
    begun(model, root, MiniCache(2 / 3), prompt(TOKENS))
    assert [shape.geometry.pairs for shape in shapes(root)] == [((2, 3), (4, 5))]


@pytest.mark.parametrize(
    ("settings", "load", "layers"),
    [
        ({}, None, 4),
        ({}, 1e-6, 4),
        ({}, 4e-3, 1),
        ({"recompute": 0.4}, None, 1),
        ({"change": 1.0, "quality": None}, 1e-6, 1),
        ({"geometry": Geometry(16, 2)}, 4e-3, 2),
        ({"geometry": Geometry(16, 2), "change": 1.0, "quality": None}, None, 1),
    ],
    ids=str,
)
def test_layers_have_blocks_of_their_own_for_fronts_and_pairs_only(model, root, settings, load, layers):
    with KVStore(root, engine="posix") as store:
        if load is not None:
            costs = PrefixCosts(1024, 1e-3, {"disk": load, "host": 1e-6}, {"disk": load}, 1e-3)
            keep_prefix_costs(storage_of(store), Fingerprinter(model)(), CPU, Exact().provenance, [costs])
    for tokens in (320, TOKENS + 320):
        begun(model, root, Krul(**settings), prompt(tokens))
    assert {shape.geometry.layers_per_block for shape in shapes(root)} == {layers}


def test_a_return_without_front_and_pairs_takes_as_few_fetches_as_the_exact_method(model, tmp_path, monkeypatch):
    """Each fetch and each KV cache group takes time, whatever its size."""
    counts, fetch = Counter(), residency.Residency.fetch
    methods = {"exact": Exact(codec="int8", recompute=0.0), "krul": Krul(recompute=0.0)}
    for name, method in methods.items():
        begun(model, tmp_path / name, method, prompt(TOKENS))

        def counted(self, requests, *arguments, name=name):
            counts[name, "fetches"] += 1
            counts[name, "groups"] += len(requests)
            return fetch(self, requests, *arguments)

        monkeypatch.setattr(residency.Residency, "fetch", counted)
        _, stats = resumed(model, tmp_path / name, method, prompt(TOKENS + 20))
        monkeypatch.undo()
        assert stats.tokens_restored >= TOKENS // 16 * 16
    assert counts["krul", "fetches"] == counts["exact", "fetches"] > 1
    assert counts["krul", "groups"] == counts["exact", "groups"]


def test_a_conversation_with_one_layer_per_block_continues_with_several(model, root):
    """Older versions stored one layer per block."""
    text = prompt(600)
    begun(model, root, Krul(recompute=0.0, geometry=Geometry(64, 1)), text[:, :320])
    begun(model, root, Krul(recompute=0.0), text[:, :560])
    assert sorted(shape.geometry.layers_per_block for shape in shapes(root)) == [1, 4]
    logits, stats = resumed(model, root, Krul(recompute=0.0), text)
    begun(model, root.with_name("older"), Krul(recompute=0.0, geometry=Geometry(64, 1)), text[:, :320])
    begun(model, root.with_name("older"), Krul(recompute=0.0, geometry=Geometry(64, 1)), text[:, :560])
    expected, _ = resumed(model, root.with_name("older"), Krul(recompute=0.0), text)
    assert stats.tokens_restored == 560 and torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("compute", "load", "least", "most"), [(1e-3, 1e-5, 0, 0), (1e-3, 1e-3, 0.3, 0.7), (1e-4, 1e-2, 0.8, 1)]
)
def test_the_front_of_what_goes_idle_balances_computing_and_loading(
    model, root, monkeypatch, compute, load, least, most
):
    monkeypatch.setattr(executor, "renew_costs", lambda *_: None)  # by the times of this machine
    costs = PrefixCosts(1024, compute, {"disk": load}, {"disk": load}, 1e-3)
    front = idle_recompute_ratio(1024, 24, costs, 1.0, 16)
    assert least <= front <= most
    assert idle_recompute_ratio(1024, 24, costs, 0.5, 16) <= front  # what takes half the bytes is loaded sooner
    ids, method = prompt(TOKENS), Krul(0.0, codec="raw", geometry=Geometry(16, 1))
    with KVStore(root, engine="posix") as store:
        storage = storage_of(store)
        keep_prefix_costs(storage, Fingerprinter(model)(), CPU, Exact().provenance, [costs])
        with TieredCache(model, store, conversation="alice", method=method) as cache:
            said(model, cache, ids)
    (shape,) = shapes(root)
    stored_share = 1 - np.mean(shape.held_from) / shape.tokens
    assert 1 - most - 0.15 <= stored_share <= 1 - least + 0.15


def test_calibrations_that_are_noted_at_once_are_all_kept(root):
    with KVStore(root, engine="posix") as first_store, KVStore(root, engine="posix") as second_store:

        def note(number):
            storage, name = storage_of(first_store if number % 2 else second_store), f"{number:032x}"
            for _ in range(5):
                keep_records(storage, name, [*records_of(storage, name), {"shares": [1.0]}])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(note, range(8)))
        counts = [len(records_of(storage_of(first_store), f"{number:032x}")) for number in range(8)]
    assert counts == [5] * 8


@given(st.floats(0, 1), st.integers(1, 3))
def test_the_share_of_bytes_is_what_a_segment_takes(retained, count):
    layout = _layout()
    geometry = Geometry(64, 1, pairs=tuple((2 * number, 2 * number + 1) for number in range(count)))
    apart = {pair: np.arange(round(retained * 6400)) for pair in geometry.pairs}
    tables = TokenTables.by_pairs((0,) * 6, apart, block_groups(layout, geometry), 6400)
    full_bytes = SegmentShape(layout, Geometry(64, 1), 6400).blocks_bytes
    share = SegmentShape(layout, geometry, 6400, tables).blocks_bytes / full_bytes
    assert share_of_bytes(layout, geometry, retained) == pytest.approx(share, abs=0.02)  # chunks are rounded up


def _layout():
    return KVLayout((LayerKV(4, 128, 4, 128, 0, "key", 128),) * 6, torch.bfloat16)


def test_a_conversation_of_which_nothing_was_kept_is_computed(model, root):
    ids, method = prompt(TOKENS), Krul(recompute=1.0, **EVERY)
    with KVStore(root, engine="posix") as store:
        costs = PrefixCosts(TOKENS, 1e-6, {"disk": 1.0})
        keep_prefix_costs(storage_of(store), Fingerprinter(model)(), CPU, "exact", [costs])
    begun(model, root, method, ids)
    (shape,) = shapes(root)
    assert shape.blocks_bytes == 0
    logits, stats = resumed(model, root, method, next_turn(ids))
    assert (stats.bytes_read, stats.tokens_recomputed, stats.reason) == (0, TOKENS // 16 * 16, "")
    torch.testing.assert_close(logits, said(model, DynamicCache(config=model.config), next_turn(ids)))


def blocks_read(monkeypatch):
    """Record from how many KV cache groups blocks are read from disk, in a list that grows."""
    numbers_read, real_read = [], segment.read_batch

    def noting(requests, unseen=()):
        numbers_read.extend((reader.id, number) for reader, number, _ in [*requests, *unseen])
        return real_read(requests, unseen)

    monkeypatch.setattr(segment, "read_batch", noting)
    monkeypatch.setattr(residency, "read_batch", noting)
    return numbers_read


def test_what_lies_in_memory_is_merged_and_comes_back_without_a_read(model, root, monkeypatch):
    method, ids, numbers_read = Krul(0.5, recompute=0.0, **EVERY), prompt(TOKENS), blocks_read(monkeypatch)
    with KVStore(root, engine="posix") as store:
        for turn in range(3):
            with TieredCache(model, store, conversation="alice", method=method) as cache:
                said(model, cache, ids)
                assert cache.stats.tier == ("host" if turn else "none")
            ids = next_turn(ids, 40, seed=turn)
        rows = store.segments()
        assert all(storage_of(store).disk.reader(row.id).shape.geometry.pairs for row in rows)
        assert storage_of(store).residency.segments() == {row.id for row in rows}  # the old ones are gone
    assert not numbers_read


@pytest.mark.parametrize("memory", [0, 100_000])
def test_memory_that_holds_a_part_or_nothing_gives_the_same_bytes(model, tmp_path, memory, monkeypatch):
    method, digests, numbers_read = Krul(0.5, recompute=0.3, **EVERY), [], blocks_read(monkeypatch)
    for number, budget in enumerate(("1GiB", memory)):
        with KVStore(tmp_path / str(number), engine="posix", host_memory=budget) as store:
            for ids in (prompt(TOKENS), next_turn(prompt(TOKENS), 40)):
                with TieredCache(model, store, conversation="alice", method=method) as cache:
                    said(model, cache, ids)
            rows = sorted(store.segments(), key=lambda row: row.position)
            digests.append([table for row in rows for table in storage_of(store).disk.reader(row.id).digests])
            assert store.stats.host.bytes <= (memory if number else 1 << 30)
        assert bool(numbers_read) == bool(number)
    assert all(np.array_equal(a, b) for a, b in zip(*digests, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"quality": -1.0},
        {"quality": "0.1"},
        {"layers_shared": 1.5},
        {"retained": -0.1},
        {"change": 2},
        {"pairs_by": "queries"},
        {"gamma": 3},
        {"recompute": 2},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError):
        Krul(**settings)


def test_it_has_a_name():
    method = Krul(0.25, recompute=0.4)
    assert make_method(describe_method(method.for_conversation("0" * 32))) == method
    published = {"toward": 0.6, "pairs_by": "attention", "quality": None, "codec": "raw"}
    assert Krul.paper(0.75, recompute=0.4) == Krul(0.75, recompute=0.4, **published)
    assert method.provenance == "krul int8" and method.for_conversation("ab").provenance == "krul ab int8"
    assert Krul(codec="raw").coded("fp8").provenance == "krul"


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_segments_of_short_turns_are_joined_now_and_then(model, root, codec):
    """The padding of short segments stays a fraction of the bytes, and not every turn rewrites all of them."""
    method, ids, joined, turns = Krul(0.0, recompute=0.0, codec=codec), prompt(800), 0, range(32, 800, 32)
    with KVStore(root, engine="posix") as store:
        for stop in turns:
            with TieredCache(model, store, conversation="alice", method=method) as cache:
                said(model, cache, ids[:, :stop])
            joined += len(store.segments()) == 1
        stored_bytes = sum(storage_of(store).disk.reader(row.id).shape.blocks_bytes for row in store.segments())
        logits, stats = resumed_in(model, store, method, next_turn(ids[:, : turns[-1]]))
        assert stats.tokens_restored == turns[-1]
    layout = shapes(root)[0].layout
    assert stored_bytes <= SegmentShape(layout, method.geometry, turns[-1]).blocks_bytes / 0.8
    assert 2 <= joined <= len(turns) / 2
    if codec == "raw":
        torch.testing.assert_close(logits, said(model, DynamicCache(), next_turn(ids[:, : turns[-1]])))


def resumed_in(model, store, method, ids):
    cache = TieredCache(model, store, conversation="alice", method=method, record=False)
    return said(model, cache, ids), cache.stats
