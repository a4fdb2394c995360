"""Memory of indexes: caches of a prompt share one, nothing is held twice, and everything held is counted."""

from __future__ import annotations

import gc

import pytest
import torch
from families import prompt
from test_selective import ask, question
from thorough import pairs

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.methods import ContiguousKV, KVDrive
from hf_tiered_cache.selection import window
from hf_tiered_cache.selection.decode_index import DecodeIndex, Int8KeysIndex
from hf_tiered_cache.tiers.index_cache import IndexCache

FAMILY = "qwen2"

KEY = ((("segment", 0, 7, "kind"), 0, 64),)
IN_PIECES = KVDrive(budget=0.2, local=16, prefill_tokens=128, exact_from=64)
WHOLE = KVDrive(budget=0.2, local=16)
KEYS = ContiguousKV(0.25, reselect=True, reorder=False, identify="index")
TOKENS = 400


@pytest.fixture
def existing_bytes():
    """Return the bytes of all indexes that were created since and still exist, by their storages."""
    gc.collect()
    before = {id(index) for index in gc.get_objects() if isinstance(index, DecodeIndex)}

    def nbytes() -> int:
        gc.collect()
        indexes = [index for index in gc.get_objects() if isinstance(index, DecodeIndex) and id(index) not in before]
        storages = [tensor.untyped_storage() for index in indexes for tensor in index.tensors().values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    return nbytes


def computed(model, store, ids, method):
    """Store a prompt, in pieces if the method wants it, without the token that follows."""
    cache = TieredCache(model, store, method=method)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    cache.store_now()
    store.flush()


def stored(model, path, ids, method):
    """Store a prompt with its index."""
    with KVStore(path, engine="posix") as store:
        computed(model, store, ids, method)
        assert (len(store.segments()) > 2) == (method is IN_PIECES)
        opened_cache(model, store, ids, method)


def answered(model, store, ids, method):
    """Return the logits and statistics of a request that restores the whole prompt."""
    output, cache = ask(model, store, question(ids), method)  # the output refers to the cache
    assert cache.stats.tokens_restored == ids.shape[1]
    store.flush()
    return torch.stack(output.logits), cache.stats


def opened_cache(model, store, ids, method):
    """Return a cache that has read the prompt and decoded a token."""
    cache = TieredCache(model, store, method=method, record=False)
    with torch.no_grad():
        model(input_ids=question(ids), past_key_values=cache, logits_to_keep=1)
        model(input_ids=ids[:, :1], past_key_values=cache)
    assert cache.stats.tokens_restored == ids.shape[1]
    return cache


def indexes_of(cache):
    return [
        index
        for layer, prefix in sorted(cache.layers[0].decode_selector.indexes._runs)
        for index in cache.layers[0].decode_selector.indexes.held(layer, prefix)
    ]


def held_bytes(store):
    return store.stats.index.bytes + store.stats.unbudgeted_index_bytes


@pytest.mark.parametrize(("method", "room"), pairs([WHOLE, IN_PIECES, KEYS], [0, 5_000, 1 << 20]))
def test_caches_of_a_prompt_share_its_index(model, tmp_path, existing_bytes, method, room):
    ids = prompt(TOKENS)
    stored(model, tmp_path, ids, method)
    with KVStore(tmp_path, engine="posix", index_memory=room) as store:
        first = opened_cache(model, store, ids, method)
        need = first.stats.details.index_bytes
        assert existing_bytes() == held_bytes(store) == need
        second = opened_cache(model, store, ids, method)
        assert second.stats.details.bytes_identifying == 0  # nothing was read again
        assert existing_bytes() == held_bytes(store) == need
        pairs = zip(indexes_of(first), indexes_of(second), strict=True)
        assert all(shared is original for shared, original in pairs)
        assert store.stats.index.bytes <= room
        assert first.stats.reasons == second.stats.reasons and bool(first.stats.reason) == (0 < room < need)
        del first, second, pairs
        gc.collect()
        assert store.stats.unbudgeted_index_bytes == 0
        assert existing_bytes() == store.stats.index.bytes <= room


def test_pieces_are_held_once(model, tmp_path, existing_bytes):
    """New pieces are held once after merging, and later prompts find them merged."""
    ids = prompt(TOKENS)
    longer = torch.cat([ids, prompt(128, seed=7)], dim=1)
    with KVStore(tmp_path, engine="posix", index_memory="1MiB") as store:
        computed(model, store, ids, IN_PIECES)
        logits, built = answered(model, store, ids, IN_PIECES)
        assert built.details.index_seconds > 0
        assert existing_bytes() == store.stats.index.bytes == built.details.index_bytes
        second_output, stats = answered(model, store, ids, IN_PIECES)
        assert torch.equal(second_output, logits)
        assert (stats.details.index_seconds, stats.details.bytes_identifying) == (0, 0)
        computed(model, store, longer, IN_PIECES)
        longer_output, new_stats = answered(model, store, longer, IN_PIECES)  # of the merged pieces and one more
        assert existing_bytes() == store.stats.index.bytes == new_stats.details.index_bytes > built.details.index_bytes
    with KVStore(tmp_path, engine="posix", index_memory="1MiB") as store:
        assert torch.equal(answered(model, store, longer, IN_PIECES)[0], longer_output)
        assert torch.equal(answered(model, store, ids, IN_PIECES)[0], logits)  # its own pieces are read again
        assert torch.equal(answered(model, store, longer, IN_PIECES)[0], longer_output)


def test_an_evicted_layer_leaves_nothing_behind(model, tmp_path, existing_bytes):
    """The layers of a sidecar have memory of their own."""
    ids = prompt(TOKENS)
    stored(model, tmp_path, ids, WHOLE)
    with KVStore(tmp_path, engine="posix") as store:
        need = answered(model, store, ids, WHOLE)[1].details.index_bytes
    with KVStore(tmp_path, engine="posix", index_memory=need - 1) as store:
        answered(model, store, ids, WHOLE)
        assert 0 < existing_bytes() == store.stats.index.bytes < need


def test_indexes_of_generated_tokens_are_counted(model, tmp_path, existing_bytes, monkeypatch):
    for module in ("held", "window"):
        monkeypatch.setattr(f"hf_tiered_cache.selection.{module}.INDEXED_TOKENS", 32)
    assert window.INDEXED_TOKENS == 32
    ids = prompt(TOKENS)
    stored(model, tmp_path, ids, WHOLE)
    with KVStore(tmp_path, engine="posix") as store:
        cache = opened_cache(model, store, ids, WHOLE)
        assert store.stats.unbudgeted_index_bytes == 0
        with torch.no_grad():
            for token in prompt(100, seed=8).split(1, dim=1):
                model(input_ids=token, past_key_values=cache)
        assert 0 < store.stats.unbudgeted_index_bytes == existing_bytes() - store.stats.index.bytes


@pytest.mark.parametrize("change", ["forget", "rename", "clear"])
def test_an_index_may_end_while_the_cache_changes(monkeypatch, change):
    """Another thread can delete the last cache that uses an index after its name was listed."""
    cache = IndexCache(0)
    index = [cache.admit(KEY, Int8KeysIndex.build(torch.ones(1, 64, 4)))]
    names = cache._names

    def end(segments):
        listed = names(segments)
        index.clear()
        return listed

    monkeypatch.setattr(cache, "_names", end)
    {
        "forget": lambda: cache.forget({"segment"}),
        "rename": lambda: cache.rename("segment", lambda owner: ("new", *owner[1:])),
        "clear": cache.forget,
    }[change]()
    assert (cache.unbudgeted, cache.get(KEY, torch.device("cpu"))) == (0, None)


def test_an_index_that_does_not_fit_is_counted_once():
    cache = IndexCache(0)
    index = cache.admit(KEY, Int8KeysIndex.build(torch.ones(1, 64, 4)))
    for _ in range(3):
        assert cache.get(KEY, torch.device("cpu")) is index
    assert cache.evicted == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda name, tensor: (name.replace(".", ".former_"), tensor),
        lambda name, tensor: ("centroids", tensor),
        lambda name, tensor: (name, tensor[:, :3]),
    ],
    ids=["other fields", "no layers", "fewer tokens"],
)
def test_a_sidecar_of_another_version_of_an_index_is_made_again(model, root, change):
    method, longer_ids = KVDrive(0.3), torch.cat([prompt(300), prompt(8, seed=4)], dim=1)

    def request(store):
        cache = TieredCache(model, store, method=method)
        output = model.generate(longer_ids, past_key_values=cache, do_sample=False, max_new_tokens=4)
        assert cache.stats.tokens_restored == 288
        return output

    with KVStore(root) as store:
        store.precompute(model, prompt(300), method=method, progress=False)
        expected = request(store)
        store.flush()
        disk = store._storage.disk
        (row,) = disk.index.rows()
        ((kind, arrays, settings),) = disk.sidecars.all_of(disk.reader(row.id))
        disk.sidecars.remove([row.id])
        disk.sidecars.keep(disk.reader(row.id), kind, dict(map(change, *zip(*arrays.items(), strict=True))), settings)
    with KVStore(root) as store:
        assert torch.equal(request(store), expected)
        store.flush()
        disk = store._storage.disk
        ((_, sidecar, _),) = disk.sidecars.all_of(disk.reader(row.id))
        assert {name: tensor.shape for name, tensor in sidecar.items()} == {n: t.shape for n, t in arrays.items()}
