"""Prompts that share their beginning: each is found, and only what is needed is brought."""

from __future__ import annotations

import pytest
import torch
from families import ROUNDS_MORE, prompt
from faulty_remote import FaultyRemote
from reference import kv_of, prefilled
from shared_prompts import share

from hf_tiered_cache import Geometry, KVStore, TieredCache
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.remote.entries import beginning_of, entry_names, sweep_entries
from hf_tiered_cache.remote.write_back import send_segment
from hf_tiered_cache.store import HASH_BYTES

SYSTEM = prompt(80)
DOCUMENTS = [torch.cat([SYSTEM, prompt(tokens, seed=20 + tokens)], dim=1) for tokens in (405, 205, 105)]


@torch.no_grad()
def restore(model, store, ids, **options):
    """Restore a prompt, compare its answer bit for bit, and return the number of restored tokens."""
    cache = TieredCache(model, store, **options)
    logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
    tokens_restored = cache.stats.tokens_restored
    if tokens_restored and "codec" not in options:
        reference_cache = prefilled(model, [kv_of(model, ids)], tokens_restored)
        expected = model(input_ids=ids[:, tokens_restored:], past_key_values=reference_cache, logits_to_keep=1).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6 if ROUNDS_MORE else 0)
    return tokens_restored


def stored_tokens(ids):
    return ids.shape[1] // 16 * 16


def test_names_are_those_of_the_first_hashes_and_of_the_last():
    hashes = [bytes([number]) * HASH_BYTES for number in range(13)]
    names = [bytes.fromhex(name)[0] for name in entry_names(b"".join(hashes))]
    assert names == [0, 1, 3, 7, 12]
    assert entry_names(hashes[0]) == [hashes[0].hex()]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_prompts_with_the_same_beginning_are_all_found(model, machine, order):
    """Machines that compute at the same time know nothing of each other."""
    for number in order:
        share(model, machine(f"a{number}", place=f"alone {number}")[0], DOCUMENTS[number])
    _, shared = machine("observer")
    for number in order:  # each sends to the shared place, as if the others had not been there when it computed
        folder = storage_of(machine(f"a{number}", place=f"alone {number}")[0]).disk.backend
        for name in folder.names():
            assert send_segment(folder, shared, name).nbytes > 0
    assert len(shared.segments()) == 3
    for number, ids in enumerate(DOCUMENTS):
        store, remote = machine(f"reader {number}", remote_write="never")
        assert restore(model, store, ids) == stored_tokens(ids)
        assert remote.calls["look_up"] == 1
        assert store.stats.remote.segments_read == 1


def test_of_a_long_segment_only_the_shared_beginning_is_brought(model, machine):
    writer, remote = machine("a")
    share(model, writer, DOCUMENTS[0])
    store, _ = machine("b")
    assert restore(model, store, DOCUMENTS[1]) == 80
    stats = store.stats.remote
    assert stats.bytes_read < 0.3 * writer.stats.remote.bytes_written
    assert store.verify().ok
    store.flush()
    assert len(remote.segments()) == 2  # the rest of the second document, and no copy of the beginning
    assert restore(model, store, DOCUMENTS[1]) == stored_tokens(DOCUMENTS[1])
    assert restore(model, machine("c")[0], DOCUMENTS[1]) == stored_tokens(DOCUMENTS[1])
    assert restore(model, store, DOCUMENTS[0]) == stored_tokens(DOCUMENTS[0])  # all of it when it is needed


@pytest.mark.parametrize("options", [{"key": bytes(32)}, {"codec": "int8"}], ids=["key", "int8"])
def test_the_beginning_of_an_encrypted_or_coded_segment_is_brought(model, machine, options):
    share(model, machine("a", **options)[0], DOCUMENTS[0])
    store, _ = machine("b", **options)
    cache = TieredCache(model, store, record=False)
    with torch.no_grad():
        logits = model(input_ids=DOCUMENTS[1], past_key_values=cache, logits_to_keep=1).logits
    assert cache.stats.tokens_restored == 80
    assert store.verify().ok
    first, _ = machine("c", place="elsewhere", **options)
    share(model, first, DOCUMENTS[0])
    own_cache = TieredCache(model, first, record=False)
    with torch.no_grad():
        assert torch.equal(logits, model(input_ids=DOCUMENTS[1], past_key_values=own_cache, logits_to_keep=1).logits)


@pytest.mark.parametrize("chunk_tokens", [16, 32, 64, 256])
def test_a_beginning_is_one_of_whole_chunks(model, machine, chunk_tokens):
    method_geometry = Geometry(chunk_tokens, 1)
    store, _ = machine("a")
    share(model, store, DOCUMENTS[0])
    store.relayout(method_geometry, progress=False)
    (row,) = store.segments()
    reader = storage_of(store).disk.found([row])[0]
    hashes = [row.chain[at : at + HASH_BYTES] for at in range(0, len(row.chain), HASH_BYTES)]
    header = beginning_of(reader.header, hashes, 5)
    if chunk_tokens == 256:
        assert header.shape.tokens == 256
    else:
        assert header.shape.tokens == {16: 80, 32: 96, 64: 128}[chunk_tokens]
    assert header.id != reader.header.id
    assert beginning_of(reader.header, hashes, len(hashes)) is reader.header


def test_a_segment_that_the_remote_has_dropped_is_sent_again_although_its_entry_is_there(model, machine):
    share(model, machine("a")[0], DOCUMENTS[0])
    store, _ = machine("b", place="other")
    share(model, store, DOCUMENTS[0][:, :250])
    shared = machine("c")[1]
    for name in shared.segments():
        del shared.objects[name]
    folder = storage_of(store).disk.backend
    (name,) = folder.names()
    assert send_segment(folder, shared, name).nbytes > 0
    assert restore(model, machine("d")[0], DOCUMENTS[0][:, :250]) == 240


def test_a_list_of_a_remote_reads_each_segment_once(model, machine):
    writer, remote = machine("a")
    share(model, writer, *DOCUMENTS)
    place = FaultyRemote(remote.objects)
    with KVStore(backend=place) as store:
        assert len(store.segments()) == len(remote.segments()) > 1
    assert place.calls["get"] == len(remote.segments())


def test_a_sweep_keeps_the_entries_of_a_segment_that_arrives_meanwhile(model, machine, monkeypatch):
    store, _ = machine("a")
    _, remote = machine("sweeper")
    names = remote.names

    def names_then_arrival():
        listed = names()
        share(model, store, DOCUMENTS[2])
        return listed

    monkeypatch.setattr(remote, "names", names_then_arrival)
    sweep_entries(remote)
    assert restore(model, machine("b")[0], DOCUMENTS[2]) == stored_tokens(DOCUMENTS[2])
