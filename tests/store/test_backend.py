"""The contract of all backends, and a store over each: what stands above them knows no folder."""

from __future__ import annotations

import errno
import re
import threading
import uuid
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from memory_backend import MemoryBackend
from segments import hashes, read_back, segment, store_over
from servers import REMOTES
from threads import run_in_threads

from hf_tiered_cache.errors import FormatError, IntegrityError, StoreBusyError, StoreClosedError
from hf_tiered_cache.store import folder, maintain, objects
from hf_tiered_cache.store.backend import SegmentBackend, Stored
from hf_tiered_cache.store.backends import open_remote
from hf_tiered_cache.store.engines import PosixEngine, ReadOp
from hf_tiered_cache.store.folder import FolderBackend
from hf_tiered_cache.store.kinds import SEGMENT_MAGIC
from hf_tiered_cache.store.memory import aligned_bytes
from hf_tiered_cache.store.objects import ObjectBackend
from hf_tiered_cache.store.segment import read_head

DOCS = Path(__file__).parents[2] / "docs"
_ROWS = re.findall(r"^\| `(\w+)`(?: \(optional\))? \| (.*) \|$", (DOCS / "extending.md").read_text(), re.M)
FIND, LIST, GET, PUT, DELETE, FREE = (
    f"docs/extending.md: {name}() must {dict(_ROWS)[name]}"
    for name in ("find_object", "list_objects", "get_object", "put_object", "delete_object", "free")
)
FIND_AND_LIST = f"{FIND}\n{LIST}"
THREADS = f"docs/extending.md: the methods are called from several threads at once\n{PUT}\n{GET}"
LOCK = "docs/extending.md: locked() is a context manager that excludes all others"
STORE = "a store over the backend must find and read what is stored, and notice damage and what others removed"
"""Rules that a failed test names: those of the page for authors of backends."""
KINDS = ["folder", "memory", "compressed", "memory://", *REMOTES]
A, B = "a" * 32, "b" * 32
DATA = SEGMENT_MAGIC + (bytes(range(256)) * 64)[len(SEGMENT_MAGIC) :]  # four pages
OTHER = SEGMENT_MAGIC + DATA[: len(SEGMENT_MAGIC) - 1 : -1]
SIZE = len(DATA)


class Compressed(MemoryBackend):
    """Backend in memory whose objects take less space than they have bytes."""

    def find_object(self, name):
        stored = super().find_object(name)
        return stored and stored._replace(nbytes=len(zlib.compress(self.objects[name][1])))


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        address = metafunc.config.getoption("--backend")
        metafunc.parametrize("backend", [address] if address else KINDS, indirect=True)


@pytest.fixture
def backend(request, tmp_path, place_of):
    if request.param in ("memory", "compressed"):
        segment_backend: SegmentBackend = MemoryBackend() if request.param == "memory" else Compressed()
    elif request.param == "folder":
        segment_backend = FolderBackend(tmp_path, PosixEngine())
    elif request.param in KINDS:
        segment_backend = open_remote(place_of(request.param.removesuffix("://")))
    else:
        segment_backend = open_remote(request.param.format(uuid.uuid4().hex))
    yield segment_backend
    segment_backend.close()


@contextmanager
def refused(error, rule):
    """Expect an error, and name the rule that requires it if there is none."""
    try:
        with pytest.raises(error) as caught:
            yield caught
    except pytest.fail.Exception as failure:
        pytest.fail(f"{failure}\n{rule}")


def filled(number):
    return SEGMENT_MAGIC + bytes([number]) * (SIZE - len(SEGMENT_MAGIC))


def put(backend, name=A, data=DATA, replace=False):
    with backend.write(name, len(data)) as upload:
        upload.write(memoryview(data)[4096:], 4096)
        upload.write(memoryview(data)[:4096], 0)
        upload.publish(replace)


def whole(backend, name=A):
    """Return all bytes of a segment, through `head`."""
    return backend.head(name, lambda stored, page: stored.size)[1]


def opened(backend, name=A):
    return backend.open(name, lambda stored, page: len(page))[2]


def blocks_of(backend, file, *offsets, nbytes=4096):
    memory = [aligned_bytes(nbytes) for _ in offsets]
    backend.read([ReadOp(file, *run) for run in zip(offsets, memory, strict=True)]).result()
    return [bytes(block.numpy()) for block in memory]


# --- the verbs


def test_of_an_empty_place_nothing_is_found(backend):
    assert backend.names() == [], FIND_AND_LIST
    assert backend.find(A) is None, FIND_AND_LIST
    assert backend.pinned() == set(), FIND_AND_LIST
    assert not backend.delete(A), DELETE
    assert backend.is_reachable(), FIND_AND_LIST
    assert backend.writable, FIND_AND_LIST
    for ask in (lambda: whole(backend), lambda: opened(backend)):
        with refused(FileNotFoundError, FIND_AND_LIST):
            ask()


def test_what_is_written_is_found_and_read(backend):
    put(backend)
    assert backend.names() == [A], LIST
    metadata = backend.find(A)
    assert (metadata.size, metadata.nbytes > 0) == (SIZE, True), FIND
    assert whole(backend) == DATA, GET
    file = opened(backend)
    first, second = aligned_bytes(4096), aligned_bytes(4096)
    nbytes = backend.read([ReadOp(file, 4096, first), ReadOp(file, 12288, second)]).result()
    assert nbytes >= 8192, GET
    assert bytes(first.numpy()) + bytes(second.numpy()) == DATA[4096:8192] + DATA[12288:], GET
    assert A in backend.where(A), FIND


def test_one_call_reads_several_segments(backend):
    put(backend)
    put(backend, B, OTHER)
    files = [opened(backend, name) for name in (A, B)]
    blocks = [aligned_bytes(4096) for _ in files]
    backend.read([ReadOp(file, 8192, block) for file, block in zip(files, blocks, strict=True)]).result()
    assert [bytes(block.numpy()) for block in blocks] == [DATA[8192:12288], OTHER[8192:12288]], GET


def test_a_head_is_as_long_as_its_first_page_says(backend):
    put(backend)
    calls = []

    def length(metadata, page):
        calls.append((metadata, page))
        return 8192

    metadata, head = backend.head(A, length)
    assert (metadata, head) == (backend.find(A), DATA[:8192]), GET
    assert backend.open(A, length)[:2] == (metadata, head), GET
    assert calls == 2 * [(metadata, DATA[:4096])], GET
    assert backend.head(A, lambda *_: 10 * SIZE)[1] == DATA, GET  # fewer only where it ends
    put(backend, B, b"short")
    assert backend.head(B, lambda metadata, page: len(page))[1] == b"short", GET

    def refuse(*_):
        raise FormatError("no segment")

    for ask in (backend.head, backend.open):
        with refused(FormatError, GET):
            ask(A, refuse)


def test_a_head_and_its_blocks_are_of_one_version(backend, monkeypatch):
    """The segment is replaced again and again between them, and the file system reuses the inode."""
    put(backend)
    first = backend.find(A).version
    if isinstance(backend, FolderBackend):
        real, again = backend.engine.open, [1]

        def renewed(path):
            for number in again and range(50):
                put(backend, data=filled(number), replace=True)
                if backend.find(A).version == first:
                    break
            again.clear()
            return real(path)

        monkeypatch.setattr(backend.engine, "open", renewed)
    _, head, file = backend.open(A, lambda stored, page: 4096)
    assert blocks_of(backend, file, 0) == [head], GET


def test_nobody_sees_what_is_not_published(backend):
    with backend.write(A, SIZE) as upload:
        upload.write(memoryview(DATA), 0)
        assert (backend.names(), backend.find(A)) == ([], None), PUT
        assert upload.nbytes() >= SIZE, PUT
    with pytest.raises(ZeroDivisionError), backend.write(A, SIZE) as upload:
        upload.write(memoryview(DATA), 0)
        raise ZeroDivisionError
    assert (backend.names(), backend.find(A)) == ([], None), PUT


def test_the_first_writer_wins_unless_another_is_to_replace_it(backend):
    put(backend)
    before = backend.find(A)
    with refused(FileExistsError, PUT):
        put(backend, data=OTHER)
    assert (backend.find(A), whole(backend)) == (before, DATA), PUT
    put(backend, data=OTHER, replace=True)
    assert backend.find(A).version != before.version, PUT
    assert whole(backend) == OTHER, PUT
    assert backend.names() == [A], PUT
    put(backend, B, replace=True)  # nothing was there
    assert whole(backend, B) == DATA, PUT


def test_an_open_segment_is_never_mixed_with_its_replacement(backend):
    """An open file stays readable. Of an object, another version may be gone: then the read fails."""

    def read(offset):
        try:
            return blocks_of(backend, file, offset)
        except FileNotFoundError as error:
            assert error.filename == file.path, GET
            return None

    allowed = [None] if isinstance(backend, ObjectBackend) else []
    put(backend)
    file = opened(backend)
    put(backend, data=OTHER, replace=True)
    assert blocks_of(backend, opened(backend), 0) == [OTHER[:4096]], GET
    assert read(0) in [[DATA[:4096]], *allowed], GET
    assert backend.delete(A), DELETE
    assert read(4096) in [[DATA[4096:8192]], *allowed], GET
    assert (backend.names(), backend.find(A), backend.delete(A)) == ([], None, False), DELETE


def test_a_read_past_the_end_fails(backend):
    put(backend)
    file = opened(backend)
    with refused(OSError, GET) as error:
        blocks_of(backend, file, 0, SIZE)
    assert error.value.filename == file.path, GET
    assert blocks_of(backend, file, 0) == [DATA[:4096]], GET


def test_many_threads_read_and_write_at_once(backend):
    put(backend)
    file = opened(backend)

    def work(number):
        name = f"{number:032x}"
        for _ in range(10):
            put(backend, name, data=filled(number), replace=True)
            assert whole(backend, name) == filled(number), THREADS
            assert blocks_of(backend, file, 0, 8192) == [DATA[:4096], DATA[8192:12288]], THREADS

    run_in_threads(work, range(1, 5))
    assert len(backend.names()) == 5, THREADS


def test_what_lies_beside_a_segment_is_listed_apart_and_otherwise_like_one(backend):
    sidecars, usage = f"{A}.index", backend.usage()
    assert backend.sidecars() == {}, FIND_AND_LIST
    put(backend)
    put(backend, sidecars, OTHER)
    assert (backend.names(), list(backend.sidecars())) == ([A], [sidecars]), FIND_AND_LIST
    assert backend.sidecars()[sidecars] == backend.find(sidecars).nbytes > 0, FIND_AND_LIST
    assert backend.usage() == usage, FIND_AND_LIST
    assert (whole(backend), whole(backend, sidecars)) == (DATA, OTHER), FIND_AND_LIST
    assert blocks_of(backend, opened(backend, sidecars), 4096) == [OTHER[4096:8192]], FIND_AND_LIST
    put(backend, sidecars, replace=True)
    assert whole(backend, sidecars) == DATA, FIND_AND_LIST
    backend.sync()
    assert backend.delete(A), DELETE
    assert (backend.names(), list(backend.sidecars())) == ([], [sidecars]), FIND_AND_LIST  # who deletes decides
    assert backend.delete(sidecars), DELETE
    assert not backend.delete(sidecars), DELETE
    assert (backend.sidecars(), backend.find(sidecars)) == ({}, None), FIND_AND_LIST


def test_pins_are_marks_on_names(backend):
    backend.pin(A, True)
    backend.pin(A, True)
    assert backend.pinned() == {A}, FIND_AND_LIST
    put(backend)
    assert backend.delete(A), DELETE
    assert backend.pinned() == {A}, FIND_AND_LIST  # who deletes decides
    backend.pin(A, False)
    backend.pin(A, False)
    assert backend.pinned() == set(), FIND_AND_LIST


def test_usage_is_what_lies_beside_the_segments(backend):
    before = backend.usage()
    with backend.write(A, 1 << 20) as upload:
        upload.write(memoryview(DATA), 0)
        assert backend.usage() - before >= 1 << 20, FIND_AND_LIST
    assert backend.usage() == before, FIND_AND_LIST
    put(backend)
    assert backend.usage() == before, FIND_AND_LIST
    backend.sync()
    assert backend.clean_up() == ({}, False), FIND_AND_LIST
    free = backend.free()
    assert free is None or free > 0, FREE


def test_the_lock_is_for_one_at_a_time(backend, monkeypatch):
    monkeypatch.setattr(folder, "_LOCK_SECONDS", 0.2)  # what is waited next, once it was had
    monkeypatch.setattr(objects, "_LOCK_SECONDS", 0.2)
    errors = []

    def other():
        try:
            with backend.locked():
                pass
        except StoreBusyError as error:
            errors.append(error)

    with backend.locked():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(errors) == 1, LOCK
    other()
    assert len(errors) == 1, LOCK


@pytest.mark.parametrize(
    ("member", "answer", "action"),
    [
        ("get_object", None, whole),
        ("get_beginnings", {A: "x"}, lambda backend: backend.get_beginnings([A], 8)),
        ("get_object", memoryview(bytes(32)).cast("Q"), whole),
        ("find_object", (1, SIZE, SIZE), whole),
        ("find_object", Stored(1, "2", 3), lambda backend: backend.find(A)),
        ("list_objects", {1: Stored(1, 2, 3)}, MemoryBackend.names),
        ("list_objects", [A], lambda backend: backend.names()),
        ("list_objects", {f"{A}.kv": (1, SIZE, SIZE)}, lambda backend: backend.usage()),
        ("list_objects", {name: Stored(1, 2, 3) for name in ("x" * 80, f"segments/{B}.kv")}, MemoryBackend.names),
        ("delete_object", None, lambda backend: backend.delete(A)),
        ("free", "1 GiB", lambda backend: put(backend, B)),
    ],
)
def test_an_answer_of_a_wrong_type_names_the_backend_and_its_method(member, answer, action):
    sound = MemoryBackend()
    put(sound)
    backend = type("Faulty", (MemoryBackend,), {member: lambda *arguments, **options: answer})()
    backend.objects = sound.objects
    sound.close()
    with pytest.raises(OSError, match=rf"Faulty\.{member} must return .*, not .*\({type(answer).__name__}\)") as error:
        action(backend)
    assert "x" * 80 not in str(error.value)  # the entry that is wrong is quoted
    backend.close()


@pytest.mark.parametrize("extra", [-1, 1])
def test_an_answer_of_a_wrong_length_is_an_error_of_the_place(extra):
    backend = MemoryBackend()
    put(backend)
    file, right = opened(backend), backend.get_object
    backend.get_object = lambda name, version, offset, nbytes: (right(name, version, offset, nbytes) + b"x")[
        : nbytes + extra
    ]
    for read in (whole, lambda backend: blocks_of(backend, file, 4096)):
        with pytest.raises(OSError, match=r"MemoryBackend.get_object returned \d+ bytes, not \d+ from (0|4096)"):
            read(backend)
    backend.close()


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_wrong_size_names_who_reported_it(extra):
    backend = MemoryBackend()
    store = store_over(backend)
    header, _ = publish(store)
    find = backend.find_object
    wrong = backend.find(header.id).size + extra
    backend.find_object = lambda name: (stored := find(name)) and stored._replace(size=wrong)
    if extra < 0:
        with pytest.raises(FormatError, match=rf"it is truncated: MemoryBackend reports {wrong} of {wrong + 1}"):
            read_head(backend.head, header.id)
    else:
        with pytest.raises(OSError, match=r"MemoryBackend.get_object returned .* bytes, not"):
            whole(backend, header.id)


@pytest.mark.parametrize("member", ["find_object", "list_objects", "get_object", "put_object", "delete_object", "free"])
def test_whatever_a_method_raises_is_an_error_of_the_place(member, caplog):
    """It names the class and the method. The traceback is logged once."""

    def lost(self, *arguments, **options):
        return {}["key"]

    sound = MemoryBackend()
    put(sound)
    backend = type("Faulty", (MemoryBackend,), {member: lost})()
    backend.objects = sound.objects
    action = {
        "list_objects": lambda: backend.names(),
        "put_object": lambda: put(backend, B),
        "delete_object": lambda: backend.delete(A),
        "free": lambda: put(backend, B),
    }.get(member, lambda: whole(backend))
    for _ in range(2):
        with pytest.raises(
            OSError, match=rf"Faulty.{member} raised KeyError\('key'\).*{re.escape(backend.place)}"
        ) as error:
            action()
        assert error.value.__context__ is None  # its traceback would keep destinations of reads alive
    assert caplog.text.count('return {}["key"]') == 1
    for other in (sound, backend):
        other.close()


def test_a_closed_backend_reads_no_more(backend):
    put(backend)
    file = opened(backend)
    backend.close()
    with pytest.raises(StoreClosedError):
        blocks_of(backend, file, 0)


# --- a store over it


def publish(store, seed="a", count=4, **changes):
    header, chain, blocks = segment(hashes(count, seed), **changes)
    assert store.publish(header, chain, blocks)
    return header, blocks


def test_a_store_serves_segments_from_it(backend):
    store = store_over(backend)
    header, blocks = publish(store)
    assert [row.id for row in store.find(hashes(4))] == [header.id], STORE
    assert store.found(store.find(hashes(4))[:1])[0] is not None, STORE
    for written_blocks, read_blocks in zip(blocks, read_back(store, header.id), strict=True):
        assert torch.equal(written_blocks, read_blocks), STORE
    assert store.publish(header, hashes(4), blocks), STORE
    assert store.counters.snapshot().duplicate_writes == 1, STORE
    report = maintain.verify(store)
    assert (report.segments, report.ok) == (1, True), STORE
    other_store = store_over(backend)  # another process: its catalogue is made of what is there
    assert [row.id for row in other_store.find(hashes(4))] == [header.id], STORE
    assert other_store.remove([header.id]) == 1, STORE
    assert store.reader(header.id) is None, STORE
    assert store.find(hashes(4)) == [], STORE
    other_store.sync()


def test_damage_in_it_is_a_miss_and_the_segment_is_stored_anew(backend):
    store = store_over(backend)
    header, blocks = publish(store)
    data = bytearray(whole(backend, header.id))
    data[store.reader(header.id).header.blocks.offset] ^= 1
    put(backend, header.id, bytes(data), replace=True)
    with pytest.raises(IntegrityError) as error:
        read_back(store, header.id)
    store.report(header.id, error.value)
    assert store.counters.snapshot().verification_failures == 1, STORE
    assert store.find(hashes(4)) == [], STORE
    assert backend.find(header.id) is None, STORE
    publish(store)
    for written_blocks, read_blocks in zip(blocks, read_back(store, header.id), strict=True):
        assert torch.equal(written_blocks, read_blocks), STORE


def test_a_read_error_hides_a_segment_of_it(backend):
    store = store_over(backend)
    header, _ = publish(store)
    store.report(header.id, OSError(errno.EIO, "a cable"))
    assert store.find(hashes(4)) == [], STORE
    publish(store)
    assert [row.id for row in store.find(hashes(4))] == [header.id], STORE


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_the_quota_holds_over_any_backend_and_pinned_segments_stay(tmp_path, kind):
    def made():
        return MemoryBackend() if kind == "memory" else FolderBackend(tmp_path, PosixEngine())

    probe = made()
    header, _ = publish(store_over(probe), "pinned")
    size = probe.find(header.id).nbytes
    backend = probe if kind == "folder" else made()
    store = store_over(backend, quota=5 * size + 500_000)
    publish(store, "pinned")
    store.pin([header.id])
    for number in range(12):
        publish(store, f"s{number}")
        assert store.used_bytes() <= store.limits.quota
    assert store.counters.snapshot().evicted_segments > 0
    assert backend.find(header.id) is not None
    assert maintain.gc(store).damaged == 0


def test_a_full_place_drops_the_write_and_evicts_for_the_floor():
    size = len(whole(backend := MemoryBackend(), publish(store_over(backend))[0].id))
    store = store_over(MemoryBackend(capacity=3 * size), floor=size // 2)
    segment_ids = [publish(store, f"s{number}")[0].id for number in range(4)]
    assert segment_ids[0] not in store.backend.names()
    assert segment_ids[-1] in store.backend.names()
    assert store.counters.snapshot().evicted_segments >= 1
    assert not store.publish(*segment(hashes(40, "too large")))
    assert store.counters.snapshot().dropped_writes == 1
    assert segment_ids[-1] in store.backend.names()
