"""Prompts that are computed in pieces: the KV and the tokens of computing them at once, in a part of the memory."""

from __future__ import annotations

import os

import pytest
import torch
from families import build, build_deep, prompt
from hypothesis import given
from hypothesis import strategies as st
from planted_device import on_device
from test_kv_drive import exact_kv, tokens_in
from thorough import some
from transformers import DynamicCache

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.layers.buffer import KVBuffer
from hf_tiered_cache.methods import ContiguousKV, KVDrive
from hf_tiered_cache.selection import streamed as partial_attention
from hf_tiered_cache.selection.decode import DecodeSelection
from hf_tiered_cache.selection.streamed import StreamedPrefix

FAMILY = "qwen2"

TOKENS, PIECE = 700, 128
METHOD = KVDrive(budget=0.2, local=16, prefill_tokens=PIECE, exact_from=16, observed=16)
NEW = 6
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
FAMILIES = [
    "llama",
    "qwen2",
    "qwen2_sliding",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "gemma3",
    "granite",
    "smollm3",
    "glm4",
]


@pytest.fixture
def pieces(monkeypatch):
    """Return the number of columns of each pass that ran attention over a streamed prefix, at the first such layer."""
    lengths = []

    def attend(self, layer, call, *args, real=StreamedPrefix.attend):
        if layer == self._layers[0]:
            lengths.append(call.query.shape[2])
        return real(self, layer, call, *args)

    monkeypatch.setattr(StreamedPrefix, "attend", attend)
    return lengths


def ask(model, store, ids, method=METHOD, cache=None, **kwargs):
    cache = cache or TieredCache(model, store, method=method, progress=False)
    return model.generate(ids, past_key_values=cache, **{**GREEDY, **kwargs}), cache


def close(logits, expected):
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", some(FAMILIES))
@pytest.mark.thin(2)
def test_the_prompt_is_computed_as_at_once(family, tmp_path, pieces):
    model, ids = build(family), prompt(TOKENS)
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **GREEDY)
    with KVStore(tmp_path, engine="posix") as store:
        output, cache = ask(model, store, ids)
        close(output.logits[0], expected.logits[0])
        assert pieces == [128, 128, 128, 128, 60]
        assert cache.stats.tokens_computed == TOKENS + NEW - 1 and cache.stats.tokens_restored == 0
        assert cache.stats.tokens_stored == TOKENS // 16 * 16
        second_answer, exact = ask(model, store, ids, method=None)  # whoever comes next finds KV like any other
        assert exact.stats.tokens_restored == TOKENS // 16 * 16
    for logits, expected_logits in zip(second_answer.logits, expected.logits, strict=True):
        close(logits, expected_logits)


def test_a_model_without_full_attention_computes_pieces_as_at_once(tmp_path):
    model, ids = build("mistral"), prompt(TOKENS)
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **GREEDY)
    with KVStore(tmp_path, engine="posix") as store:
        for restored in (0, TOKENS // 16 * 16):
            output, cache = ask(model, store, ids)
            assert cache.stats.tokens_restored == restored
            for logits, expected_logits in zip(output.logits, expected.logits, strict=True):
                close(logits, expected_logits)


@pytest.mark.parametrize("exact_from", [0, 112, 500])
def test_the_last_piece_is_exact_however_short(exact_from, model, tmp_path, pieces):
    ids = prompt(TOKENS)
    expected = model.generate(ids, past_key_values=DynamicCache(), **GREEDY)
    with KVStore(tmp_path, engine="posix") as store:
        output, cache = ask(model, store, ids, KVDrive(0.2, local=16, prefill_tokens=PIECE, exact_from=exact_from))
    close(output.logits[0], expected.logits[0])
    assert pieces == [128, 128, 128, 112, 76]
    assert cache.stats.tokens_stored == TOKENS // 16 * 16


def test_later_tokens_attend_to_what_their_windows_say(model, tmp_path, monkeypatch):
    ids, steps = prompt(TOKENS), []
    kv = exact_kv(model, ids)

    def reselect(self, layer, rows, query, keys, *args, real=DecodeSelection.reselect):
        real(self, layer, rows, query, keys, *args)
        steps.append((layer, rows[0].window.columns, keys.clone()))

    monkeypatch.setattr(DecodeSelection, "reselect", reselect)
    with KVStore(tmp_path, engine="posix") as store:
        ask(model, store, ids)
    before = TOKENS - 60
    assert len(steps) == (NEW - 1) * model.config.num_hidden_layers
    for layer, columns, keys in steps:
        selected_tokens = tokens_in(columns, METHOD, before)
        for head, tokens in enumerate(selected_tokens):
            expected = kv[layer][0][0, head, [*tokens, *range(before, TOKENS)]]
            close(keys[0, head, : len(expected)], expected)


def test_a_whole_budget_holds_the_whole_prompt(model, tmp_path, pieces):
    with KVStore(tmp_path, engine="posix") as store:
        ask(model, store, prompt(TOKENS), KVDrive(budget=1.0, prefill_tokens=PIECE))
    assert not pieces


def test_memory_holds_a_piece(model, tmp_path, monkeypatch):
    """Memory also holds the budget with room to grow, but not the prompt."""
    most = []

    def extend(self, *args, real=KVBuffer.extend):
        views = real(self, *args)
        most.append(self._keys.shape[2])
        return views

    monkeypatch.setattr(KVBuffer, "extend", extend)
    with KVStore(tmp_path, engine="posix", host_memory="1MiB") as store:
        _, cache = ask(
            model, store, prompt(TOKENS), KVDrive(budget=0.05, local=16, prefill_tokens=PIECE, exact_from=16)
        )
        assert cache.get_seq_length() == TOKENS + NEW - 1
        assert store.stats.host.bytes <= 1 << 20
    assert max(most) <= 2 * (PIECE + 64)


def test_rows_of_other_lengths(model, tmp_path, pieces):
    long, short = prompt(TOKENS), prompt(TOKENS - 111, seed=3)
    rows = torch.zeros(2, TOKENS, dtype=torch.int64)
    rows[0], rows[1, 111:] = long[0], short[0]
    mask = torch.ones_like(rows)
    mask[1, :111] = 0
    expected = model.generate(rows, attention_mask=mask, past_key_values=DynamicCache(), **GREEDY)
    with KVStore(tmp_path, engine="posix") as store:
        output, cache = ask(model, store, rows, attention_mask=mask)
        close(output.logits[0], expected.logits[0])
        assert len(pieces) >= 4
        num_computed = cache.stats.tokens_computed - (2 * (TOKENS + NEW - 1) - 111)
        assert 0 <= num_computed <= 2 * 15 * len(pieces)  # rows begin with other parts of 16 tokens
        for ids in (long, short):
            _, exact = ask(model, store, ids, method=None)
            assert exact.stats.tokens_restored >= ids.shape[1] // 16 * 16 - 16


def test_beams_begin_from_the_same_pieces(model, tmp_path):
    ids, kwargs = prompt(TOKENS), {"do_sample": False, "max_new_tokens": 1, "num_beams": 3}
    with KVStore(tmp_path, engine="posix") as store:
        cache = TieredCache(model, store, method=METHOD, progress=False)
        output = model.generate(ids, past_key_values=cache, **kwargs)
    assert torch.equal(output, model.generate(ids, past_key_values=DynamicCache(), **kwargs))


def test_other_methods_stream_too(model, tmp_path, pieces):
    """The question has many tokens after a stored prompt."""

    class Streaming(ContiguousKV):
        exact_from, observed = 16, 16

    ids, longer_ids = prompt(TOKENS), torch.cat([prompt(TOKENS), prompt(40, seed=5)], dim=1)
    expected = model.generate(longer_ids, past_key_values=DynamicCache(), **GREEDY)
    with KVStore(tmp_path, engine="posix") as store:
        ask(model, store, ids, method=None)
        output, _ = ask(model, store, longer_ids, Streaming(0.2, period=2))
    assert pieces == [52]
    close(output.logits[0], expected.logits[0])


def test_short_questions_choose(model, tmp_path, pieces):
    with KVStore(tmp_path, engine="posix") as store:
        ask(model, store, prompt(TOKENS))
        pieces.clear()
        _, cache = ask(model, store, torch.cat([prompt(TOKENS)[:, :688], prompt(15, seed=5)], dim=1))
    assert not pieces and cache.stats.tokens_attended < cache.stats.tokens_restored == 688


def test_a_second_request_computes_no_piece_again(model, tmp_path, pieces):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix") as store:
        ask(model, store, ids[:, :400])
    pieces.clear()
    with KVStore(tmp_path, engine="posix") as store:
        expected = model.generate(ids, past_key_values=DynamicCache(), **GREEDY)
        output, cache = ask(model, store, ids)
        close(output.logits[0], expected.logits[0])
        assert cache.stats.tokens_restored == 400 and cache.stats.tokens_computed == 300 + NEW - 1
        assert pieces == [128, 128, 44]


@pytest.mark.parametrize("option", [{"restore": False}, {"record": False}], ids=str)
def test_what_is_not_stored_is_computed_at_once(option, model, tmp_path, pieces):
    ids = prompt(TOKENS)
    expected = model.generate(ids, past_key_values=DynamicCache(), **GREEDY)
    with KVStore(tmp_path, engine="posix") as store:
        output, _ = ask(model, store, ids, cache=TieredCache(model, store, method=METHOD, **option))
    assert not pieces and torch.equal(output.sequences, expected.sequences)


def test_all_logits_at_once(model, tmp_path, pieces):
    ids = prompt(TOKENS)
    with KVStore(tmp_path, engine="posix") as store, torch.no_grad():
        logits = model(input_ids=ids, past_key_values=TieredCache(model, store, method=METHOD)).logits
        assert not pieces and torch.equal(logits, model(input_ids=ids, past_key_values=DynamicCache()).logits)


def test_frequencies_that_depend_on_the_length_are_those_of_the_whole(tmp_path, pieces):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model, ids = build("llama", rope_parameters=rope), prompt(TOKENS)
    expected = model.generate(ids, past_key_values=DynamicCache(), **GREEDY)
    with KVStore(tmp_path, engine="posix") as store:
        output, _ = ask(model, store, ids)
    assert not pieces
    close(output.logits[0], expected.logits[0])


# --- faults


def test_a_store_without_room(tmp_path, caplog):
    model = build_deep("qwen2")
    ids = prompt(TOKENS)
    expected = model.generate(ids, past_key_values=DynamicCache(), **GREEDY)
    with KVStore(tmp_path, engine="posix", disk_quota="1MiB") as store:
        output, cache = ask(model, store, ids)
        close(output.logits[0], expected.logits[0])
        assert "quota" in cache.stats.reason or "room" in cache.stats.reason


@pytest.mark.parametrize("piece_index", [0, 2])
def test_a_piece_that_is_lost_under_way_is_computed_again(piece_index, tmp_path, monkeypatch):
    model = build_deep("qwen2")
    ids, lost_ids = prompt(TOKENS), []
    expected = model.generate(ids, past_key_values=DynamicCache(), **GREEDY)

    def attend(self, layer, query, *args, real=StreamedPrefix.attend):
        if not lost_ids and len(self._runs[0][1].row.group.pieces) == 4 and layer == 3:
            piece = self._runs[0][1].row.group.pieces[piece_index]
            lost_ids.append(piece.reader.id)
            path = store._storage.disk.path(piece.reader.id)
            mtime = path.stat().st_mtime_ns
            with open(path, "r+b") as file:
                file.seek(piece.reader.header.blocks.offset)
                file.write(b"\xa5" * piece.reader.shape.blocks_bytes)
            os.utime(path, ns=(mtime, mtime))  # as by a disk that decays, not by a program
        return real(self, layer, query, *args)

    monkeypatch.setattr(StreamedPrefix, "attend", attend)
    with KVStore(tmp_path, engine="posix", host_memory=0) as store:
        output, cache = ask(model, store, ids)
        # anew
        assert lost_ids and cache.stats.details.recomputed == 1 and lost_ids[0] in {row.id for row in store.segments()}
    close(output.logits[0], expected.logits[0])


def test_an_interrupt_loses_no_piece(tmp_path, monkeypatch):
    model = build_deep("qwen2")
    ids, passes = prompt(TOKENS), []

    def attend(self, layer, query, *args, real=StreamedPrefix.attend):
        passes.append(layer)
        if len(passes) == 9:
            raise KeyboardInterrupt
        return real(self, layer, query, *args)

    monkeypatch.setattr(StreamedPrefix, "attend", attend)
    with KVStore(tmp_path, engine="posix") as store:
        cache = TieredCache(model, store, method=METHOD, progress=False)
        with pytest.raises(KeyboardInterrupt):
            ask(model, store, ids, cache=cache)
        assert cache.get_seq_length() == 0
        output, _ = ask(model, store, ids, cache=cache)
        assert cache.stats.tokens_restored == 2 * PIECE
    close(output.logits[0], model.generate(ids, past_key_values=DynamicCache(), **GREEDY).logits[0])


@pytest.mark.parametrize(
    "wrong",
    [{"prefill_tokens": -16}, {"prefill_tokens": 100}, {"prefill_tokens": 32}, {"exact_from": -1}, {"observed": 0}],
    ids=str,
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ConfigError):
        KVDrive(**wrong)


def test_the_bar(model, tmp_path, capfd):
    with KVStore(tmp_path, engine="posix") as store:
        ask(model, store, prompt(TOKENS), cache=TieredCache(model, store, method=METHOD))
    assert f"{TOKENS}/{TOKENS}" in capfd.readouterr().err


# --- attention in parts


@given(
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    dims=st.sampled_from([(16, 16), (24, 8), (5, 5)]),
    queries=st.integers(1, 20),
    cuts=st.lists(st.integers(1, 30), min_size=0, max_size=4),
    masked=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1 << 20),
)
def test_parts_make_the_whole(heads, dims, queries, cuts, masked, dtype, seed):
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=random).to(dtype)

    query = draw(2, heads[0], queries, dims[0])
    keys, values = (draw(2, heads[1], queries + sum(cuts), dim) for dim in dims)
    causal = torch.ones(queries, queries, dtype=torch.bool).tril()
    mask = causal.expand(2, 1, -1, -1) if masked else None
    partial = partial_attention.attention(
        query, keys[:, :, :queries], values[:, :, :queries], None, mask, causal=not masked and queries > 1
    )
    at = queries
    for count in cuts:
        for row in range(2):
            rows = slice(row, row + 1)
            run = slice(at, at + count)
            partial.join(rows, partial_attention.attention(query[rows], keys[rows, :, run], values[rows, :, run], None))
        at += count
    full_mask = torch.cat([causal, torch.ones(queries, sum(cuts), dtype=torch.bool)], 1)
    wide = (t.float().repeat_interleave(heads[0] // heads[1], 1) for t in (keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(query.float(), *wide, attn_mask=full_mask)
    torch.testing.assert_close(partial.output, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "plain"])
def test_the_gpu_says_which_kernel_it_has(kernel, monkeypatch):
    """A GPU of capability 7.5 has no flash attention, and none for bfloat16, in any build of PyTorch."""
    kernels_run, query = [], torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *args: args)
    for name in ("flash", "efficient"):

        def run(query, *args, name=name, **settings):
            kernels_run.append(name)
            return query, query[..., 0]

        monkeypatch.setattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention", run)
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", lambda params, name=name: name == kernel)
    partial_attention.attention(*[on_device(query)] * 3, None)
    assert kernels_run == ([] if kernel == "plain" else [kernel])


@pytest.mark.parametrize("masked", [False, True])
def test_plain_arithmetic_is_the_kernel(masked, monkeypatch):
    monkeypatch.setattr(partial_attention, "_LARGEST", 100)
    query, keys, values = torch.randn(3, 2, 4, 33, 16)
    mask = torch.zeros(1, 1, 33, 33).masked_fill_(torch.rand(33, 33).tril() + torch.eye(33) <= 0.3, -torch.inf)
    arguments = query, keys, values, 0.25, mask if masked else None, not masked
    plain, kernel = partial_attention._plain_attention(*arguments), partial_attention.attention(*arguments)
    torch.testing.assert_close(plain.output, kernel.output, rtol=0, atol=1e-5)
    torch.testing.assert_close(plain.log_total, kernel.log_total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 16])
def test_a_row_may_begin_after_the_first_chunk(model, store, chunk):
    """generate(prefill_chunk_size=...) passes its padding first, and its mask shows more of it in each chunk."""
    ids = torch.cat([prompt(52), torch.nn.functional.pad(prompt(20, seed=2), (32, 0))])
    arguments = {**GREEDY, "attention_mask": (ids > 0).long(), "prefill_chunk_size": chunk}
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **arguments)
    for stored_tokens in (48 + 16, 0):
        output, cache = ask(model, store, ids, method=None, **arguments)
        assert torch.equal(output.sequences, expected.sequences)
        close(output.logits[0], expected.logits[0])
        assert cache.stats.tokens_restored + cache.stats.tokens_computed == 52 + 20 + 2 * (NEW - 1)
        assert (cache.stats.tokens_restored > 0) == (chunk > 1 and not stored_tokens)
        cache.store_now()
        assert cache.stats.tokens_stored >= stored_tokens
        store.flush()
    for row, tokens in ((ids[:1], 48), (ids[1:, 32:], 16)):
        assert ask(model, store, row, method=None)[1].stats.tokens_restored == tokens
