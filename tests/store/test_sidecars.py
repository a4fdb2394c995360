"""Arrays kept beside segments: whole and of this very segment, or not there; never wrong; gone with their segment."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from contextlib import suppress

import processes
import pytest
import torch
from drawn_faults import Faults, du
from hypothesis import given
from hypothesis import strategies as st
from memory_backend import MemoryBackend
from segments import hashes, open_store, read_back, segment, store_over, written_at_once
from test_forged import ODD, places

from hf_tiered_cache.store import maintain, sidecars
from hf_tiered_cache.store.cipher import StoreCipher
from hf_tiered_cache.store.container import xxh3
from hf_tiered_cache.store.engines import PosixEngine
from hf_tiered_cache.store.folder import FolderBackend
from hf_tiered_cache.store.geometry import Geometry
from hf_tiered_cache.store.relayout import join_segments
from hf_tiered_cache.store.sidecars import DTYPES, MAGIC, PREFIX

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
FACTS = {"clusters": 4, "heads": [0, 1]}
ARRAYS = {"means": torch.arange(24.0).view(2, 3, 4), "members": torch.arange(50, dtype=torch.int32)}


def publish(store, seed="a", count=4, **changes):
    header, chain, blocks = segment(hashes(count, seed), **changes)
    assert store.publish(header, chain, blocks)
    return store.reader(header.id)


def same(arrays, expected):
    assert list(arrays) == list(expected)
    for name, array in expected.items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
        assert torch.equal(arrays[name].view(torch.uint8), array.contiguous().view(torch.uint8))


def file_of(store, reader, kind="index"):
    return store.path(f"{reader.id}.{kind}")


def counted(store):
    return store.counters.snapshot()


@pytest.fixture(params=["folder", "memory"])
def backend(request, tmp_path):
    segment_backend = MemoryBackend() if request.param == "memory" else FolderBackend(tmp_path, PosixEngine())
    yield segment_backend
    segment_backend.close()


@pytest.fixture(params=[None, KEY], ids=["plain", "key"])
def cipher(request):
    return request.param and StoreCipher(request.param)


@pytest.fixture
def store(tmp_path, cipher):
    return open_store(tmp_path / "store", cipher=cipher)


# --- what is kept is found


def test_what_is_kept_is_found_in_this_process_and_another(backend, cipher):
    store = store_over(backend, cipher=cipher)
    reader = publish(store)
    assert store.sidecars.kept(reader, "index", FACTS) is None
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    assert store.sidecars.keep(reader, "scores", {"of": torch.ones(3)}, {})
    for disk_store in (store, store_over(backend, cipher=cipher)):
        segment_reader = disk_store.reader(reader.id)
        same(disk_store.sidecars.kept(segment_reader, "index", dict(reversed(FACTS.items()))), ARRAYS)
        same(disk_store.sidecars.kept(segment_reader, "scores", {}), {"of": torch.ones(3)})
        assert disk_store.sidecars.kept(segment_reader, "index", FACTS | {"clusters": 5}) is None
        assert disk_store.sidecars.kept(segment_reader, "other", FACTS) is None
        figures = counted(disk_store)
        assert figures.verification_failures == figures.read_errors == figures.other_key_files == 0
    assert {kind: size > 0 for kind, size in store.sidecars.sizes()[reader.id].items()} == {
        "index": True,
        "scores": True,
    }
    assert counted(store).bytes_written >= sum(store.sidecars.by_segment().values())


SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 7), (70_000,), (3, 41_000)]


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_of_every_dtype_and_size_come_back_in_every_bit(store, name):
    reader, generator, dtype = publish(store), torch.Generator().manual_seed(3), getattr(torch, name)
    arrays = {}
    for number, shape in enumerate(SHAPES):
        size = torch.Size(shape).numel() * dtype.itemsize
        data = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
        arrays[f"{number} ä"] = data.view(dtype).view(shape)
    arrays["turned"] = arrays["4 ä"].T
    assert store.sidecars.keep(reader, "index", arrays, {})
    same({key: value[None] for key, value in store.sidecars.kept(reader, "index", {}).items()},
         {key: value[None] for key, value in arrays.items()})  # fmt: skip
    for empty_arrays in ({}, {"none": torch.empty(0, 4)}):
        assert store.sidecars.keep(reader, "index", empty_arrays, {})
        same(store.sidecars.kept(reader, "index", {}), empty_arrays)


def test_arrays_are_renewed_in_one_moment(store):
    """A reader finds one of two complete versions while two threads renew them."""
    reader, wrong, stop = publish(store), [], threading.Event()
    versions = [{"of": torch.full((40_000,), float(number))} for number in range(2)]
    assert store.sidecars.keep(reader, "index", versions[0], {})

    def renew(arrays):
        while not stop.is_set():
            if not store.sidecars.keep(reader, "index", arrays, {}):
                wrong.append("dropped")

    threads = [threading.Thread(target=renew, args=(version,)) for version in versions]
    [thread.start() for thread in threads]
    for _ in range(100):
        kept_arrays = store.sidecars.kept(reader, "index", {})
        if kept_arrays is not None and not any(torch.equal(kept_arrays["of"], version["of"]) for version in versions):
            wrong.append("torn")
    stop.set()
    [thread.join() for thread in threads]
    assert wrong == []
    assert counted(store).verification_failures == 0


@pytest.mark.parametrize(
    ("kind", "arrays", "facts"),
    [
        ("", ARRAYS, {}),
        ("../x", ARRAYS, {}),
        ("a.b", ARRAYS, {}),
        ("x" * 40, ARRAYS, {}),
        ("index", {"of": torch.ones(2, dtype=torch.complex64)}, {}),
        ("index", ARRAYS, {"long": "x" * 70_000}),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path, kind, arrays, facts):
    store = open_store(tmp_path)
    with pytest.raises(ValueError):
        store.sidecars.keep(publish(store), kind, arrays, facts)
    assert store.sidecars.sizes() == {}


# --- of this very segment


def test_what_was_made_from_other_bytes_of_its_name_is_not_found(store, cipher):
    """The segment was stored again under its id, with other blocks or newly encrypted."""
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    path = file_of(store, reader)
    old = path.read_bytes()
    store.remove([reader.id])
    assert not path.exists()
    second = publish(store, fill=None if cipher else 7)
    assert second.id == reader.id
    path.write_bytes(old)
    assert store.sidecars.kept(second, "index", FACTS) is None
    assert counted(store).verification_failures == 0
    assert not store.sidecars.keep(reader, "index", ARRAYS, FACTS)  # of the one that has gone
    assert path.read_bytes() == old
    assert store.sidecars.keep(second, "index", ARRAYS, FACTS)
    same(store.sidecars.kept(second, "index", FACTS), ARRAYS)


def test_the_same_blocks_stored_anew_are_the_same_segment(tmp_path):
    store = open_store(tmp_path)
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    data = file_of(store, reader).read_bytes()
    store.remove([reader.id])
    second = publish(store)
    file_of(store, second).write_bytes(data)
    same(store.sidecars.kept(second, "index", FACTS), ARRAYS)


def remove(store, reader):
    store.remove([reader.id])


def evict(store, reader):
    store.remove(name for name, _ in store.victims(1))


def damage(store, reader):
    """Damage the first block, report it, and store the segment again."""
    path = store.path(reader.id)
    data = bytearray(path.read_bytes())
    data[reader.header.blocks.offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match="checksum") as error:
        read_back(store, reader.id)
    store.report(reader.id, error.value)
    publish(store)


def expire(store, reader):
    time.sleep(max(0.0, reader.header.expires - time.time()))
    assert maintain.gc(store).expired == 1


def replace(store, reader):
    """Report a read error in this process, so that another file takes the segment's name."""
    store.report(reader.id, OSError(errno.EIO, "a cable"))
    publish(store)


@pytest.mark.parametrize("way", [remove, evict, damage, expire, replace])
def test_arrays_go_with_their_segment(store, way):
    reader, other_reader = publish(store, expires=time.time() + 1 if way is expire else None), publish(store, "other")
    store.index.touch([other_reader.id])
    for owner in (reader, other_reader):
        assert store.sidecars.keep(owner, "index", ARRAYS, FACTS)
        assert store.sidecars.keep(owner, "scores", ARRAYS, FACTS)
    way(store, reader)
    assert list(store.sidecars.sizes()) == [other_reader.id]
    same(store.sidecars.kept(other_reader, "index", FACTS), ARRAYS)


def test_orphans_are_swept_by_gc_and_where_room_is_wanted(tmp_path):
    store = open_store(tmp_path)
    deleted_reader, reader = publish(store, "gone"), publish(store)
    for owner in (deleted_reader, reader):
        assert store.sidecars.keep(owner, "index", ARRAYS, FACTS)
    (tmp_path / "beside" / "notes.txt").write_text("not ours")
    store.path(deleted_reader.id).unlink()
    size = store.sidecars.sizes()[deleted_reader.id]["index"]
    assert maintain.gc(store, dry_run=True).temporary_bytes == size
    assert deleted_reader.id in store.sidecars.sizes()
    assert maintain.gc(store).temporary_bytes == size
    assert list(store.sidecars.sizes()) == [reader.id]
    store.path(reader.id).unlink()
    tight = open_store(tmp_path, quota=store.used_bytes() + 1000)
    assert not tight.publish(*segment(hashes(9, "too large")))  # all the same
    assert tight.sidecars.sizes() == {}
    assert (tmp_path / "beside" / "notes.txt").exists()


# --- room


def test_what_is_kept_counts_in_the_quota_and_is_evicted_with_its_segment(tmp_path, cipher):
    probe = open_store(tmp_path / "probe", cipher=cipher)
    arrays = {"of": torch.rand(30_000)}
    reader = publish(probe)
    before, alone = probe.used_bytes(), probe.nbytes_of(reader.id)
    assert probe.sidecars.keep(reader, "index", arrays, {})
    size = probe.sidecars.by_segment()[reader.id]
    assert probe.used_bytes() - before == size >= 120_000
    assert probe.victims(1) == [(reader.id, alone + size)]
    limit = 4 * (alone + size) + 500_000
    store = open_store(tmp_path / "store", cipher=cipher, quota=limit, high=1.0, low=0.9)
    readers = []
    for number in range(10):
        readers.append(publish(store, f"s{number}"))
        assert store.sidecars.keep(readers[-1], "index", arrays, {})
        assert du(tmp_path / "store") <= limit
        assert store.used_bytes() <= limit
    assert store.counters.snapshot().evicted_segments >= 5
    assert set(store.sidecars.sizes()) == store.index.catalogue.ids()
    assert readers[-1].id in store.sidecars.sizes()


def test_several_processes_keep_within_one_quota(tmp_path):
    code = (
        "s.publish(*segment(hashes(2, n + str(i))))\n"
        "for row in s.index.rows()[-1:]:\n"
        "    r = s.reader(row.id)\n"
        "    if r: s.sidecars.keep(r, 'index', {'of': torch.ones(20_000)}, {})\n"
    )
    assert 0 < written_at_once(tmp_path / "store", 900_000, 2, code) <= 900_000
    assert open_store(tmp_path / "store").sidecars.sizes()


def test_what_has_no_room_is_dropped_and_evicts_nothing(tmp_path):
    store = open_store(tmp_path, quota=1_000_000)
    reader, other_reader = publish(store), publish(store, "other")
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    assert not store.sidecars.keep(reader, "index", {"of": torch.ones(250_000)}, FACTS)
    assert counted(store).dropped_writes == 1
    same(store.sidecars.kept(reader, "index", FACTS), ARRAYS)
    assert store.index.catalogue.ids() == {reader.id, other_reader.id}


def test_no_segment_gives_way_to_its_own_arrays(tmp_path):
    store = open_store(tmp_path, quota=1_000_000, high=1.0, low=1.0)
    reader, other_reader = publish(store), publish(store, "other")
    store.index.touch([other_reader.id])  # so that the other one would go last
    room = store.limits.quota - store.used_bytes()
    assert store.sidecars.keep(reader, "index", {"of": torch.ones((room + 8192) // 4)}, {})
    assert store.index.catalogue.ids() == {reader.id}


@pytest.mark.parametrize("step", ["allocate", "write", "publish"])
def test_a_disk_that_fails_drops_them_and_leaves_what_was_there(store, monkeypatch, step):
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    name = {"allocate": "root.allocate", "write": "root.write_all", "publish": "root.os.rename"}[step]
    with monkeypatch.context() as patch:
        patch.setattr(f"hf_tiered_cache.store.{name}", fail)
        assert not store.sidecars.keep(reader, "index", {"of": torch.ones(9)}, FACTS)
    assert counted(store).dropped_writes == 1
    same(store.sidecars.kept(reader, "index", FACTS), ARRAYS)
    assert not list((store.path(reader.id).parent.parent / "tmp").iterdir())


def test_a_store_that_cannot_be_written_reads_them(backend, cipher):
    store = store_over(backend, cipher=cipher)
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    backend.writable = False
    looking = store_over(backend, cipher=cipher)
    segment_reader = looking.reader(reader.id)
    same(looking.sidecars.kept(segment_reader, "index", FACTS), ARRAYS)
    assert not looking.sidecars.keep(segment_reader, "index", ARRAYS, FACTS)
    assert counted(looking).dropped_writes == 1


@given(seed=st.integers(0, 1 << 32), share=st.sampled_from([0.02, 0.1, 0.4]), key=st.sampled_from([None, KEY]))
def test_whatever_fails_nothing_wrong_is_found_and_the_quota_is_kept(tmp_path_factory, seed, share, key):
    root, cipher = tmp_path_factory.mktemp("faults") / "store", key and StoreCipher(key)
    limit = 900_000
    faults = Faults(root, seed, share)
    with faults.rest():
        store = open_store(root, cipher=cipher, quota=limit)
    last = {}  # what was kept last for each segment, or may have been
    with faults.under_way():
        for step in range(30):
            name, kind = faults.random.choice("abcdef"), faults.random.choice(["index", "scores"])
            store.publish(*segment(hashes(4, name)))
            rows = store.find(hashes(4, name)[:1])
            reader = store.found(rows[:1])[0] if rows else None
            if reader is None:
                continue
            arrays = store.sidecars.kept(reader, kind, {})
            assert arrays is None or any(torch.equal(arrays["of"], version) for version in last[reader.id, kind])
            of = torch.full((faults.random.choice([9, 9000]),), float(step))
            versions = last.setdefault((reader.id, kind), [])
            if store.sidecars.keep(reader, kind, {"of": of}, {}):
                versions.clear()
            versions.append(of)
            if faults.random.random() < 0.2:
                with suppress(OSError):
                    store.remove([reader.id])
            with faults.rest():
                assert du(root) <= limit
    second_store = open_store(root, cipher=cipher, quota=limit)
    maintain.gc(second_store)
    assert maintain.verify(second_store).ok
    assert set(second_store.sidecars.sizes()) <= set(second_store.backend.names())
    assert not list((root / "tmp").iterdir())
    store.close()


# --- kill -9

STEPS = ["reserved", "blocks", "head", "renamed"]


@pytest.mark.parametrize("step", STEPS)
def test_kill_9_at_each_step_leaves_what_was_there_or_what_is_new(tmp_path, step):
    store = open_store(tmp_path)
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    store.close()
    code = f"""
import os, signal, sys
sys.path = {sys.path!r}
from test_sidecars import *
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
step = {step!r}
store = open_store(Path({str(tmp_path)!r}))
writes, pwrite, rename = 0, os.pwrite, os.rename
def counting(fd, data, offset):
    global writes
    writes += 1
    if step == "reserved": die()
    done = pwrite(fd, data, offset)
    if (step, writes) in (("blocks", 1), ("head", 2)): die()
    return done
def renaming(*paths, **folders):
    rename(*paths, **folders)
    die()
os.pwrite, os.rename = counting, renaming
store.sidecars.keep(store.reader({reader.id!r}), "index", {{"of": torch.ones(9)}}, {{}})
"""
    code = "from pathlib import Path\n" + code
    process = processes.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.returncode == -9, process.stderr
    second_store = open_store(tmp_path)
    segment_reader = second_store.reader(reader.id)
    if step == "renamed":
        same(second_store.sidecars.kept(segment_reader, "index", {}), {"of": torch.ones(9)})
    else:
        same(second_store.sidecars.kept(segment_reader, "index", FACTS), ARRAYS)
        assert maintain.gc(second_store, dry_run=True).temporary_bytes > 0
    maintain.gc(second_store)
    assert not list((tmp_path / "tmp").iterdir())
    assert maintain.verify(second_store).ok
    assert list(second_store.sidecars.sizes()) == [reader.id]


# --- damage, and files that were never ours


def test_damage_at_any_byte_is_a_counted_miss_and_the_file_goes(store):
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    path = file_of(store, reader)
    content = path.read_bytes()
    offsets = [*range(400), *range(400, len(content), 37), *range(len(content) - 40, len(content))]
    for number, offset in enumerate(offsets, 1):
        data = bytearray(content)
        data[offset] ^= 1 << offset % 8
        path.write_bytes(data)
        assert store.sidecars.kept(reader, "index", FACTS) is None
        figures = counted(store)
        assert figures.verification_failures + figures.newer_files + figures.other_key_files == number, offset
        assert not path.exists() or data[8:12] != content[8:12]
    assert counted(store).newer_files <= 32
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    same(store.sidecars.kept(reader, "index", FACTS), ARRAYS)


@pytest.mark.parametrize("size", [0, 8, 31, 32, 4095, 4096, 5000, -4096, -1])
def test_a_file_of_another_length_is_a_counted_miss(store, size):
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    path = file_of(store, reader)
    for length in (size if size >= 0 else path.stat().st_size + size, path.stat().st_size + abs(size) + 1):
        assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
        os.truncate(path, length)
        assert store.sidecars.kept(reader, "index", FACTS) is None
        assert not path.exists()
    assert counted(store).verification_failures == 2


def forge(path, fields=None, nbytes=None, size=None):
    """Write a head with a right checksum over what stands at `path`, or a sparse file of `size` bytes."""
    data = bytearray(path.read_bytes())
    _, version, length, old, _ = PREFIX.unpack_from(data)
    text = data[PREFIX.size : PREFIX.size + length] if fields is None else json.dumps(fields).encode()
    nbytes = old if nbytes is None else nbytes
    head_bytes = sidecars._head_bytes(len(text), nbytes)
    digests = data[PREFIX.size + length :][: 16 * sidecars._blocks(nbytes)[0]]
    head = bytearray(PREFIX.pack(MAGIC, version, len(text), nbytes, 0) + text + digests)
    head = head.ljust(min(head_bytes, 1 << 20), b"\0")[: 1 << 20]
    PREFIX.pack_into(head, 0, MAGIC, version, len(text), nbytes, xxh3(bytes(head)))
    path.write_bytes(head + data[4096:])
    if size is not None:
        os.truncate(path, size)


def said_by(path):
    data = path.read_bytes()
    return json.loads(data[PREFIX.size : PREFIX.size + PREFIX.unpack_from(data)[2]])


@given(st.data())
def test_no_forged_head_does_harm(tmp_path_factory, data):
    store = open_store(tmp_path_factory.mktemp("store"))
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    path = file_of(store, reader)
    fields = said_by(path)
    way = data.draw(st.sampled_from(list(places(fields))))
    at = fields
    for key in way[:-1]:
        at = at[key]
    before, at[way[-1]] = (
        at[way[-1]],
        data.draw(st.sampled_from([*ODD, [0, 1 << 70], [0, 1 << 39, 1 << 39], [1 << 39]])),
    )
    forge(path, fields)
    arrays = store.sidecars.kept(reader, "index", FACTS)
    if arrays is not None and at[way[-1]] != before:  # names and shapes of the same bytes can be forged without a key
        assert way[0] == "arrays"
        assert sum(array.nbytes for array in arrays.values()) <= 4096
    assert maintain.verify(store).sidecars <= 1
    maintain.gc(store)


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 60_000, b'{"a":' * 10_000, b"\xff", b"null", b"9" * 9000])
def test_no_forged_json_does_harm(tmp_path, text):
    store = open_store(tmp_path)
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    path = file_of(store, reader)
    _, version, length, nbytes, _ = PREFIX.unpack_from(path.read_bytes())
    digests = path.read_bytes()[PREFIX.size + length :][:16]
    head = bytearray(PREFIX.pack(MAGIC, version, len(text), nbytes, 0) + text + digests)
    head = head.ljust(sidecars._head_bytes(len(text), nbytes), b"\0")
    PREFIX.pack_into(head, 0, MAGIC, version, len(text), nbytes, xxh3(bytes(head)))
    path.write_bytes(bytes(head) + bytes(4096))
    assert store.sidecars.kept(reader, "index", FACTS) is None
    assert counted(store).verification_failures == 1


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Store a sidecar. Return the store, its segment, the file, and the sizes that are allocated for its arrays."""
    store, sizes = open_store(tmp_path), []
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    monkeypatch.setattr(sidecars, "aligned_bytes", sizes.append)
    return store, reader, file_of(store, reader), sizes


@pytest.mark.parametrize("nbytes", [1 << 20, 1 << 30, 1 << 40, 1 << 41, (1 << 64) - 64])
def test_no_size_is_believed_that_the_file_does_not_have(kept, nbytes):
    """The file has a few KiB, and its header promises up to exabytes."""
    store, reader, path, sizes = kept
    forge(path, said_by(path) | {"arrays": [["of", "uint8", [nbytes]]]}, nbytes)
    assert store.sidecars.kept(reader, "index", FACTS) is None
    assert counted(store).verification_failures == 1
    assert sizes == []


@pytest.mark.parametrize("nbytes", [1 << 26, 1 << 34, 1 << 40])
def test_a_sparse_file_takes_no_memory(kept, nbytes):
    """The file takes a few KiB on disk, and has the size that its header promises."""
    store, reader, path, sizes = kept
    fields = said_by(path) | {"arrays": [["of", "uint8", [nbytes]]]}
    forge(path, fields, nbytes, sidecars._head_bytes(len(json.dumps(fields)), nbytes) + nbytes)
    assert path.stat().st_size > nbytes > 16 * path.stat().st_blocks * 512
    assert store.sidecars.kept(reader, "index", FACTS) is None
    assert (counted(store).read_errors, counted(store).verification_failures) == (1, 0)
    assert sizes == []


@pytest.mark.parametrize("shape", [[0, 1 << 70], [0, 1 << 39, 1 << 39], [0] * 9, [-1, 0], [True, 0], [[0]], "0"])
def test_no_shape_of_nothing_does_harm(tmp_path, shape):
    store = open_store(tmp_path)
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", {"of": torch.empty(0, 4)}, FACTS)
    path = file_of(store, reader)
    forge(path, said_by(path) | {"arrays": [["of", "float32", shape]]})
    assert store.sidecars.kept(reader, "index", FACTS) is None
    assert counted(store).verification_failures == 1


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "link to nothing", "device"])
def test_what_is_no_regular_file_is_not_opened(tmp_path, kind):
    store = open_store(tmp_path)
    reader = publish(store)
    path = file_of(store, reader)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "in it").mkdir(parents=True)
    else:
        path.symlink_to({"link": store.path(reader.id), "device": "/dev/zero"}.get(kind, "nothing"))
    started = time.monotonic()
    assert store.sidecars.kept(reader, "index", FACTS) is None
    assert counted(store).verification_failures == 1
    maintain.verify(store)
    maintain.gc(store)
    assert not store.sidecars.keep(reader, "index", ARRAYS, FACTS)  # not ours to replace
    assert os.path.lexists(path)
    assert maintain.gc(store).unknown == [f"beside/{path.name}"]
    assert time.monotonic() - started < 30


def test_a_newer_format_is_left_alone_until_it_is_renewed(tmp_path):
    store = open_store(tmp_path)
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    path = file_of(store, reader)
    data = bytearray(path.read_bytes())
    data[8] += 1
    path.write_bytes(data)
    assert store.sidecars.kept(reader, "index", FACTS) is None
    assert counted(store).newer_files == 1
    assert path.read_bytes() == data
    assert maintain.verify(store).ok


def test_a_read_error_is_a_counted_miss_and_deletes_nothing(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    with monkeypatch.context() as patch:

        def fail(*_):
            raise OSError(errno.EIO, "a cable")

        patch.setattr("hf_tiered_cache.store.folder.read_all", fail)
        assert store.sidecars.kept(reader, "index", FACTS) is None
    assert counted(store).read_errors == 1
    same(store.sidecars.kept(reader, "index", FACTS), ARRAYS)


def test_verify_names_what_is_damaged_and_repairs_it(store):
    reader = publish(store)
    for kind in ("index", "scores"):
        assert store.sidecars.keep(reader, kind, ARRAYS, FACTS)
    report = maintain.verify(store)
    assert (report.segments, report.sidecars, report.ok) == (1, 2, True)
    path = file_of(store, reader)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    report = maintain.verify(store)
    assert (list(report.bad), report.ok) == ([f"{reader.id}.index"], False)
    assert path.exists()
    assert counted(store).verification_failures == 0
    assert maintain.verify(store, repair=True).removed == [f"{reader.id}.index"]
    assert list(store.sidecars.sizes()[reader.id]) == ["scores"]
    assert store.reader(reader.id) is not None


# --- with a key


@pytest.fixture
def secret(tmp_path):
    return open_store(tmp_path / "secret", cipher=StoreCipher(KEY))


def test_files_hold_no_array_and_repeat_nothing(secret):
    reader, telling = publish(secret), {"of": torch.arange(1000, 1999, dtype=torch.int64)}
    raw = []
    for kind in ("index", "scores", "index"):
        assert secret.sidecars.keep(reader, kind, telling, FACTS)
        data = file_of(secret, reader, kind).read_bytes()
        assert KEY not in data
        plain = telling["of"].numpy().tobytes()
        assert all(plain[at : at + 16] not in data for at in range(0, len(plain) - 16, 8))
        raw.append(data[4096:])
    assert len({piece[at : at + 16] for piece in raw for at in range(0, len(piece), 16)}) == sum(map(len, raw)) // 16


@pytest.mark.parametrize("way", ["kinds", "segments", "blocks", "head", "plain", "other key", "facts", "content"])
def test_what_is_swapped_or_planted_is_not_served(tmp_path, secret, way):
    reader, second = publish(secret), publish(secret, "other")
    for owner, kind, number in ((reader, "index", 1.0), (reader, "scores", 2.0), (second, "index", 3.0)):
        assert secret.sidecars.keep(owner, kind, {"of": torch.full((9,), number)}, FACTS)
    path = file_of(secret, reader)
    index, scores = path.read_bytes(), file_of(secret, reader, "scores").read_bytes()
    if way in ("plain", "other key"):
        cipher = None if way == "plain" else StoreCipher(OTHER_KEY)
        planting = open_store(tmp_path / "planting", cipher=cipher)
        planted_reader = publish(planting)
        assert planted_reader.id == reader.id
        assert planting.sidecars.keep(planted_reader, "index", {"of": torch.zeros(9)}, FACTS)
        path.write_bytes(file_of(planting, planted_reader).read_bytes())
        if way == "plain":  # bound to the right bytes
            forge(path, said_by(path) | {"content": f"{reader.header.digests.digest:016x}"})
    elif way in ("facts", "content"):
        forge(path, said_by(path) | {way: {"clusters": 5}})
    else:
        path.write_bytes(
            {
                "kinds": scores,
                "segments": file_of(secret, second).read_bytes(),
                "blocks": index[:4096] + scores[4096:],
                "head": scores[:4096] + index[4096:],
            }[way]
        )
    for facts in (FACTS, {"clusters": 5}):
        assert secret.sidecars.kept(reader, "index", facts) is None
    figures = counted(secret)
    assert (figures.other_key_files > 0) == (way in ("plain", "other key"))
    assert (figures.verification_failures > 0) == (way not in ("plain", "other key"))
    same(secret.sidecars.kept(reader, "scores", FACTS), {"of": torch.full((9,), 2.0)})
    assert secret.sidecars.keep(reader, "index", ARRAYS, FACTS)
    same(secret.sidecars.kept(reader, "index", FACTS), ARRAYS)


def test_the_same_forgeries_under_a_checksum_are_misses_too(tmp_path):
    """Without a key, arrays can be moved to another name or another header by accident."""
    store = open_store(tmp_path)
    reader, second = publish(store), publish(store, "other")
    for owner, kind, number in ((reader, "index", 1.0), (reader, "scores", 2.0), (second, "index", 3.0)):
        assert store.sidecars.keep(owner, kind, {"of": torch.full((9,), number)}, FACTS)
    path = file_of(store, reader)
    index, scores = path.read_bytes(), file_of(store, reader, "scores").read_bytes()
    contents = [scores, file_of(store, second).read_bytes(), index[:4096] + scores[4096:], scores[:4096] + index[4096:]]
    for number, data in enumerate(contents, 1):
        path.write_bytes(data)
        assert store.sidecars.kept(reader, "index", FACTS) is None
        assert counted(store).verification_failures == number


def test_laid_out_anew_a_segment_has_nothing_beside_it(store):
    reader = publish(store)
    assert store.sidecars.keep(reader, "index", ARRAYS, FACTS)
    header, chain, blocks = join_segments([reader], Geometry(8, 1))
    assert store.publish(header, chain, blocks)
    store.remove([reader.id])
    assert store.sidecars.sizes() == {}
    assert store.sidecars.kept(store.reader(header.id), "index", FACTS) is None
