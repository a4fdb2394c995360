"""Everything that a `KVStore` does, over a backend that is no folder; and the errors of wrong backends."""

from __future__ import annotations

import contextlib
import errno
import re
import sqlite3
import time

import pytest
import torch
from families import prompt
from memory_backend import MemoryBackend
from reference import kv_of, prefilled

from hf_tiered_cache import ConfigError, ConversationInUseError, KVStore, StoreError, TieredCache, reasons
from hf_tiered_cache.cache.calibrations import keep_records, records_of
from hf_tiered_cache.cache.observed import Pace
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import ContiguousKV, Epic
from hf_tiered_cache.store.backends import BACKENDS, register_backend
from hf_tiered_cache.store.catalogue import Catalogue
from hf_tiered_cache.store.disk import SegmentStore
from hf_tiered_cache.store.kinds import CALIBRATIONS_NAME
from hf_tiered_cache.store.quota import CATALOGUE_GROWTH

IDS = prompt(96)
GREEDY = {"do_sample": False, "max_new_tokens": 8}


@pytest.fixture
def objects():
    """Return objects of a place that several backends share, like processes."""
    return {}


@pytest.fixture
def connect(objects):
    """Return a function that opens a store over the place."""

    def connect(**options):
        backend = MemoryBackend()
        backend.objects = objects
        return KVStore(backend=backend, **options)

    return connect


@torch.no_grad()
def logits(model, store, method=None, **options):
    cache = TieredCache(model, store, method=method, **options)
    return model(input_ids=IDS, past_key_values=cache, logits_to_keep=1).logits, cache


def expected(model, tokens_restored):
    cache = prefilled(model, [kv_of(model, IDS[:, :80])], tokens_restored)
    return model(input_ids=IDS[:, tokens_restored:], past_key_values=cache, logits_to_keep=1).logits


@pytest.mark.parametrize("options", [{}, {"key": bytes(32)}, {"host_memory": 0}], ids=["plain", "key", "no memory"])
def test_a_prefix_comes_back_with_the_same_bits(model, connect, options):
    with connect(**options) as store:
        store.precompute(model, IDS[0, :80], progress=False)
        assert store.path is None
        assert store.place in repr(store)
    with connect(**options) as store:
        answer, cache = logits(model, store)
        assert cache.stats.tokens_restored == 80
        assert torch.equal(answer, expected(model, 80))
        assert store.verify().ok


def test_a_damaged_object_is_a_counted_miss(model, connect, objects):
    with connect() as store:
        store.precompute(model, IDS[0, :80], progress=False)
        ((name, (version, content)),) = [item for item in objects.items() if item[0].startswith("segments/")]
        damaged = bytearray(content)
        damaged[-100] ^= 1
        objects[name] = version, bytes(damaged)
        store.clear()
        answer, cache = logits(model, store)
        assert cache.stats.tokens_restored < 80
        assert torch.equal(answer, expected(model, cache.stats.tokens_restored))
        assert store.stats.verification_failures == 1


def test_a_replaced_object_is_never_mixed_with_the_previous_one(model, connect, objects):
    with connect(host_memory=0) as store:
        store.precompute(model, IDS[0, :80], progress=False)
        logits(model, store, record=False)  # it is open now
        for name in [name for name in objects if name.startswith("segments/")]:
            objects[name] = object(), objects[name][1]
        answer, cache = logits(model, store, record=False)
        assert torch.equal(answer, expected(model, cache.stats.tokens_restored))


def test_selection_keeps_its_index_with_the_segment(model, connect, objects):
    method = ContiguousKV(budget=0.5)
    with connect(policy=method.policy) as store:
        store.precompute(model, IDS[0, :80], method=method, progress=False)
        answer, cache = logits(model, store, method, record=False)
        assert cache.stats.tokens_attended < cache.stats.tokens_restored
    assert any(name.startswith("beside/") for name in objects)
    with connect(policy=method.policy) as store:
        assert torch.equal(logits(model, store, method, record=False)[0], answer)
        assert store.remove(row.id for row in store.segments()) == 1
    assert not any(name.startswith(("beside/", "segments/")) for name in objects)


def test_a_conversation_is_resumed_and_owned_by_one(model, connect, objects):
    with connect() as store, TieredCache(model, store, conversation="alice") as cache:
        history = model.generate(IDS, past_key_values=cache, **GREEDY)
    with connect() as store:
        (info,) = store.conversations()
        assert (info.id, info.in_use_by, info.evicted) == ("alice", None, [])
        with TieredCache(model, store, conversation="alice") as cache:
            ids = torch.cat([history, prompt(5, seed=3)], dim=1)
            second_output = model.generate(ids, past_key_values=cache, **GREEDY)
            with pytest.raises(ConversationInUseError):
                store.remove_conversation("alice")
            assert cache.stats.tokens_restored > 90
        assert torch.equal(second_output, model.generate(ids, **GREEDY))
        assert store.remove_conversation("alice") > 0
        assert store.conversations() == []
    assert not [name for name in objects if name.startswith(("conversations/", "segments/"))]


def test_documents_are_listed_and_removed(model, connect, objects):
    texts = [prompt(48, seed=seed)[0] for seed in (5, 6)]
    with connect() as store:
        store.precompute(model, texts, passages=True, method=Epic(), labels=["a", "b"], progress=False)
    with connect() as store:
        assert [info.label for info in store.documents()] == ["a", "b"]
        assert store.remove_document("a") == 1
        assert [info.label for info in store.documents()] == ["b"]
    assert len([name for name in objects if name.startswith("segments/")]) == 1


def test_calibrations_pins_and_cleaning(model, connect, objects):
    name = f"quality {'0' * 32}"
    with connect() as store:
        keep_records(storage_of(store), name, [{"tokens": 5}])
        store.precompute(model, IDS[0, :80], progress=False, pin=True)
    objects["segments/movie.mkv"] = object(), b"not of the library"
    objects["conversations/" + "1" * 32 + ".json"] = object(), b"{}"
    with connect() as store:
        assert records_of(storage_of(store), name) == [{"tokens": 5}]
        assert len(store.pinned()) == 1
        report = store.gc()
        assert report.unknown == ["conversations/" + "1" * 32 + ".json", "segments/movie.mkv"]
        assert store.stats.segments == 1
    assert {"segments/movie.mkv", CALIBRATIONS_NAME} <= objects.keys()


def test_a_quota_holds(model, connect, objects):
    with connect() as store:
        store.precompute(model, IDS[0, :80], progress=False)
        size = store.stats.disk.bytes
    quota = CATALOGUE_GROWTH + 4 * size
    with connect(disk_quota=quota, free_space_floor=0) as store:
        for seed in range(6):
            store.precompute(model, prompt(96, seed=10 + seed)[0], progress=False)
        assert 1 <= store.stats.segments <= 4
        assert sum(len(content) for _, content in objects.values()) <= quota


def test_what_has_no_room_is_said_with_the_limits(model, connect, caplog):
    with connect(disk_quota=CATALOGUE_GROWTH + 1000, free_space_floor=0) as store:
        report = store.precompute(model, IDS[0, :80], progress=False)
        assert report.stored == 0 and store.stats.dropped_writes
    assert re.search(
        rf"no room for \d+ bytes \(disk_quota is {CATALOGUE_GROWTH + 1000}, of which \d+ are used", caplog.text
    )


def test_faults_of_a_place_never_fail_a_request(model, connect, monkeypatch):
    with connect(host_memory=0) as store:
        store.precompute(model, IDS[0, :80], progress=False)
        for name in ("get_object", "find_object", "list_objects", "put_object"):
            with monkeypatch.context() as patch:

                def fail(*_, **__):
                    raise OSError(5, "the network is down")

                patch.setattr(MemoryBackend, name, fail)
                answer, _ = logits(model, store)
                torch.testing.assert_close(answer, model(input_ids=IDS, logits_to_keep=1).logits, msg=name)


# --- addresses and errors


def test_an_address_opens_a_registered_backend(model, objects):
    def open_place(address):
        assert address == "dictionary://a/b"
        backend = MemoryBackend()
        backend.objects = objects
        return backend

    register_backend("dictionary", open_place)
    try:
        with KVStore("dictionary://a/b") as store:
            store.precompute(model, IDS[0, :80], progress=False)
        cache = TieredCache(model, "dictionary://a/b")
        model.generate(IDS, past_key_values=cache, **GREEDY)
        assert cache.stats.tokens_restored == 80
    finally:
        del BACKENDS._parts["dictionary"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either the path of a store or backend"),
        ({"path": "store", "backend": MemoryBackend()}, "not both"),
        ({"path": "teleport://x"}, "unknown backend 'teleport'"),
        ({"path": 5}, "a folder or an address"),
        ({"path": ""}, "is empty"),
        ({"backend": {}}, "dict is not a backend; derive it from ObjectBackend: it lacks place, "),
        ({"backend": "s3://bucket"}, "not its address; pass an address as the first argument"),
        ({"backend": MemoryBackend}, r"an instance, not the class MemoryBackend; use MemoryBackend\(\.\.\.\)"),
        ({"backend": MemoryBackend(), "engine": "posix"}, "engine is an option of stores in folders"),
    ],
)
def test_wrong_backends_are_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        KVStore(**arguments)
    assert list(tmp_path.iterdir()) == []


def with_members(**members):
    """Create a backend whose class has these members, too."""
    return type("Changed", (MemoryBackend,), members)()


def with_attribute(name, value):
    backend = MemoryBackend()
    setattr(backend, name, value)
    return backend


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (with_members(read=lambda self, name: b""), "^Changed redefines read, which ObjectBackend needs"),
        (with_members(open=None, names=()), "^Changed redefines names, open, which ObjectBackend needs"),
        (with_attribute("find", {}), "^MemoryBackend redefines find, which ObjectBackend needs"),
        (with_attribute("records", []), "^MemoryBackend redefines records, which ObjectBackend needs"),
        (with_attribute("place", 3), "^MemoryBackend redefines place, which ObjectBackend needs"),
        (with_attribute("bytes_read", {}), "^MemoryBackend redefines bytes_read, which ObjectBackend needs"),
        (with_attribute("is_used", []), "^MemoryBackend redefines is_used, which ObjectBackend needs"),
        (with_members(put_object=lambda self, name, content: None), r"^Changed.put_object must accept .*replace"),
        (with_members(locked=7), r"^Changed.locked must accept \(self\).* is not a callable"),
        (
            with_members(__init__=lambda self: None),
            r"call super\(\).__init__\(place\) .* it lacks place",
        ),
    ],
)
@pytest.mark.parametrize("argument", ["backend", "remote"])
def test_a_backend_with_wrong_members_is_refused(backend, message, argument, tmp_path):
    path = tmp_path / "store" if argument == "remote" else None
    with pytest.raises(ConfigError, match=message):
        KVStore(path, **{argument: backend})
    assert list(tmp_path.iterdir()) == []


def test_a_backend_may_have_private_names_of_its_own(model):
    """Even those that a base class is likely to use."""
    members = dict.fromkeys(["_lock", "_pool", "_threads", "_read", "_uploads", "_counting", "_range_of"])
    with KVStore(backend=with_members(**members), host_memory=0) as store:
        store.precompute(model, IDS[0, :80], progress=False)
        assert logits(model, store)[1].stats.tokens_restored == 80


@pytest.mark.parametrize("argument", ["backend", "remote"])
def test_a_backend_belongs_to_one_store(argument, tmp_path):
    backend, paths = MemoryBackend(), iter("ab")

    def open_store(**options):
        return KVStore(tmp_path / next(paths) if argument == "remote" else None, **{argument: backend}, **options)

    with pytest.raises(ConfigError, match="unknown eviction policy"):  # it is still free
        KVStore(tmp_path / "c", remote=backend, policy="none")
    with open_store(), pytest.raises(ConfigError, match="MemoryBackend is used by another store; create one for each"):
        open_store()
    with pytest.raises(ConfigError, match="was closed"):
        KVStore(backend=backend)


class Viewing(MemoryBackend):
    """Backend that returns views of its bytes."""

    def get_object(self, name, version, offset, nbytes):
        return memoryview(super().get_object(name, version, offset, nbytes))

    def get_beginnings(self, names, nbytes):
        return {name: memoryview(content) for name, content in super().get_beginnings(names, nbytes).items()}


def test_bytes_may_be_returned_as_views(model, objects, tmp_path, monkeypatch):
    monkeypatch.setattr(Pace, "per_token", lambda self, fingerprint: 10.0)  # the remote is waited for
    for remote in (False, True):
        for number in range(2):
            backend = Viewing()
            backend.objects = objects
            path, place = (tmp_path / f"{number}", {"remote": backend}) if remote else (None, {"backend": backend})
            with KVStore(path, host_memory=0, **place) as store:
                assert logits(model, store)[1].stats.tokens_restored == 95 * number
                assert store.verify(progress=False).ok
        objects.clear()


def test_names_of_objects_that_begin_with_their_folder_are_a_fault_of_the_place(objects, connect, model, caplog):
    with connect() as store:
        store.precompute(model, IDS[0, :80], progress=False)
    listed = {name: MemoryBackend.find_object(store._storage.disk.backend, name) for name in objects}
    with KVStore(backend=with_members(list_objects=lambda self, folder: listed)) as store:
        assert logits(model, store)[1].stats.reason == reasons.UNREADABLE
    assert "list_objects must return a dict of Stored(version, size, nbytes) by names without the folder" in caplog.text


@pytest.mark.parametrize("first", [0, 1])
def test_what_a_backend_raises_while_it_is_read_is_a_counted_miss(objects, connect, model, caplog, first):
    """Wherever that is: the head and the blocks of a segment are read in different threads."""
    with connect() as store:
        store.precompute(model, IDS[0, :80], progress=False)

    def get_object(self, name, version, offset, nbytes):
        return MemoryBackend.get_object(self, name, version, offset, nbytes) if offset < first else {}["key"]

    backend = with_members(get_object=get_object)
    backend.objects = objects
    with KVStore(backend=backend, host_memory=0) as store:
        answer, cache = logits(model, store)
        assert torch.equal(answer, expected(model, 0))
        assert store.stats.read_errors > 0 and cache.stats.tokens_restored == 0
    assert "get_object raised KeyError('key')" in caplog.text and "Traceback" in caplog.text


# --- places that fail for a moment


class Flaky(MemoryBackend):
    """Backend whose methods do what `faults` says, by name, in place of their own work."""

    def __init__(self, objects=None):
        super().__init__()
        self.objects, self.faults = {} if objects is None else objects, {}

    def find_object(self, name):
        return self.faults.get("find", super().find_object)(name)

    def list_objects(self, folder):
        return self.faults.get("list", super().list_objects)(folder)

    def get_object(self, name, version, offset, nbytes):
        content = super().get_object(name, version, offset, nbytes)
        return self.faults.get("get", bytes)(content)


def fails(*_):
    raise OSError(errno.EIO, "no answer")


@pytest.mark.parametrize("method", ["find", "list", "get"])
@pytest.mark.parametrize("at_opening", [False, True])
def test_a_fault_that_has_passed_costs_no_more_than_a_second(model, objects, monkeypatch, method, at_opening):
    """A cache that stores nothing finds the KV again, and says until then that it cannot be read."""
    with KVStore(backend=Flaky(objects)) as store:
        store.precompute(model, IDS[:, :80])
    backend = Flaky(objects)
    if at_opening:
        backend.faults[method] = fails
    with KVStore(backend=backend) as store:
        backend.faults[method] = fails
        if method != "list" or at_opening:
            assert logits(model, store, record=False)[1].stats.reason == reasons.UNREADABLE
        backend.faults.clear()
        deadline = time.monotonic() + 30
        while not (cache := logits(model, store, record=False)[1]).stats.tokens_restored:
            assert cache.stats.reason == reasons.UNREADABLE and time.monotonic() < deadline
            time.sleep(0.2)
        assert cache.stats.tokens_restored == 80


def test_a_prompt_reports_a_segment_that_became_readable_during_its_pass(model, objects, monkeypatch):
    """Why nothing was restored is determined after the pass, which may take longer than a segment is not used."""
    find = SegmentStore.find

    def find_and_wait(disk, prefix_hashes):
        rows = find(disk, prefix_hashes)
        time.sleep(0.5)
        return rows

    with KVStore(backend=Flaky(objects)) as store:
        store.precompute(model, IDS[:, :80])
    backend = Flaky(objects)
    with KVStore(backend=backend) as store:
        backend.faults["get"] = fails
        monkeypatch.setattr("hf_tiered_cache.store.disk._PAUSE_SECONDS", 0.4)
        assert logits(model, store, record=False)[1].stats.reason == reasons.UNREADABLE
        backend.faults.clear()
        monkeypatch.setattr(SegmentStore, "find", find_and_wait)
        assert logits(model, store, record=False)[1].stats.reason == reasons.UNREADABLE
        assert logits(model, store, record=False)[1].stats.tokens_restored == 80


def test_a_catalogue_that_fails_is_not_an_empty_one(model, tmp_path, monkeypatch):
    def locked(*_):
        raise sqlite3.OperationalError("database is locked")

    with KVStore(tmp_path) as store:
        store.precompute(model, IDS[:, :80])
        with monkeypatch.context() as patch:
            patch.setattr(Catalogue, "beginning_with", locked)
            assert logits(model, store, record=False)[1].stats.reason == reasons.UNREADABLE
        assert logits(model, store, record=False)[1].stats.tokens_restored == 80


@pytest.mark.parametrize("kind", ["conversation", "document"])
def test_records_that_cannot_be_listed_are_not_missing(objects, monkeypatch, kind):
    backend = Flaky(objects)
    with KVStore(backend=backend) as store:
        listed = backend.list_objects
        monkeypatch.setattr(backend, "list_objects", lambda name: fails() if name == f"{kind}s" else listed(name))
        with pytest.raises(StoreError, match="no answer"):
            getattr(store, f"{kind}s")()
        if kind == "document":  # a conversation is found by its id
            with pytest.raises(StoreError, match="no answer"):
                store.remove_document("report")


@pytest.mark.parametrize("length", [0, 100, 4000])
def test_an_answer_that_lacks_bytes_is_no_damage(model, objects, length):
    """A connection that ends early is a read error: nothing is deleted for it."""
    with KVStore(backend=Flaky(objects)) as store:
        cache = TieredCache(model, store, conversation="c")
        model.generate(IDS[:, :80], past_key_values=cache, **GREEDY)
        cache.suspend()
    before = dict(objects)
    for operation in (lambda store: store.gc(), lambda store: store.verify(repair=True)):
        for at_opening in (False, True):
            backend = Flaky(objects)
            short = {"get": lambda content: content[:length]}
            if at_opening:
                backend.faults.update(short)
            with KVStore(backend=backend) as store:
                backend.faults.update(short)
                with contextlib.suppress(StoreError):  # a complete list may be what an operation needs
                    operation(store)
            assert objects == before


def test_a_backend_that_was_closed_is_refused(tmp_path):
    backend = MemoryBackend()
    KVStore(backend=backend).close()
    for options in ({"backend": backend}, {"path": tmp_path, "remote": backend}):
        with pytest.raises(ConfigError, match="this MemoryBackend was closed with a store that used it"):
            KVStore(**options)
