"""KVDRIVE: what a head attends to at each token is what the index ranks first, whatever tier it comes from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import build, build_eager, prompt
from reference import assert_same
from test_selective import GREEDY, ask, fill, question
from thorough import pairs, some
from transformers import DynamicCache, StoppingCriteria

from hf_tiered_cache import KVStore, LostKVError, TieredCache
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.layers.buffer import KVBuffer
from hf_tiered_cache.methods import KVDrive, make_method
from hf_tiered_cache.selection import DECODE_INDEXES, decode, streamed, window
from hf_tiered_cache.selection import held as grown
from hf_tiered_cache.selection.decode import DecodeSelection
from hf_tiered_cache.selection.decode_index import rank
from hf_tiered_cache.selection.window import ByIndex, Span

FAMILY = "qwen2"

METHOD = KVDrive(budget=0.2, local=16)
TOKENS = 400


@pytest.fixture
def steps(monkeypatch):
    """Record what each layer holds after each selection: layer, each row's columns, query, keys, values."""
    noted = []

    def reselect(self, layer, rows, query, keys, values, *args, real=DecodeSelection.reselect):
        real(self, layer, rows, query, keys, values, *args)
        columns = [None if row is None else row.window.columns for row in rows]
        noted.append((layer, columns, query.clone(), keys.clone(), values.clone()))

    monkeypatch.setattr(DecodeSelection, "reselect", reselect)
    return noted


def exact_kv(model, ids):
    """Return rotated keys, and values of a prompt: `[layers][2]`, each `[1, kv_heads, tokens, dim]`."""
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


def tokens_in(chunks, method, tokens):
    """Return the tokens in each head's columns according to its window: int64 `[kv_heads, columns]`."""
    return method.selector().span(tokens, method.token_budget(tokens)).tokens_of(chunks)


@pytest.mark.parametrize(("family", "window"), pairs(["qwen2", "llama", "gemma3", "phi3", "granite"], [0, 1, 2, 4]))
@pytest.mark.thin(2)
def test_columns_hold_the_kv_of_the_tokens_that_the_window_says(family, window, tmp_path, steps):
    model, ids, method = build(family), prompt(TOKENS), KVDrive(budget=0.2, local=16, window=window)
    kv = exact_kv(model, ids)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        _, cache = ask(model, store, question(ids), method)
    assert cache.stats.tokens_restored == TOKENS and cache.stats.reason == ""
    assert len({layer for layer, *_ in steps}) >= 2
    for layer, (row,), _, keys, values in steps:
        tokens_of_heads = tokens_in(row, method, TOKENS)
        assert all(len(set(head_tokens)) == tokens_of_heads.shape[1] for head_tokens in tokens_of_heads.tolist())
        for head, tokens in enumerate(tokens_of_heads):
            for actual, expected in zip((keys, values), kv[layer], strict=True):
                torch.testing.assert_close(actual[0, head, : len(tokens)], expected[0, head, tokens], rtol=0, atol=1e-5)


@pytest.mark.parametrize("index", [name for name in DECODE_INDEXES if name != "random"])
@pytest.mark.thin(2)
def test_the_chosen_chunks_are_those_that_the_index_ranks_first(index, model, tmp_path, steps):
    ids, chunk = prompt(TOKENS), 1 if index == "token_clusters" else 8
    method = KVDrive(budget=0.2, local=16, index=index, chunk_tokens=chunk)
    kind, span = DECODE_INDEXES[index], method.selector().span(TOKENS, method.token_budget(TOKENS))
    kv = exact_kv(model, ids)
    indexes = [kind.build(keys[0], chunk) for keys, _ in kv]
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, method)
        ask(model, store, question(ids), method)
    assert steps
    for layer, (row,), query, *_ in steps:
        surplus = TOKENS // chunk - len(span.candidates)  # some kinds choose otherwise among more
        all_ranked = rank([indexes[layer]], query[0], None, min(TOKENS // chunk, int(1.25 * span.chunks) + surplus))
        for head_chunks, ranked in zip(row, all_ranked.tolist(), strict=True):
            allowed = [chunk_number for chunk_number in ranked if chunk_number in span.candidates]
            assert sorted(head_chunks.tolist()) == sorted(allowed[: span.chunks])


def test_sinks_and_the_last_tokens_are_always_there(model, tmp_path, steps):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        ask(model, store, question(ids), METHOD)
    for _, (row,), *_ in steps:
        for head_tokens in tokens_in(row, METHOD, TOKENS):
            assert set(range(4)) | set(range(TOKENS - 16, TOKENS)) <= set(head_tokens.tolist())


def test_a_whole_budget_is_the_exact_method(model, tmp_path):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        exact, _ = ask(model, store, question(ids), None)
        output, cache = ask(model, store, question(ids), KVDrive(budget=1.0))
        assert_same(output, exact)
        assert cache.stats.tokens_attended == cache.stats.tokens_restored == TOKENS


@pytest.mark.parametrize("eviction", ["lookahead", "lru"])
def test_nothing_depends_on_where_a_chunk_was(eviction, model, tmp_path):
    """Bits are equal with windows of any size, with or without host memory, in first and later requests."""
    ids, results = prompt(TOKENS), []
    for number, host in enumerate((0, "64MiB")):
        with KVStore(tmp_path / str(number), engine="posix", host_memory=host) as store:
            fill(store, model, ids, METHOD)
            for window in (1, 2, 4, 2):
                method = KVDrive(budget=0.2, local=16, window=window, eviction=eviction)
                results.append(ask(model, store, question(ids), method))
    for output, _ in results[1:]:
        assert_same(output, results[0][0])
    bytes_read = [cache.stats.bytes_read for _, cache in results]
    assert bytes_read[1] < bytes_read[0] and bytes_read[2] < bytes_read[1]  # larger windows read less
    assert bytes_read[5] == 0  # the second request has all of it on the host


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_eager_attention_to_a_streamed_prefix_is_full_attention(family, tmp_path, monkeypatch):
    """Softcaps and sinks count once, however many runs the prefix has, also beside rows that are not streamed."""
    monkeypatch.setattr(streamed, "_RUN_TOKENS", 64)
    model, method = build_eager(family), KVDrive(budget=0.2, local=16, exact_from=16)
    long, short = prompt(TOKENS), prompt(160, seed=3)
    rows = torch.zeros(2, TOKENS + 24, dtype=torch.int64)
    rows[0], rows[1, -168:] = question(long)[0], question(short, tokens=8)[0]
    mask = (rows != 0).long()
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, long, method)
        fill(store, model, short, method)
        output, cache = ask(model, store, question(long), method)
        together, _ = ask(model, store, rows, method, attention_mask=mask)
        alone, _ = ask(model, store, question(short, tokens=8), method)
    full = model.generate(question(long), **GREEDY)
    assert cache.stats.tokens_attended == TOKENS
    torch.testing.assert_close(output.logits[0], full.logits[0], rtol=0, atol=1e-5)
    for logits, expected in ((together.logits[0][0], full.logits[0][0]), (together.logits[0][1], alone.logits[0][0])):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_a_second_request_builds_no_index_and_reads_no_keys(model, tmp_path, monkeypatch):
    built, kind = [], DECODE_INDEXES[METHOD.index]
    build_index = kind.build.__func__
    monkeypatch.setattr(kind, "build", classmethod(lambda cls, *args: built.append(1) or build_index(cls, *args)))
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, METHOD)
        _, first = ask(model, store, question(ids), METHOD)
        assert len(built) == model.config.num_hidden_layers
        _, second = ask(model, store, question(ids), METHOD)
        assert len(built) == model.config.num_hidden_layers
        assert second.stats.details.bytes_identifying == 0 < first.stats.details.bytes_identifying
        assert second.stats.bytes_read < first.stats.bytes_read


def test_rows_of_a_batch_choose_for_themselves(model, tmp_path, steps):
    """Left-padded rows have other lengths, one of them shorter than the row's capacity."""
    long, short = prompt(TOKENS), prompt(64, seed=3)
    rows = torch.zeros(2, TOKENS + 24, dtype=torch.int64)
    rows[0], rows[1, -88:] = question(long)[0], question(short)[0]
    mask = torch.ones_like(rows)
    mask[1, :-88] = 0
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, long, METHOD)
        fill(store, model, short, METHOD)
        cache = TieredCache(model, store, method=METHOD, record=False)
        together = model.generate(rows, attention_mask=mask, past_key_values=cache, **GREEDY)
        (alone, _), (short_alone, _) = (ask(model, store, question(ids), METHOD) for ids in (long, short))
    assert torch.equal(together.sequences[0], alone.sequences[0])
    assert torch.equal(together.sequences[1, -8:], short_alone.sequences[0, -8:])
    assert all(rows_held[0] is not None for _, rows_held, *_ in steps)


def test_nothing_depends_on_how_many_rows_are_ranked_together(model, tmp_path, monkeypatch):
    rows, results = [prompt(TOKENS), prompt(TOKENS, seed=3), prompt(TOKENS)], []
    ids = torch.cat([question(row) for row in rows])
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        for row in rows[:2]:
            fill(store, model, row, METHOD)
        for size in (8, 2, 1):
            monkeypatch.setattr(decode, "MICRO_BATCH", size)
            cache = TieredCache(model, store, method=METHOD, record=False)
            results.append((model.generate(ids, past_key_values=cache, **GREEDY), cache.stats))
    for answer, stats in results[1:]:
        assert_same(answer, results[0][0])
        assert stats.details.bytes_used == results[0][1].details.bytes_used > 0


def test_padding_of_a_row_that_restores_nothing_is_finite(model, tmp_path, monkeypatch):
    def empty(*args, real=torch.empty, **more):
        tensor = real(*args, **more)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    ids = prompt(TOKENS)
    rows = torch.zeros(2, TOKENS + 24, dtype=torch.int64)
    rows[0], rows[1, -20:] = question(ids)[0], prompt(20, seed=3)[0]
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        monkeypatch.setattr(torch, "empty", empty)
        cache = TieredCache(model, store, method=METHOD, record=False)
        output = model.generate(rows, attention_mask=(rows != 0).long(), past_key_values=cache, **GREEDY)
    alone = model.generate(rows[1:, -20:], **GREEDY)
    assert cache.stats.tokens_restored > 0
    assert torch.equal(output.sequences[1, -GREEDY["max_new_tokens"] :], alone.sequences[0, 20:])


def test_beams_have_windows_of_their_own(model, tmp_path):
    ids = prompt(TOKENS)
    kwargs = {"do_sample": False, "max_new_tokens": 8, "num_beams": 3}
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        answers = [
            model.generate(
                question(ids), past_key_values=TieredCache(model, store, method=method, record=False), **kwargs
            )
            for method in (METHOD, KVDrive(budget=0.2, local=16, window=4), METHOD)
        ]
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_a_prefix_of_several_segments_and_a_part_of_one(model, tmp_path, steps):
    ids = prompt(TOKENS)
    kv = exact_kv(model, ids)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids[:, :160], METHOD)
        fill(store, model, ids[:, :304], METHOD)
        fill(store, model, ids, METHOD)
        assert len(store.segments()) == 3
        shortened_ids = torch.cat([ids[:, :350], prompt(24, seed=9)], dim=1)  # leaves the last segment in the middle
        _, cache = ask(model, store, shortened_ids, METHOD)
        tokens_restored = cache.stats.tokens_restored
        assert tokens_restored == 336
    for layer, (row,), _, keys, _ in steps:
        for head, tokens in enumerate(tokens_in(row, METHOD, tokens_restored)):
            torch.testing.assert_close(keys[0, head, : len(tokens)], kv[layer][0][0, head, tokens], rtol=0, atol=1e-5)


def test_any_geometry_will_do_and_is_spoken_of(model, tmp_path, caplog):
    ids = prompt(TOKENS)
    with KVStore(tmp_path / "a", engine="posix") as store:
        fill(store, model, ids, METHOD)
        expected, _ = ask(model, store, question(ids), METHOD)
    with KVStore(tmp_path / "b", engine="posix", host_memory=0) as store:
        store.precompute(model, ids, progress=False)
        output, wide = ask(model, store, question(ids), METHOD)
        assert "store.relayout(method)" in caplog.text
        store.relayout(METHOD, progress=False)
        second_output, fitting = ask(model, store, question(ids), METHOD)
    assert_same(output, expected)
    assert_same(second_output, expected)
    assert fitting.stats.bytes_read < wide.stats.bytes_read


def test_spans():
    by_index = ByIndex(chunk_tokens=8, sinks=4, local=64)
    count = by_index.budgeted_tokens(0.1, 1003)
    span = by_index.span(1003, count)
    assert (span.first, span.chunks, span.chunk_tokens) == (8, 12, 8)
    assert 64 <= span.last < 72 and (1003 - span.last) % 8 == 0
    assert span.first + 8 * span.chunks + span.last == count
    assert by_index.span(count, count) is None
    other_span = by_index.span(998, count)  # another row of the same batch: as many tokens
    assert other_span.first + 8 * other_span.chunks + other_span.last == count and other_span.last >= 64
    tokens = other_span.tokens_of(np.array([[3, 1, *range(20, 30)]]))
    assert tokens.shape == (1, count) and len(set(tokens[0].tolist())) == count and tokens.max() == 997


@pytest.mark.parametrize(
    "wrong",
    [{"budget": 0}, {"chunk_tokens": 3}, {"index": "tree"}, {"eviction": "lfu"}, {"window": -1}, {"local": -1}],
    ids=str,
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ConfigError):
        KVDrive(**wrong)


def test_as_published():
    assert KVDrive.paper(0.1, window=3) == KVDrive(0.1, index="clusters", exact_from=1, window=3)


def test_by_name():
    assert make_method("kv_drive:budget=0.1:index=chunk_means") == KVDrive(budget=0.1, index="chunk_means")


# --- faults


@pytest.mark.parametrize("kind", ["damaged", "lost"])
def test_a_chunk_that_cannot_be_read_while_decoding_ends_in_an_error_that_loses_nothing(kind, model, tmp_path):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, METHOD)
        (row,) = store.segments()
        reader, path = store._storage.disk.reader(row.id), store._storage.disk.path(row.id)
        so_far = []

        class Damage(StoppingCriteria):
            """Behind the third token."""

            def __call__(self, input_ids, scores, **kwargs):
                so_far[:] = [input_ids.clone()]
                if input_ids.shape[1] == TOKENS + 24 + 3:
                    with open(path, "r+b") as file:
                        if kind == "lost":
                            file.truncate(reader.header.blocks.offset)
                        else:
                            file.seek(reader.header.blocks.offset)
                            file.write(b"\xa5" * reader.shape.blocks_bytes)
                return torch.zeros(len(input_ids), dtype=torch.bool)

        cache = TieredCache(model, store, method=KVDrive(budget=0.2, local=16, window=1, index="random"), record=False)
        with pytest.raises(LostKVError, match="new TieredCache"):
            model.generate(question(ids), past_key_values=cache, stopping_criteria=[Damage()], **GREEDY)
        assert cache.stats.details.verification_failures + cache.stats.details.read_errors > 0
        assert cache.get_seq_length() == so_far[0].shape[1] - 1  # the pass is undone
        second_cache = TieredCache(model, store, method=METHOD)
        options = {"do_sample": False, "max_new_tokens": 4}
        output = model.generate(so_far[0], past_key_values=second_cache, **options)
        assert second_cache.stats.tokens_restored < TOKENS
        assert torch.equal(output, model.generate(so_far[0], past_key_values=DynamicCache(), **options))


def test_another_process_builds_no_index(model, tmp_path, monkeypatch):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        fill(store, model, ids, METHOD)
        expected, first = ask(model, store, question(ids), METHOD)
    monkeypatch.setattr(DECODE_INDEXES[METHOD.index], "build", None)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        output, cache = ask(model, store, question(ids), METHOD)
        assert_same(output, expected)
        assert cache.stats.details.index_seconds == 0 < first.stats.details.index_seconds
        assert cache.stats.details.bytes_identifying == store.stats.index.bytes < first.stats.details.bytes_identifying
        (sidecar,) = (tmp_path / "beside").iterdir()
        sidecar.write_bytes(bytes(64) + sidecar.read_bytes()[64:])
    monkeypatch.undo()
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:  # what is damaged is made again
        assert_same(ask(model, store, question(ids), METHOD)[0], expected)


# --- caches that go ways of their own


def logits_of(model, cache, tokens):
    """Return the logits after each of `tokens`, int64 `[1, n]`, fed one by one: `[tokens, vocabulary]`."""
    with torch.no_grad():
        return torch.cat([model(input_ids=token, past_key_values=cache).logits[0] for token in tokens.split(1, dim=1)])


def begun(model, store, ids):
    """Return a cache that has answered the question's first token."""
    cache = TieredCache(model, store, method=METHOD, record=False)
    with torch.no_grad():
        model(input_ids=question(ids), past_key_values=cache, logits_to_keep=1)
    logits_of(model, cache, prompt(3, seed=7))
    return cache


def test_forks_choose_for_themselves(model, tmp_path):
    ids, ways = prompt(TOKENS), [prompt(12, seed=seed) for seed in (11, 12)]
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        alone = [logits_of(model, begun(model, store, ids), way) for way in ways]
        cache = begun(model, store, ids)
        twins = [cache, cache.fork()]
        together = [
            torch.cat(token_logits)
            for token_logits in zip(
                *([logits_of(model, t, w[:, i : i + 1]) for t, w in zip(twins, ways, strict=True)] for i in range(12)),
                strict=True,
            )
        ]
    for logits, expected in zip(together, alone, strict=True):
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("new_buffer", [False, True], ids=["the same buffer", "another buffer"])
def test_a_pass_that_fails_late_changes_nothing(new_buffer, model, tmp_path, monkeypatch):
    last = model.config.num_hidden_layers - 1

    def interrupted(self, layer, *args, real=DecodeSelection.reselect):
        real(self, layer, *args)
        if layer == last:
            raise KeyboardInterrupt

    twins = []
    ids, way = prompt(TOKENS), prompt(12, seed=11)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        expected = logits_of(model, begun(model, store, ids), way)
        cache, logits = begun(model, store, ids), []
        for number, token in enumerate(way.split(1, dim=1)):
            if number % 3 == 0:
                twins.extend([cache.fork()] * new_buffer)  # shares the buffer, so that the pass makes one of its own
                monkeypatch.setattr(DecodeSelection, "reselect", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    logits_of(model, cache, prompt(1, seed=20 + number))
                monkeypatch.undo()
            logits.append(logits_of(model, cache, token))
    torch.testing.assert_close(torch.cat(logits), expected, rtol=0, atol=1e-4)  # columns stand in another order


def test_an_index_that_left_memory_comes_from_its_file_again(model, tmp_path, monkeypatch):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        expected, _ = ask(model, store, question(ids), METHOD)
        store.flush()
        resident, sidecars = store._storage.residency.index_cache, store._storage.disk.sidecars
        reads = []
        monkeypatch.setattr(sidecars, "kept", lambda *args, real=sidecars.kept: reads.append(1) or real(*args))
        monkeypatch.setattr(DECODE_INDEXES[METHOD.index], "build", None)
        get = resident.get
        monkeypatch.setattr(resident, "get", lambda key, device: get(key, device) if key[0][0][1] == 0 else None)
        assert_same(ask(model, store, question(ids), METHOD)[0], expected)
        assert len(reads) == 1


# --- computed tokens far behind


@pytest.fixture
def early(monkeypatch):
    """Let computed tokens leave the columns early."""
    for module in (grown, window):
        monkeypatch.setattr(module, "INDEXED_TOKENS", 32)


def attended(model, store, ids, method, new):
    """Record what a cache's layers attend to at each step: a prompt, and `new` tokens one by one."""
    cache, widths = TieredCache(model, store, method=method, record=False), []
    with torch.no_grad():
        logits = [model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]]
        for token in new.split(1, dim=1):
            logits.append(model(input_ids=token, past_key_values=cache).logits[0, -1])
            widths.append(cache.layers[0].held)
    return torch.stack(logits), widths, cache


def test_computed_tokens_far_behind_leave_the_columns(early, model, tmp_path):
    ids, new = prompt(TOKENS), prompt(150, seed=8)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        _, widths, cache = attended(model, store, question(ids), METHOD, new)
    budget = METHOD.token_budget(TOKENS)
    assert cache.get_seq_length() == TOKENS + 24 + 150 and max(widths) <= budget + 16 + 32 + 1
    assert cache.layers[0]._rows[0].offloaded.keys.shape[1] == (24 + 150 - 16) // 32 * 32 // 8


@pytest.mark.parametrize("family", some(["qwen2", "gemma3", "phi3"]))
def test_what_has_left_comes_back_as_it_was(family, early, tmp_path, steps):
    model, ids, new = build(family), prompt(96), prompt(120, seed=8)
    few = KVDrive(budget=0.5, local=8, index="chunk_means", window=1)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, few)
        attended(model, store, question(ids), few, new)
    budget, first, came = few.token_budget(96), 96 // 8, 0
    span = few.selector().span(96, budget)
    own = {layer: [] for layer, *_ in steps}  # of each step the first computed token in its columns, and those columns
    for layer, (row,), _, keys, _ in steps:
        tail = keys[0, :, budget:]
        own[layer].append((24 + 1 + len(own[layer]) - tail.shape[1], tail))
        for head, chunks in enumerate(row):
            for column, chunk in enumerate(chunks.tolist()):
                if chunk >= first:
                    token, at = (chunk - first) * 8, span.first + column * 8
                    start, columns = next((n, t) for n, t in own[layer] if n <= token and token + 8 <= n + t.shape[1])
                    expected = columns[head, token - start : token - start + 8]
                    torch.testing.assert_close(keys[0, head, at : at + 8], expected, rtol=0, atol=0)
                    came += 1
    assert came


def test_twins_batches_and_beams_grow(early, model, tmp_path):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        rows = question(ids).repeat(2, 1)
        kwargs = {"do_sample": False, "max_new_tokens": 36}
        cache = TieredCache(model, store, method=METHOD, record=False)
        outputs = model.generate(rows, past_key_values=cache, **kwargs)
        assert cache.layers[0]._rows[0].offloaded is not None
        cache = TieredCache(model, store, method=METHOD, record=False)
        single = model.generate(question(ids), past_key_values=cache, **kwargs)
        assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[:1], single)
        caches = [TieredCache(model, store, method=METHOD, record=False) for _ in range(2)]
        beam_outputs = [model.generate(question(ids), past_key_values=beams, num_beams=2, **kwargs) for beams in caches]
        assert torch.equal(*beam_outputs) and beam_outputs[0].shape == single.shape


@pytest.mark.parametrize("when", some([33, 40]))
def test_an_interrupt_around_growing_changes_nothing(when, early, model, tmp_path, monkeypatch):
    ids, way = prompt(TOKENS), prompt(60, seed=11)
    last = model.config.num_hidden_layers - 1
    struck = []

    def interrupted(self, layer, *args, real=DecodeSelection.reselect):
        real(self, layer, *args)
        if layer == last and not struck and cache.get_seq_length() >= TOKENS + 24 + when:
            struck.append(layer)
            raise KeyboardInterrupt

    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        expected, _, cache = attended(model, store, question(ids), METHOD, way)
        monkeypatch.setattr(DecodeSelection, "reselect", interrupted)
        cache = TieredCache(model, store, method=METHOD, record=False)
        with torch.no_grad():
            logits = [model(input_ids=question(ids), past_key_values=cache, logits_to_keep=1).logits[0, -1]]
            for token in way.split(1, dim=1):
                try:
                    output = model(input_ids=token, past_key_values=cache)
                except KeyboardInterrupt:
                    output = model(input_ids=token, past_key_values=cache)
                logits.append(output.logits[0, -1])
    assert struck
    torch.testing.assert_close(torch.stack(logits), expected, rtol=0, atol=1e-4)


def test_a_conversation_goes_on_in_the_cache_and_out_of_the_store(model, tmp_path):
    """What was answered behind a choice is in no store: another process computes it, and nothing before it, again."""
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix") as store:
        fill(store, model, ids, METHOD)
        answered, cache = ask(model, store, question(ids), METHOD)
        next_ids = torch.cat([answered.sequences, prompt(9, seed=6)], dim=1)
        model.generate(next_ids, past_key_values=cache, **GREEDY)
        assert cache.stats.details.tokens_kept == answered.sequences.shape[1] - 1
    with KVStore(tmp_path, engine="posix") as store:
        _, newer = ask(model, store, next_ids, METHOD)
        assert newer.stats.tokens_restored == TOKENS
        assert newer.stats.tokens_computed == next_ids.shape[1] - TOKENS + answered.sequences.shape[1] - TOKENS - 24 - 1


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_chunks_of_all_heads_are_rows_of_one_matrix(size):
    """Any buffer moves whole chunks, whatever its size."""
    buffer = KVBuffer()
    for count in (101, 7, 350):
        buffer.extend(torch.empty(2, 3, 1, 5), torch.empty(2, 3, 1, 8), count)
        for view in buffer._views():
            view.copy_(torch.arange(view.numel()).view(view.shape))
            span = Span(tokens=1000, first=16, last=21, chunks=64 // size, chunk_tokens=size)
            rows, apart = decode._chunk_rows(view[1], span.first, span.chunks, size)
            for head in range(3):
                for chunk in range(span.chunks):
                    first = span.first + chunk * size
                    expected = view[1, head, first : first + size].flatten()
                    assert rows[head * apart + chunk].tolist() == expected.tolist()
