"""Restoring within a budget: what is attended to is what was chosen, and a budget of 1 is the exact method."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import FAMILIES, attend_by_another_name, build, build_deep, build_eager, prompt
from reference import assert_same, kv_of, put
from transformers import DynamicCache

from eval.baselines import H2O, AttentionStore, Recompute, TopTokens
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import ConfigError, UnsupportedModelError
from hf_tiered_cache.methods import ContiguousKV, Exact, Impress, KVDrive, describe_method, make_method
from hf_tiered_cache.patches.attach import attachment_of
from hf_tiered_cache.selection.selectors import ProbeHeads, TopChunks
from hf_tiered_cache.store.geometry import Geometry, in_groups
from hf_tiered_cache.units import format_bytes

FAMILY = "qwen2"

pytestmark = pytest.mark.usefixtures("unfolded")

BLIND = ("deepseek_v3", "falcon")
"""They attend to other keys than they hand to their cache, or bypass the registered attention function."""
NEW = 6
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
PREFIX = 200
METHOD = ContiguousKV(
    budget=0.25, chunk_tokens=16, per_head=False, reorder=False, period=2, identify="keys", reselect=False, queries=0
)
METHODS = {
    "contiguous_kv keys": METHOD,
    "contiguous_kv solo layers": replace(METHOD, solo_layers=1),
    "contiguous_kv index": replace(METHOD, identify="index"),
    "h2o": H2O(budget=0.25),
    "impress, heads agree": Impress(budget=0.25, probe_heads=2, alpha=9),
    "impress, heads differ": Impress(budget=0.25, probe_heads=2, alpha=0),
    "impress, one probe": Impress(budget=0.25, probe_heads=1, chunk_tokens=16),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@pytest.fixture
def chosen(monkeypatch):
    """Record the selected tokens, in order of the selections."""
    noted: list[np.ndarray] = []

    def noting(choose):
        def note(self, request):
            choice = choose(self, request)
            noted.append(choice.tokens)
            return choice

        return note

    for selector in (TopChunks, TopTokens, ProbeHeads):
        monkeypatch.setattr(selector, "choose", noting(selector.choose))
    return noted


def fill(store, model, ids, method=METHOD):
    """Store the KV of `ids`, cut as `method` wants it."""
    cache = TieredCache(model, store, method=method)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    cache.store_now()
    store.flush()


def ask(model, store, ids, method=METHOD, record=False, **kwargs):
    cache = TieredCache(model, store, method=method, record=record)
    return model.generate(ids, past_key_values=cache, **GREEDY, **kwargs), cache


def question(ids, tokens=24, seed=5):
    return torch.cat([ids, prompt(tokens, seed=seed)], dim=1)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in BLIND])
def test_a_whole_budget_is_the_exact_method(family, store):
    model, ids = build(family), prompt(PREFIX)
    store.precompute(model, ids, method=METHOD, progress=False)  # of any attention: it is exact
    exact, _ = ask(model, store, question(ids), None)
    output, cache = ask(model, store, question(ids), replace(METHOD, budget=1.0))
    assert_same(output, exact)
    assert cache.stats.tokens_attended == cache.stats.tokens_restored > 0


@every_method
def test_a_whole_budget_is_the_exact_method_for_each(method, model, store):
    ids = prompt(PREFIX)
    fill(store, model, ids, method)
    exact, _ = ask(model, store, question(ids), None)
    assert_same(ask(model, store, question(ids), replace(method, budget=1.0))[0], exact)


@every_method
def test_every_method_attends_to_what_it_chose(method, model, store, chosen):
    attends_to_what_was_chosen(model, method, store, chosen)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "smollm3", "gpt_neox", "glm4", "opt"])
def test_every_family_attends_to_what_was_chosen(family, store, chosen):
    attends_to_what_was_chosen(build(family), METHOD, store, chosen)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_eager_attention_attends_to_what_was_chosen(family, store, chosen):
    attends_to_what_was_chosen(build_eager(family), METHOD, store, chosen)


def attends_to_what_was_chosen(model, method, store, chosen):
    """Assert bits equal to a DynamicCache with the selected tokens only, at their own positions."""
    ids = prompt(PREFIX)
    fill(store, model, ids, method)
    full_ids = question(ids)
    output, cache = ask(model, store, full_ids, method)
    stats = cache.stats
    tokens_restored = stats.tokens_restored
    assert stats.tokens_attended == 48 < tokens_restored == 192  # a quarter
    reference, stored_kv = DynamicCache(config=model.config), kv_of(model, ids)
    selector = method.selector()
    periods = in_groups(range(len(reference.layers)), selector.period, selector.solo_layers)
    assert len(chosen) == len(periods)
    choice_of = {layer: choice for period, choice in zip(periods, chosen, strict=True) for layer in period}
    for number, (layer, kv) in enumerate(zip(reference.layers, stored_kv, strict=True)):
        heads = kv[0].shape[1]
        tokens = torch.from_numpy(choice_of[number]).expand(heads, -1)  # [kv_heads, chosen]
        put(layer, *(tensor[:, torch.arange(heads).unsqueeze(1), tokens] for tensor in kv))
    logits, ids, position = [], full_ids[:, tokens_restored:], tokens_restored
    with torch.no_grad():
        for _ in range(NEW):
            positions = torch.arange(position, position + ids.shape[1]).unsqueeze(0)
            logits.append(
                model(input_ids=ids, position_ids=positions, past_key_values=reference, logits_to_keep=1).logits[:, -1]
            )
            position += ids.shape[1]
            ids = logits[-1].argmax(-1, keepdim=True)
    for a, b in zip(output.logits, logits, strict=True):
        assert torch.equal(a, b), f"logits differ by {(a - b).abs().max()}"


def test_the_choice_is_by_the_attention_of_the_first_layer(model, store, chosen):
    ids = prompt(PREFIX)
    fill(store, model, ids)
    full_ids = question(ids)
    _, cache = ask(model, store, full_ids)
    tokens_restored = cache.stats.tokens_restored
    eager = build("qwen2", attn_implementation="eager")
    with torch.no_grad():
        weights = eager(input_ids=full_ids, output_attentions=True).attentions[0]
    by_chunk = weights[0, :, tokens_restored:, :tokens_restored].sum((0, 1)).view(-1, 16).sum(1)
    best = by_chunk.topk(3).indices.sort().values
    assert chosen[0][0].tolist() == [16 * int(chunk) + i for chunk in best for i in range(16)]


@pytest.mark.parametrize("family", ["gemma3", "qwen2_sliding", "mistral"])
def test_layers_with_a_window_keep_all_of_it(family, store):
    model, ids = build(family), prompt(PREFIX)
    fill(store, model, ids)
    output, cache = ask(model, store, question(ids))
    exact, _ = ask(model, store, question(ids), None)
    windows = [layer.window for layer in cache.layers]
    assert all(windows) or not torch.equal(output.logits[0], exact.logits[0])
    for layer, window in zip(cache.layers, windows, strict=True):
        total = PREFIX + 24 + NEW - 1
        width = layer.keys.shape[2]
        assert width == (min(window - 1, total) if window else 48 + total - 192)
        assert layer.get_seq_length() == total


@every_method
@pytest.mark.thin(2)
def test_prefetched_or_not_cold_or_warm_is_all_the_same(method, model, tmp_path):
    ids = prompt(PREFIX)
    results = {}
    for memory in ("0", "64MiB"):
        with KVStore(tmp_path / memory, engine="posix", host_memory=memory) as store:
            fill(store, model, ids, method)
        for ahead in (0, 1 << 20):
            with KVStore(tmp_path / memory, engine="posix", host_memory=memory) as store:
                for turn in ("cold", "warm"):
                    own = replace(method, ahead_bytes=ahead)
                    results[memory, ahead, turn] = ask(model, store, question(ids), own)
    first, _ = results["0", 0, "cold"]
    for output, _ in results.values():
        assert_same(output, first)
    assert results["64MiB", 0, "warm"][1].stats.bytes_read == 0
    assert results["0", 0, "warm"][1].stats.bytes_read > 0


@pytest.mark.parametrize("ahead", [0, 1 << 20])
def test_every_byte_read_is_accounted_for(tmp_path, ahead):
    # blocks of whole pages, so that padding does not blur the figures
    model, ids = build("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2), prompt(PREFIX)
    for host_memory in (0, "16MiB"):
        with KVStore(tmp_path, engine="posix", host_memory=host_memory) as store:
            if not store.segments():
                fill(store, model, ids)
            _, cache = ask(model, store, question(ids), replace(METHOD, ahead_bytes=ahead))
        stats = cache.stats
        layers, size = len(cache.layers), 16 * 2 * 64 * 4  # bytes of one chunk's keys in one layer
        periods = layers // METHOD.period
        assert stats.details.bytes_identifying == periods * 12 * size
        assert stats.details.bytes_used == layers * 3 * 2 * size
        assert stats.bytes_read == stats.details.bytes_identifying + stats.details.bytes_used
        assert stats.read_amplification == 1.0


def test_rows_that_share_a_prefix_read_it_once(tmp_path):
    """Rows with different padding are restored separately, but read once."""
    model, ids = build("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2), prompt(PREFIX)
    bytes_identifying = []
    rows = [question(ids), question(ids, tokens=20)]
    length = max(row.shape[1] for row in rows)
    batch = torch.cat([torch.nn.functional.pad(row, (length - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (length - row.shape[1], 0)) for row in rows])
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids)
        for batch_ids, masks in ((rows[0], torch.ones_like(rows[0])), (batch, mask)):
            _, cache = ask(model, store, batch_ids, attention_mask=masks)
            bytes_identifying.append(cache.stats.details.bytes_identifying)
    assert bytes_identifying[0] == bytes_identifying[1] > 0


def test_a_resident_index_reads_nothing_once_it_is_there(model, tmp_path, chosen):
    """A choice by coarse keys depends neither on where they came from nor on how much of a segment was asked for."""
    ids, method = prompt(PREFIX), replace(METHOD, identify="index")
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        first, cold = ask(model, store, question(ids[:, :100]), method)
        chosen.clear()
        second_output, warm = ask(model, store, question(ids[:, :100]), method)
        coarse = [tokens.tolist() for tokens in chosen]
        chosen.clear()
        ask(model, store, question(ids[:, :100]), METHOD)
        longer = ask(model, store, question(ids), method)[1]
    assert cold.stats.details.bytes_identifying > 0
    assert warm.stats.details.bytes_identifying == longer.stats.details.bytes_identifying == 0
    assert warm.stats.bytes_read == warm.stats.details.bytes_used + _padding(warm)
    assert_same(second_output, first)
    assert coarse[0] == chosen[0].tolist()  # eight bits are enough for the same choice here


def test_an_index_outlives_the_process(tmp_path):
    """It is stored with the segment, so the next process reads no keys to select by."""
    model = build_deep("qwen2")
    ids, method = prompt(PREFIX), replace(METHOD, identify="index")
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        first, writer = ask(model, store, question(ids[:, :100]), method)  # a part of the segment: of all of it is made
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        second_output, reader = ask(model, store, question(ids[:, :100]), method)
        _, longer = ask(model, store, question(ids), method)
    assert_same(second_output, first)
    heads, dim, layers = 2, 16, 6
    coded = layers // 2 * heads * 192 * (dim + 4)  # of a layer in two, eight bits a value and a scale
    assert writer.stats.details.bytes_identifying > coded
    assert reader.stats.details.bytes_identifying == coded
    assert longer.stats.details.bytes_identifying == 0
    assert reader.stats.details.index_seconds == 0


def test_precomputed_prompts_have_their_index(model, tmp_path):
    ids, method = prompt(PREFIX), replace(METHOD, identify="index")
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        store.precompute(model, ids, method=method, progress=False)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        _, cache = ask(model, store, question(ids), method)
    assert cache.stats.tokens_restored == 192
    assert cache.stats.details.bytes_identifying > cache.stats.details.index_seconds == 0


def _padding(cache) -> int:
    """Return the padding of the bytes read for attention: the blocks of this small model do not fill pages."""
    stats = cache.stats
    return round((stats.read_amplification - 1) * stats.details.bytes_used)


def test_the_index_stays_within_its_budget(model, tmp_path):
    method = replace(METHOD, identify="index")
    with KVStore(tmp_path, engine="posix", index_memory=40_000) as store:
        for seed in range(4):
            ids = prompt(PREFIX, seed=seed)
            fill(store, model, ids, method)
            ask(model, store, question(ids), method)
            assert 0 < store.stats.index.bytes <= store.stats.index.budget == 40_000
        first, _ = ask(model, store, question(prompt(PREFIX, seed=0)), method)  # long gone, and read again
    with KVStore(tmp_path, engine="posix", index_memory=0) as store:
        assert_same(ask(model, store, question(prompt(PREFIX, seed=0)), method)[0], first)
        assert (store.stats.index.bytes, store.stats.index.budget) == (0, 0)


@pytest.mark.parametrize("method", [replace(METHOD, identify="index"), KVDrive(budget=0.25)], ids=describe_method)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.thin(2)
def test_an_index_without_room_says_so(model, tmp_path, caplog, method, batch):
    """The reason also says that each request reads the index again."""
    ids = prompt(PREFIX, rows=batch, seed=3)
    batch_ids = torch.cat([ids, prompt(24, rows=batch, seed=5)], dim=1)
    text = "does not fit into index_memory ({}), so each request reads it from disk again; open the store with a larger"
    for row in ids:
        with KVStore(tmp_path, engine="posix") as store:
            store.precompute(model, row[None], method=method, progress=False)
    with KVStore(tmp_path, engine="posix") as store:
        need = ask(model, store, batch_ids, method)[1].stats.details.index_bytes
        assert need == store.stats.index.bytes
    for room, why in ((need, ""), (need - 1, text.format(format_bytes(need - 1))), (1, text.format("1 Byte")), (0, "")):
        caplog.clear()
        with KVStore(tmp_path, engine="posix", index_memory=room, policy=method.policy) as store:
            requests = [ask(model, store, batch_ids, method)[1].stats for _ in range(3)]
            assert bool(store.stats.evicted_indexes) == (room < need)
        for stats in requests:
            assert stats.tokens_restored == batch * 192
            assert why in stats.reason and bool(stats.reason) == bool(why)
            assert (stats.details.index_bytes, list(stats.reasons.values())) == (need, [1] * bool(why))
        key_bytes = [stats.details.bytes_identifying for stats in requests]
        assert key_bytes[0] >= need
        if room == need - 1:  # of two segments memory keeps the index of one
            assert all(key_bytes[0] // batch <= again <= key_bytes[0] for again in key_bytes[1:])
        else:
            assert key_bytes == ([key_bytes[0], 0, 0] if room == need else 3 * key_bytes[:1])
        assert caplog.text.count("index_memory") == 2 * bool(why)  # the sentence names it twice


def test_indexes_that_make_room_for_others_are_counted(tmp_path):
    """Each prompt's own index fits, so requests have no reason to report."""
    model = build_deep("qwen2")
    method = replace(METHOD, identify="index")
    with KVStore(tmp_path, engine="posix", host_memory=0, index_memory=40_000) as store:
        for times, seed in enumerate((0, 1, 0, 0)):
            ids = prompt(PREFIX, seed=seed)
            fill(store, model, ids, method)
            stats = ask(model, store, question(ids), method)[1].stats
            assert not stats.reason and 20_000 < stats.details.index_bytes < 40_000
            assert (store.stats.evicted_indexes > 0) == (times > 0)
            assert (stats.details.bytes_identifying > 0) == (times < 3)


def test_h2o_reads_all_keys_and_the_values_of_what_it_chose(tmp_path):
    model, ids = build("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2), prompt(PREFIX)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, H2O())
        _, cache = ask(model, store, question(ids), H2O(budget=1 / 192))
    stats, layers, size = cache.stats, len(cache.layers), 2 * 64 * 4  # bytes of a token's keys in one layer
    assert stats.bytes_read >= layers * 192 * size + layers * 64 * size  # keys of 3 chunks, values of one or two
    assert stats.bytes_read <= layers * 192 * size + layers * 128 * size
    assert stats.read_amplification > 2  # one token of each head in blocks of 64


def test_a_head_reads_blocks_of_its_own_tokens_alone(tmp_path, chosen):
    model, ids = build("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=4), prompt(PREFIX)
    layers, token = model.config.num_hidden_layers, 64 * 4  # bytes of a token's key, or value, in one head
    blocks: dict[str, list] = {}
    stats_by_name = {}
    for name, heads in (("together", None), ("apart", 1)):
        method = H2O(budget=0.05, geometry=Geometry(16, 1, heads_per_block=heads, split_kv=True))
        chosen.clear()
        with KVStore(tmp_path / name, engine="posix", host_memory=0) as store:
            fill(store, model, ids, method)
            stats_by_name[name] = ask(model, store, question(ids), method)[1].stats
        blocks[name] = [[np.unique(tokens // 16) for tokens in sets] for sets in chosen]
    for name, stats in stats_by_name.items():
        values = sum(
            sum(map(len, sets)) if name == "apart" else len(np.unique(np.concatenate(sets))) * len(sets)
            for sets in blocks[name]
        )  # blocks of one head, or as many bytes
        assert stats.disk.bytes == layers * 192 * 4 * token + values * 16 * token
        assert stats.details.bytes_used == layers * 4 * 2 * 9 * token  # nine tokens of each head
    assert stats_by_name["apart"].disk.bytes < stats_by_name["together"].disk.bytes


def test_layers_of_a_block_that_another_period_serves_are_read_for_nothing(tmp_path, chosen):
    """With blocks of four layers and a selection per layer, three of four layers' bytes are unused."""
    model, ids = build("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2), prompt(PREFIX)
    layers, block = model.config.num_hidden_layers, 16 * 2 * 2 * 64 * 4  # bytes of a chunk in one layer
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, replace(METHOD, period=1))
        store.relayout(geometry=Geometry(16, 4, index=METHOD.geometry.index))
        method = replace(METHOD, period=1, ahead_bytes=0)
        stats = ask(model, store, question(ids), method)[1].stats
    assert stats.details.bytes_used == layers * 3 * block
    selected_bytes = stats.bytes_read - stats.details.bytes_identifying
    assert stats.read_amplification == selected_bytes / stats.details.bytes_used > 1.5


def test_a_geometry_that_does_not_fit_is_said_once(model, store, caplog):
    ids = prompt(PREFIX)
    fill(store, model, ids, Exact())
    for _ in range(2):
        ask(model, store, question(ids), METHOD)
    assert caplog.text.count("call store.relayout(method) to rewrite them") == 1
    ask(model, store, question(ids), None)  # the exact method reads any geometry, and all of it


def test_a_geometry_that_fits_is_not_spoken_of(model, store, caplog):
    ids = prompt(PREFIX)
    fill(store, model, ids, Exact())
    store.relayout(METHOD, progress=False)
    ask(model, store, question(ids), METHOD)
    assert "relayout" not in caplog.text


def test_impress_reads_only_its_probes_where_they_agree(tmp_path):
    model, ids = build("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=4), prompt(PREFIX)
    agree, differ = (Impress(budget=0.05, probe_heads=2, chunk_tokens=16, alpha=alpha) for alpha in (1e4, 0))
    stats_by_name = {}
    for name, method in (("agree", agree), ("differ", differ)):
        with KVStore(tmp_path / name, engine="posix", host_memory=0) as store:
            fill(store, model, ids, method)
            stats_by_name[name] = ask(model, store, question(ids), method)[1].stats
    layers, size = model.config.num_hidden_layers, 64 * 4
    agreed, probes = stats_by_name["agree"], layers * 192 * 2 * size  # the keys of two heads
    assert 0 < agreed.details.bytes_identifying < probes  # those of chosen chunks are attended to
    assert agreed.bytes_read < probes + layers * 192 * 6 * size * 0.9  # and of the rest chosen chunks alone
    assert stats_by_name["differ"].bytes_read > layers * 192 * 4 * size  # the keys of all four


@pytest.mark.parametrize("alpha", [1e4, 0], ids=["agree", "differ"])
@pytest.mark.parametrize(("heads", "probes"), [(2, 3), (4, 3), (8, 3)])
def test_impress_reads_no_key_twice(tmp_path, heads, probes, alpha):
    model = build("qwen2", hidden_size=512, num_attention_heads=8, num_key_value_heads=heads)  # blocks of whole pages
    ids, method = prompt(PREFIX), Impress(budget=0.05, probe_heads=probes, chunk_tokens=16, alpha=alpha)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        (row,) = store.segments()
        shape = store._storage.disk.reader(row.id).shape
        kv = sum(group.block_bytes * shape.chunks_in(group) for group in shape.block_groups)
        assert kv == 192 * shape.layout.bytes_per_token  # nothing is stored twice, either
        stats = ask(model, store, question(ids), method)[1].stats
    assert kv // 4 < stats.bytes_read <= kv  # all keys, or those of the probes, and some of the rest


def test_what_choices_are_made_from_is_known_as_needed_whole(tmp_path):
    """Otherwise, it would be evicted first, and read again each time."""
    model = build_deep("qwen2")
    ids = prompt(PREFIX)
    for method in (METHOD, Impress(budget=0.25, probe_heads=1, chunk_tokens=16, alpha=9, reorder=False)):
        with KVStore(tmp_path / method.policy, engine="posix", policy=method.policy) as store:
            fill(store, model, ids, method)
            for _ in range(3):
                ask(model, store, question(ids), method)
            scores = store._storage.residency.scores
            (row,) = store.segments()
            groups = _block_groups(store)
            if method is METHOD:
                sources = [group for group in groups if group.identifies]
            else:
                sources = [group for group in groups if {(p.tensor, p.first_head) for p in group.parts} == {("key", 0)}]
            assert len(sources) >= 3
            for group in sources:
                importance, accesses = scores.of((row.id, group.index), np.arange(12))
                assert (accesses == 3).all()
                highest = max(scores.of((row.id, other_group.index), np.arange(12))[0].max() for other_group in groups)
                assert (importance > 0).all()
                assert importance.min() >= (1 if method is not METHOD else 0.5 * highest)


def test_probes_of_what_is_often_asked_stay_in_memory(tmp_path):
    model = build("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=4)
    method = Impress(budget=0.1, probe_heads=2, chunk_tokens=16, alpha=1e4, reorder=False)
    documents = [prompt(PREFIX, seed=seed) for seed in (1, 2, 3)]
    with KVStore(tmp_path, engine="posix", policy=method.policy, host_memory=0) as store:
        for ids in documents:
            fill(store, model, ids, method)
        keys = 6 * 12 * 16 * 2 * 64 * 4  # of the probes, of all layers
        store._storage.residency.host._budget = 2 * keys
        for _ in range(4):
            ask(model, store, question(documents[0]), method)
        for ids in documents[1:]:
            ask(model, store, question(ids), method)
        again = ask(model, store, question(documents[0]), method)[1].stats
    assert again.details.bytes_identifying == 0


def test_baselines(model, store):
    ids = prompt(PREFIX)
    fill(store, model, ids, AttentionStore())
    plain = model.generate(question(ids), past_key_values=DynamicCache(), **GREEDY)
    output, cache = ask(model, store, question(ids), Recompute())
    assert_same(output, plain)
    assert cache.stats.tokens_restored == 0
    exact, _ = ask(model, store, question(ids), None)
    everything, cache = ask(model, store, question(ids), AttentionStore())
    assert_same(everything, exact)
    assert cache.stats.tokens_attended == cache.stats.tokens_restored == 192


def test_rows_choose_for_themselves(model, store, chosen):
    prefixes = [prompt(PREFIX, seed=seed) for seed in (1, 2, 3)]
    for ids in prefixes:
        fill(store, model, ids)
    rows = [question(ids) for ids in (prefixes[0], prefixes[1], prefixes[2][:, :72])]
    length = max(row.shape[1] for row in rows)
    batch = torch.cat([torch.nn.functional.pad(row, (length - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(r), (length - r.shape[1], 0)) for r in rows])
    output, _ = ask(model, store, batch, attention_mask=mask)
    together = [tokens.tolist() for tokens in chosen]
    chosen.clear()
    for number, row in enumerate(rows):
        alone, _ = ask(model, store, row)
        assert [t.tolist() for t in chosen] == together[number :: len(rows)]
        chosen.clear()
        for a, b in zip(output.logits, alone.logits, strict=True):
            assert torch.allclose(a[number], b[0], atol=2e-5)
    assert together[0] != together[1]


def test_what_was_attended_to_is_known_after_a_restart(model, tmp_path):
    ids = prompt(PREFIX)
    with KVStore(tmp_path, engine="posix", policy="attention") as store:
        fill(store, model, ids)
        ask(model, store, question(ids))
        ask(model, store, question(ids))
        (row,) = store.segments()
        block_groups = [
            block_group.index
            for block_group in store._storage.disk.reader(row.id).shape.block_groups
            if not block_group.identifies
        ]
        before = [
            store._storage.residency.scores.of((row.id, block_group), np.arange(12)) for block_group in block_groups
        ]
    for importance, accesses in before:
        assert sorted(accesses.tolist()) == [0] * 9 + [2] * 3  # 3 of 12 chunks, twice
        assert ((importance > 0) == (accesses > 0)).all()
        assert importance.sum() <= 2
    with KVStore(tmp_path, engine="posix", policy="attention") as store:
        after = [
            store._storage.residency.scores.of((row.id, block_group), np.arange(12)) for block_group in block_groups
        ]
        assert np.allclose(before, after)
        store.remove([row.id])
    with KVStore(tmp_path, engine="posix", policy="attention") as store:
        assert not store._storage.residency.scores.of((row.id, block_groups[0]), np.arange(12)).any()


def test_the_most_attended_chunks_stay_in_memory(model, tmp_path):
    """One question is asked often, then others; its chunks are still in a small memory."""
    method = replace(METHOD, identify="index", ahead_bytes=0)
    documents = [prompt(PREFIX, seed=seed) for seed in (1, 2, 3)]
    bytes_read = {}
    for policy in ("lru", "attention"):
        with KVStore(tmp_path / policy, engine="posix", policy=policy, host_memory=0) as store:
            for ids in documents:
                fill(store, model, ids)
                ask(model, store, question(ids), method)  # its index is in memory from here on
            (block_group, *groups) = (block_group for block_group in _block_groups(store) if not block_group.identifies)
            blocks = 3 * (1 + len(groups))  # that a question attends to
            store._storage.residency.host._budget = (blocks * 3 // 2) * block_group.block_bytes + 4096
            for _ in range(4):
                ask(model, store, question(documents[0]), method)
            for ids in documents[1:]:
                ask(model, store, question(ids), method)
            bytes_read[policy] = ask(model, store, question(documents[0]), method)[1].stats.bytes_read
    assert bytes_read["attention"] == 0
    assert bytes_read["lru"] > 0


def _block_groups(store):
    return store._storage.disk.reader(store.segments()[0].id).shape.block_groups


def test_what_follows_a_choice_is_never_taken_for_exact(model, store):
    ids = prompt(PREFIX)
    fill(store, model, ids)
    before = store.stats.segments
    first, cache = ask(model, store, question(ids), record=True)
    turn = torch.cat([first.sequences, prompt(40, seed=9)], dim=1)
    model.generate(turn, past_key_values=cache, **GREEDY)
    cache.store_now()
    store.flush()
    assert store.stats.segments == before
    exact, again = ask(model, store, turn, None)
    assert again.stats.tokens_restored == 192
    plain = model.generate(turn, past_key_values=DynamicCache(), **GREEDY)
    assert torch.equal(exact.sequences, plain.sequences)
    assert torch.allclose(exact.logits[0], plain.logits[0], atol=1e-5)


def test_an_empty_store_is_filled_exactly(model, store):
    ids = question(prompt(PREFIX))
    output, cache = ask(model, store, ids, record=True)
    plain = model.generate(ids, past_key_values=DynamicCache(), **GREEDY)
    assert_same(output, plain)
    cache.store_now()
    store.flush()
    assert ask(model, store, ids, None)[1].stats.tokens_restored > 200


def test_segments_of_another_geometry_serve_too(model, tmp_path):
    ids = prompt(PREFIX)
    results = []
    for name, cut_by in (
        ("own", METHOD),
        ("exact", None),
        ("odd", ContiguousKV(chunk_tokens=16, period=3, identify="keys")),
    ):
        with KVStore(tmp_path / name, engine="posix") as store:
            fill(store, model, ids, cut_by)
            results.append(ask(model, store, question(ids))[0])
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("identifies", [False, True])
def test_a_damaged_block_is_computed_anew(model, store, identifies):
    ids = prompt(PREFIX)
    fill(store, model, ids)
    plain = model.generate(question(ids), past_key_values=DynamicCache(), **GREEDY)
    (row,) = store.segments()
    reader = store._storage.disk.reader(row.id)
    block_group = next(block_group for block_group in reader.shape.block_groups if block_group.identifies == identifies)
    path = store._storage.disk.path(row.id)
    start = reader.header.blocks.offset + reader.shape.group_offsets[block_group.index]
    data = bytearray(path.read_bytes())
    for chunk in range(reader.shape.chunks_in(block_group)):
        data[start + chunk * block_group.block_bytes + 7] ^= 1
    path.write_bytes(data)
    store._storage.residency.clear()
    output, cache = ask(model, store, question(ids))
    assert_same(output, plain)
    assert cache.stats.details.verification_failures and cache.stats.details.recomputed
    assert cache.stats.tokens_attended == 0


def test_tokens_of_the_prompt_cannot_be_taken_back(model, store):
    ids = prompt(PREFIX)
    fill(store, model, ids)
    _, cache = ask(model, store, question(ids))
    cache.crop(-20)
    with pytest.raises(RuntimeError, match="within a budget"):
        cache.crop(-40)


@pytest.mark.parametrize("family", BLIND)
def test_models_whose_attention_is_out_of_sight_are_refused(family, store):
    model = build(family)
    with pytest.raises(UnsupportedModelError, match="exact method"):
        TieredCache(model, store, method=METHOD)
    TieredCache(model, store, method=replace(METHOD, budget=1.0))


@pytest.mark.parametrize(("family", "advice"), [("llama", "sdpa"), ("gpt_oss", "eager")])
def test_attention_that_hides_its_queries_is_refused(family, advice, store):
    model = build(family)
    attend_by_another_name(model)
    with pytest.raises(ConfigError, match=rf"set_attn_implementation\('{advice}'\)"):
        TieredCache(model, store, method=METHOD)
    assert attachment_of(model) is None
    model.set_attn_implementation(advice)
    TieredCache(model, store, method=METHOD)


def eager_by_index(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Eager attention that weighs keys by their index in the cache."""
    far = torch.arange(key.shape[2]) / key.shape[2]
    key, value = (tensor.repeat_interleave(module.num_key_value_groups, 1) for tensor in (key, value))
    weights = (query @ key.transpose(2, 3) * scaling + far + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def test_eager_attention_of_unknown_operations_is_refused(store, monkeypatch):
    """Selected keys have other indexes."""
    model = build("gpt_oss")
    monkeypatch.setitem(inspect.getmodule(type(model)).__dict__, "eager_attention_forward", eager_by_index)
    with pytest.raises(UnsupportedModelError, match="attention of its own"):
        TieredCache(model, store, method=METHOD)
    model, ids = build("llama", attn_implementation="eager"), prompt(PREFIX)
    fill(store, model, ids)
    cache = TieredCache(model, store, method=METHOD)
    monkeypatch.setitem(inspect.getmodule(type(model)).__dict__, "eager_attention_forward", eager_by_index)
    with pytest.raises(ConfigError, match=r"'eager' of LlamaForCausalLM; call .*\('sdpa'\)"):
        TieredCache(model, store, method=METHOD)
    model.generate(question(ids), past_key_values=cache, **GREEDY)
    assert cache.stats.tokens_restored == 0


@pytest.mark.parametrize(
    "arguments", [{"budget": 0}, {"budget": 1.5}, {"identify": "guess"}, {"period": 0}, {"solo_layers": -1}]
)
def test_settings_without_meaning_are_refused(arguments):
    with pytest.raises(ConfigError):
        ContiguousKV(**arguments)


def test_a_method_by_name_with_options():
    method = make_method("contiguous_kv:budget=0.1:identify=keys:period=4")
    assert method == ContiguousKV(budget=0.1, identify="keys", period=4)
    assert make_method("h2o").budget == H2O().budget
    assert make_method("h2o:policy=lru") == H2O(policy="lru")
    assert not make_method("impress:reorder=false").reorder
    with pytest.raises(ConfigError, match="of type bool, not 'perhaps'"):
        make_method("impress:reorder=perhaps")
    with pytest.raises(ConfigError, match=r"no option 'share'; its options are: .*budget"):
        make_method("impress:share=0.1")
    with pytest.raises(ConfigError, match=r"of type float \| Literal\['auto'\], not 'half'"):
        make_method("krul:recompute=half")
    with pytest.raises(ConfigError, match="of type int, not 'four'"):
        make_method("contiguous_kv:period=four")
    with pytest.raises(ConfigError, match="budget must be a share"):
        make_method("h2o:budget=3")


@pytest.mark.parametrize(
    "mode", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_other_ways_of_generating(model, store, mode):
    """A whole budget runs the same code as a part, and differs only in what is attended to."""
    ids = prompt(PREFIX)
    fill(store, model, ids)
    for budget in (0.25, 0.9999):
        torch.manual_seed(3)
        settings = {"do_sample": False, "max_new_tokens": NEW} | mode
        cache = TieredCache(model, store, method=replace(METHOD, budget=budget))
        output = model.generate(question(ids), past_key_values=cache, **settings)
        assert output.shape[1] == PREFIX + 24 + NEW
        assert cache.stats.tokens_attended < cache.stats.tokens_restored
