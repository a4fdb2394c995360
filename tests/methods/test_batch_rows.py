"""Batches within a budget: each row restores, selects and answers as it does alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import attend_by_another_name, build, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_same
from test_selective import fill
from thorough import pairs

from eval.baselines import H2O
from hf_tiered_cache import KVStore, TieredCache, detach
from hf_tiered_cache.errors import CacheMismatchError
from hf_tiered_cache.methods import ContiguousKV, Impress, KVDrive
from hf_tiered_cache.selection import held, window

NEW = 5
GREEDY_LOGITS = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
CONTIGUOUS = ContiguousKV(budget=0.25, reorder=False)
KV_DRIVE = KVDrive(budget=0.1, local=16, exact_from=0)
METHODS = {
    "contiguous_kv": CONTIGUOUS,
    "contiguous_kv once": replace(CONTIGUOUS, reselect=False),
    "contiguous_kv paper": ContiguousKV.paper(period=2),
    "contiguous_kv keys": replace(CONTIGUOUS, identify="keys", gain=0.0, queries=0),
    "impress": Impress(budget=0.25, probe_heads=2, reorder=False),
    "impress by head": Impress(budget=0.25, probe_heads=2, alpha=0, reorder=False),
    "h2o": H2O(budget=0.25),
    "h2o again": H2O(budget=0.25, reselect=True),
    "kv_drive": KV_DRIVE,
    "kv_drive paper": KVDrive.paper(0.1, local=16),
    "kv_drive some stream": replace(KV_DRIVE, exact_from=24, observed=8),
    "kv_drive one size": replace(KV_DRIVE, window=1, index="page_bounds"),
}
FAMILIES = ["llama", "gemma3", "qwen2_sliding", "phi3", "gpt_neox", "opt", "smollm3", "gemma2", "gpt_oss"]

row_of_batch = st.tuples(st.integers(0, 3), st.integers(0, 260), st.integers(1, 60))
"""Number of a stored prefix, how many of its tokens the row begins with, and new tokens after them."""
PREFIXES = [prompt(260, seed=seed) for seed in (11, 12, 13)] + [prompt(40, seed=14)]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Return a function that returns a model and a store with its prefixes, in the geometry of a method."""
    stores = {}

    def filled(family, method):
        key = family, method.geometry
        if key not in stores:
            model = build(family, **{"init_std" if family == "opt" else "initializer_range": 0.1})
            store = KVStore(tmp_path_factory.mktemp("rows"), engine="posix")
            for prefix in PREFIXES:
                fill(store, model, prefix, method)
            stores[key] = model, store
        return stores[key]

    yield filled
    for _, store in stores.values():
        store.close()


def tokens_of(row, number):
    """Return the tokens of a row, int64 `[1, tokens]`."""
    prefix, shared, new = row
    return torch.cat([PREFIXES[prefix][:, :shared], prompt(new, seed=100 + number)], dim=1)


def padded(rows):
    """Return ids and mask of a left-padded batch."""
    width = max(row.shape[1] for row in rows)
    pads = [width - row.shape[1] for row in rows]
    ids = torch.cat([torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)])
    return ids, (torch.arange(width) >= torch.tensor(pads)[:, None]).long()


def answer(model, store, method, ids, mask=None, new=NEW):
    """Return the logits of each generated token, `[new, rows, vocabulary]`, the tokens, and the cache."""
    cache = TieredCache(model, store, method=method, record=False, progress=False)
    mask = torch.ones_like(ids) if mask is None else mask
    length = {"min_new_tokens": new, "max_new_tokens": new}
    output = model.generate(ids, attention_mask=mask, past_key_values=cache, **length, **GREEDY_LOGITS)
    return torch.stack(output.logits), output.sequences[:, ids.shape[1] :], cache


def assert_rows_as_alone(model, store, method, rows, new=NEW):
    """Compare a batch with its rows alone: tokens, logits, and what was restored and attended to."""
    logits, tokens, together = answer(model, store, method, *padded(rows), new=new)
    tokens_restored, attended, selects = 0, 0, False
    for number, row in enumerate(rows):
        row_logits, row_tokens, alone = answer(model, store, method, row, new=new)
        torch.testing.assert_close(logits[:, number], row_logits[:, 0], rtol=0, atol=1e-4)
        assert tokens[number].tolist() == row_tokens[0].tolist()
        tokens_restored += alone.stats.tokens_restored
        attended += alone.stats.tokens_attended
        selects |= method.held_tokens(alone.stats.tokens_restored) < alone.stats.tokens_restored
    if selects:  # otherwise all is exact, and the batch restores what all rows can restore
        assert together.stats.tokens_restored == tokens_restored
        assert together.stats.tokens_attended == attended
    return together


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=settings.default.max_examples // 8)
@given(rows=st.lists(row_of_batch, min_size=2, max_size=4))
@pytest.mark.thin(2)
def test_rows_drawn(name, stores, rows):
    model, store = stores("qwen2", METHODS[name])
    assert_rows_as_alone(model, store, METHODS[name], [tokens_of(row, i) for i, row in enumerate(rows)])


ROWS = [(0, 250, 20), (1, 130, 9), (2, 0, 70), (0, 90, 50), (3, 40, 3)]


@pytest.mark.parametrize(("family", "name"), pairs(FAMILIES, ["contiguous_kv", "kv_drive", "kv_drive some stream"]))
@pytest.mark.thin(2)
def test_rows_of_every_family(family, name, stores):
    model, store = stores(family, METHODS[name])
    cache = assert_rows_as_alone(model, store, METHODS[name], [tokens_of(row, i) for i, row in enumerate(ROWS)])
    assert cache.stats.tokens_restored > 300


@pytest.mark.parametrize("name", ["contiguous_kv", "contiguous_kv once", "kv_drive", "kv_drive some stream"])
def test_entries_without_content_are_finite(name, stores, monkeypatch):
    """A masked entry has weight zero, but zero times NaN is NaN. Uninitialised memory may hold NaN."""

    def empty(*args, real=torch.empty, **more):
        tensor = real(*args, **more)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    model, store = stores("qwen2", METHODS[name])
    monkeypatch.setattr(torch, "empty", empty)
    assert_rows_as_alone(model, store, METHODS[name], [tokens_of(row, i) for i, row in enumerate(ROWS)])


@pytest.mark.parametrize("name", METHODS)
def test_a_row_without_a_token_changes_no_other(name, stores):
    """A tokenizer without a first token returns such a row for an empty prompt."""
    model, store = stores("qwen2", METHODS[name])
    row = tokens_of((0, 200, 20), 0)
    logits, tokens, cache = answer(model, store, METHODS[name], *padded([row, row[:, :0]]))
    row_logits, row_tokens, _ = answer(model, store, METHODS[name], row)
    torch.testing.assert_close(logits[:, :1], row_logits, rtol=0, atol=1e-4)
    assert tokens[0].tolist() == row_tokens[0].tolist()
    assert cache.stats.tokens_restored >= 192


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_equal_counts_need_no_mask(name, stores):
    """The model's mask also hides the missing entries of shorter rows that hold all of their tokens."""
    model, store = stores("qwen2", METHODS[name])
    rows = [tokens_of((number, 128, 20), number) for number in range(2)] + [tokens_of((3, 0, 12), 2)]
    cache = assert_rows_as_alone(model, store, METHODS[name], rows)
    assert not any(layer.unused for layer in cache.layers)


@torch.no_grad()
@pytest.mark.parametrize("name", METHODS)
def test_rows_of_equal_length_need_no_padding_mask(name, stores):
    """The rows have different numbers of stored tokens, and the caller passes no mask."""
    model, store = stores("qwen2", METHODS[name])
    ids = torch.cat([tokens_of(row, i) for i, row in enumerate([(0, 200, 20), (1, 90, 130), (2, 0, 220)])])
    new = prompt(1, seed=40, rows=3)
    logits = []
    for rows in (slice(0, 3), slice(0, 1), slice(1, 2), slice(2, 3)):
        cache = TieredCache(model, store, method=METHODS[name], record=False)
        passes = [ids[rows], new[rows], new[rows]]
        logits.append([model(input_ids=i, past_key_values=cache, logits_to_keep=1).logits for i in passes])
    for together, *alone in zip(*logits, strict=True):
        torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-4)


def next_pass(cache, ids, pads):
    """Return the arguments of one more pass over rows with this left padding."""
    stop = cache.get_seq_length() + ids.shape[1]
    mask = (torch.arange(stop) >= torch.tensor(pads)[:, None]).long()
    positions = torch.arange(stop - ids.shape[1], stop) - torch.tensor(pads)[:, None]
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}


@torch.no_grad()
def continued(model, cache, ids, pads):
    """Return the logits of one more pass, `[rows, tokens, vocabulary]`."""
    return model(**next_pass(cache, ids, pads)).logits


def within(model, arguments):
    """Run a pass through the module within the model."""
    return model.lm_head(model.model(**arguments).last_hidden_state)


def detached(model, arguments):
    detach(model)
    return model(**arguments).logits


def with_other_attention(model, arguments):
    attend_by_another_name(model)
    return model(**arguments).logits


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("way", [within, detached, with_other_attention])
@pytest.mark.parametrize("family", ["llama", "qwen2_sliding"])
@pytest.mark.thin(2)
def test_a_pass_whose_mask_fits_not_all_rows_is_refused(family, way, tokens, store):
    """Only the registered attention function masks what rows of unlike counts lack."""
    model, method = build(family, initializer_range=0.1), METHODS["contiguous_kv once"]
    for prefix in PREFIXES:
        fill(store, model, prefix, method)
    unlike = [(0, 250, 20), (1, 130, 9), (2, 0, 70)]
    alike = [(0, 128, 20), (1, 128, 20)]
    for rows in (alike, unlike):
        ids, mask = padded([tokens_of(row, i) for i, row in enumerate(rows)])
        cache = answer(model, store, method, ids, mask)[2]
        assert any(layer.unused for layer in cache.layers) == (rows is unlike)
        pads, more = (ids.shape[1] - mask.sum(1)).tolist(), prompt(tokens, seed=9, rows=len(rows))
        twin, length = cache.fork(), cache.get_seq_length()
        expected = continued(model, cache.fork(), more, pads)
        if rows is unlike:
            with pytest.raises(CacheMismatchError, match=r"call the model itself .* create a new TieredCache"):
                way(model, next_pass(twin, more, pads))
            assert twin.get_seq_length() == length
        elif way is not with_other_attention:
            torch.testing.assert_close(way(model, next_pass(twin, more, pads)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["contiguous_kv", "impress", "h2o again", "kv_drive"])
@pytest.mark.thin(2)
def test_rows_go_on_as_alone(name, stores):
    """This covers several tokens at once, removed tokens, reordered rows, and forks."""
    model, store = stores("qwen2", METHODS[name])
    rows = [tokens_of(row, i) for i, row in enumerate(ROWS)]
    ids, mask = padded(rows)
    cache = answer(model, store, METHODS[name], ids, mask)[2]
    alone = [answer(model, store, METHODS[name], row)[2] for row in rows]
    assert any(layer.unused for layer in cache.layers)
    pads, order = (ids.shape[1] - mask.sum(1)).tolist(), [3, 0, 0, 4]
    more = torch.cat([prompt(3, seed=200 + row) for row in range(len(rows))])
    logits = continued(model, cache, more, pads)
    for row, single in enumerate(alone):
        expected = continued(model, single, more[row : row + 1], [0])
        torch.testing.assert_close(logits[row : row + 1], expected, rtol=0, atol=1e-4)
        single.crop(-2)
    cache.crop(-2)
    cache.batch_select_indices(torch.tensor(order))
    pads, alone = [pads[row] for row in order], [alone[row].fork() for row in order]
    for step in range(2):
        token = torch.cat([prompt(1, seed=300 + 10 * step + row) for row in range(len(order))])
        cache = cache.fork()
        logits = continued(model, cache, token, pads)
        for row, single in enumerate(alone):
            expected = continued(model, single, token[row : row + 1], [0])
            torch.testing.assert_close(logits[row : row + 1], expected, rtol=0, atol=1e-4)
    with pytest.raises(RuntimeError, match="within a budget"):
        cache.crop(-19)  # the last row computed 11 tokens of its prompt, and 7 after it


def test_computed_tokens_leave_each_row_when_they_would_alone(stores, monkeypatch):
    """Rows have few or many computed tokens, hold all tokens, or restore nothing."""
    for module in (held, window):
        monkeypatch.setattr(module, "INDEXED_TOKENS", 32)
    method = replace(KV_DRIVE, local=8)
    model, store = stores("qwen2", method)
    rows = [(0, 250, 20), (1, 130, 50), (3, 16, 40), (3, 0, 9)]
    cache = assert_rows_as_alone(model, store, method, [tokens_of(row, i) for i, row in enumerate(rows)], new=45)
    few, many, complete, unrestored = cache.layers[0]._rows
    assert few.offloaded is not None and many.offloaded is not None and complete is unrestored is None


@pytest.mark.parametrize("lengths", [(300, 150, 40), (200, 200, 64), (129, 260)], ids=str)
def test_long_rows_are_computed_in_the_pieces_that_they_have_alone(lengths, tmp_path):
    model, method = build("qwen2", initializer_range=0.1), replace(KV_DRIVE, prefill_tokens=64, observed=16)
    rows = [prompt(length, seed=20 + number) for number, length in enumerate(lengths)]
    rows.append(rows[0])  # computed once
    ids, mask = padded(rows)
    results = []
    for name, inputs in enumerate([(ids, mask), *((row, torch.ones_like(row)) for row in rows)]):
        with KVStore(tmp_path / str(name), engine="posix") as store:
            cache = TieredCache(model, store, method=method, progress=False)
            output = model.generate(
                inputs[0], attention_mask=inputs[1], past_key_values=cache, do_sample=False, max_new_tokens=NEW,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            results.append((torch.stack(output.logits), cache.stats))
    (logits, stats), *alone = results
    for row, (row_logits, _) in enumerate(alone):
        torch.testing.assert_close(logits[:, row], row_logits[:, 0], rtol=0, atol=1e-4)
    assert stats.tokens_restored == 0 < stats.tokens_stored
    assert stats.tokens_attended == sum(row_stats.tokens_attended for _, row_stats in alone)


def test_long_rows_find_the_pieces_of_the_rows_before_them(tmp_path):
    """Rows that begin alike equal requests one after another: where segments end decides what an index selects."""
    model, method = build("qwen2", initializer_range=0.1), replace(KV_DRIVE, prefill_tokens=128, observed=16)
    rows = [tokens_of(row, i) for i, row in enumerate([(0, 250, 60), (2, 0, 170), (0, 90, 250)])]

    def generated(store, ids, mask):
        cache = TieredCache(model, store, method=method, progress=False)
        output = model.generate(
            ids, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=NEW, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        store.flush()
        return torch.stack(output.logits), cache.stats.tokens_restored

    with KVStore(tmp_path / "together", engine="posix") as store:
        logits, tokens_restored = generated(store, *padded(rows))
    with KVStore(tmp_path / "in turn", engine="posix") as store:
        in_turn = [generated(store, row, torch.ones_like(row)) for row in rows]
    assert tokens_restored == sum(count for _, count in in_turn) == 80
    for row, (row_logits, _) in enumerate(in_turn):
        torch.testing.assert_close(logits[:, row], row_logits[:, 0], rtol=0, atol=1e-4)


@torch.no_grad()
def test_last_pieces_of_rows_include_the_requested_logits(tmp_path):
    """Pieces end where they do for the row alone: before the tokens with requested logits."""
    model, method = build("qwen2"), replace(KV_DRIVE, prefill_tokens=64, observed=16)
    rows = [prompt(length, seed=20 + number) for number, length in enumerate((150, 131))]
    ids, mask = padded(rows)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids}
    results = []
    for name, inputs in enumerate([batch, *({"input_ids": row} for row in rows)]):
        with KVStore(tmp_path / str(name), engine="posix") as store:
            cache = TieredCache(model, store, method=method, progress=False)
            logits = model(**inputs, past_key_values=cache, logits_to_keep=30).logits
            results.append((cache.stats.tokens_computed, logits))
    (total, logits), *alone = results
    assert total == sum(count for count, _ in alone) == mask.sum()
    for row, (_, row_logits) in enumerate(alone):
        torch.testing.assert_close(logits[row], row_logits[0], rtol=0, atol=1e-4)


def test_exact_rows_of_a_batch_are_stored(tmp_path):
    """A new prompt and a prefix within the budget are stored next to a selecting row, whose later tokens are not."""
    model, method = build("qwen2", initializer_range=0.1), KV_DRIVE
    new = prompt(100, seed=31)
    selecting, complete = (torch.cat([PREFIXES[i], prompt(40, seed=32)], dim=1) for i in (0, 3))
    with KVStore(tmp_path, engine="posix") as store:
        for prefix in PREFIXES:
            fill(store, model, prefix, method)
        ids, mask = padded([selecting, new, complete])
        model.generate(
            ids, attention_mask=mask, past_key_values=TieredCache(model, store, method=method), max_new_tokens=2
        )
        store.flush()
        for row, tokens in ((selecting, 256), (new, 96), (complete, 80)):
            longer_ids = torch.cat([row, prompt(9, seed=33)], dim=1)
            cache = TieredCache(model, store, record=False)
            output = model.generate(
                longer_ids,
                past_key_values=cache,
                max_new_tokens=3,
                output_logits=True,
                do_sample=False,
                return_dict_in_generate=True,
            )
            assert cache.stats.tokens_restored == tokens
            expected = model.generate(
                longer_ids, max_new_tokens=3, output_logits=True, do_sample=False, return_dict_in_generate=True
            )
            assert_same(output, expected, atol=1e-4)
