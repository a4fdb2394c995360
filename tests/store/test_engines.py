"""Engines: batches arrive whole or fail as a whole, whatever the engine; the planner loses and doubles nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import fake_kvikio
import numpy as np
import pytest
import torch
from families import build, prompt
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import ConfigError, EngineUnavailableError, StoreClosedError
from hf_tiered_cache.store.engines import PosixEngine, ReadOp, open_engine
from hf_tiered_cache.store.engines import kvikio as kvikio_module
from hf_tiered_cache.store.engines.base import MAX_CALL_BYTES, MAX_IOVECS, READ_THROUGH_BYTES, EngineFile, coalesce
from hf_tiered_cache.store.faults import is_of_the_process
from hf_tiered_cache.store.geometry import ALIGNMENT
from hf_tiered_cache.store.memory import aligned_bytes

PAGES = 1500


@pytest.fixture
def pages(tmp_path):
    """Write a file of numbered pages."""
    path = tmp_path / "pages"
    numbers = np.repeat(np.arange(PAGES, dtype=np.uint16), ALIGNMENT // 2)
    path.write_bytes(numbers.tobytes())
    return str(path)


@pytest.fixture(params=["posix", "page_cache", "kvikio", "kvikio with GDS"])
def engine(request, monkeypatch):
    if request.param.startswith("kvikio"):
        fake_kvikio.install(monkeypatch, gds="GDS" in request.param, device="GDS" in request.param)
        io_engine = open_engine("kvikio")
    else:
        io_engine = open_engine(request.param)
    yield io_engine
    io_engine.close()


def numbers_in(memory: torch.Tensor) -> list[int]:
    return memory.view(-1, ALIGNMENT).view(torch.uint8).numpy().view(np.uint16)[:, 0].tolist()


runs = st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(1, 300)), max_size=30)


@given(runs)
def test_a_plan_covers_every_byte_once_and_keeps_its_bounds(page_runs):
    files = [EngineFile(), EngineFile()]
    ops = [
        ReadOp(files[i % 2], first * ALIGNMENT, torch.empty(count * ALIGNMENT, dtype=torch.uint8))
        for i, (first, count) in enumerate(page_runs)
    ]
    calls = coalesce(ops)
    covered_ranges: dict[int, tuple[EngineFile, int]] = {}
    for call in calls:
        assert call.nbytes <= MAX_CALL_BYTES
        assert len(call.pieces) <= MAX_IOVECS
        offset = call.offset
        for piece in call.pieces:
            if isinstance(piece, int):
                assert 0 < piece <= READ_THROUGH_BYTES
                offset += piece
            else:
                for byte in range(0, piece.numel(), ALIGNMENT):
                    address = piece.data_ptr() + byte
                    assert address not in covered_ranges
                    covered_ranges[address] = (call.file, offset + byte)
                offset += piece.numel()
        assert offset == call.offset + call.nbytes
    expected = {
        op.dest.data_ptr() + byte: (op.file, op.offset + byte)
        for op in ops
        for byte in range(0, op.dest.numel(), ALIGNMENT)
    }
    assert covered_ranges == expected


def test_neighbours_become_one_call_and_small_gaps_are_read_through():
    file = EngineFile()
    memory = torch.empty(10 * ALIGNMENT, dtype=torch.uint8)
    pieces = memory.view(10, ALIGNMENT)
    together = coalesce([ReadOp(file, i * ALIGNMENT, pieces[i]) for i in (3, 1, 0, 2)])
    assert [(call.offset, call.nbytes) for call in together] == [(0, 4 * ALIGNMENT)]
    near = coalesce([ReadOp(file, 0, pieces[0]), ReadOp(file, 3 * ALIGNMENT, pieces[3])])
    assert [call.nbytes for call in near] == [4 * ALIGNMENT]
    far = coalesce([ReadOp(file, 0, pieces[0]), ReadOp(file, 6 * ALIGNMENT, pieces[3])])
    assert [call.nbytes for call in far] == [ALIGNMENT, ALIGNMENT]


@given(page_runs=runs)
def test_posix_brings_what_was_asked_for(tmp_path_factory, page_runs):
    path = tmp_path_factory.getbasetemp() / "numbered"
    if not path.exists():
        path.write_bytes(np.repeat(np.arange(PAGES, dtype=np.uint16), ALIGNMENT // 2).tobytes())
    engine = PosixEngine(threads=3)
    file = engine.open(str(path))
    page_runs = [(first, min(count, PAGES - first)) for first, count in page_runs]
    memory = [aligned_bytes(count * ALIGNMENT) for _, count in page_runs]
    ops = [ReadOp(file, first * ALIGNMENT, m) for (first, _), m in zip(page_runs, memory, strict=True)]
    nbytes = engine.submit(ops).result(timeout=60)
    for (first, count), m in zip(page_runs, memory, strict=True):
        assert numbers_in(m) == list(range(first, first + count))
    assert nbytes >= sum(m.numel() for m in memory)
    engine.close()


def test_every_engine_fills_scattered_destinations(engine, pages):
    file = engine.open(pages)
    memory = aligned_bytes(400 * ALIGNMENT).view(400, ALIGNMENT)
    ops = [ReadOp(file, (PAGES - 1 - i) * ALIGNMENT, memory[i]) for i in range(0, 400, 2)]
    ops.append(ReadOp(file, 0, memory[101]))
    nbytes = engine.submit(ops).result(timeout=60)
    assert numbers_in(memory[0:400:2].contiguous()) == [PAGES - 1 - i for i in range(0, 400, 2)]
    assert numbers_in(memory[101]) == [0]
    assert nbytes >= 201 * ALIGNMENT


def test_an_empty_batch_is_done(engine):
    assert engine.submit([]).result(timeout=10) == 0


def test_reading_past_the_end_fails_with_an_oserror(engine, pages):
    file = engine.open(pages)
    memory = aligned_bytes(4 * ALIGNMENT)
    with pytest.raises(OSError):
        engine.submit([ReadOp(file, (PAGES - 2) * ALIGNMENT, memory)]).result(timeout=10)


def test_opening_a_missing_file_is_an_oserror(engine, tmp_path):
    with pytest.raises(FileNotFoundError):
        engine.open(str(tmp_path / "none"))


@pytest.mark.timeout(10)
@pytest.mark.parametrize("direct", [True, False])
def test_a_pipe_is_not_waited_for_and_a_link_is_not_followed(pages, tmp_path, direct):
    pipe, link, engine = tmp_path / "pipe", tmp_path / "link", PosixEngine(direct=direct)
    os.mkfifo(pipe)
    with pytest.raises(OSError):
        engine.submit([ReadOp(engine.open(str(pipe)), 0, aligned_bytes(ALIGNMENT))]).result(timeout=10)
    link.symlink_to(pages)
    with pytest.raises(OSError):
        engine.open(str(link))
    engine.close()


def test_a_deleted_file_stays_readable_through_its_handle(engine, pages):
    file = engine.open(pages)
    os.unlink(pages)
    memory = aligned_bytes(ALIGNMENT)
    engine.submit([ReadOp(file, 7 * ALIGNMENT, memory)]).result(timeout=10)
    assert numbers_in(memory) == [7]


def test_a_file_that_outlives_all_modules_ends_in_silence(pages):
    program = f"""
import sys
from hf_tiered_cache.store.engines import PosixEngine
sys.kept = PosixEngine().open({str(pages)!r})
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""


def test_a_closed_engine_says_that_the_store_was_closed(pages):
    engine = PosixEngine()
    op = ReadOp(engine.open(str(pages)), 0, aligned_bytes(ALIGNMENT))
    engine.close()
    with pytest.raises(StoreClosedError):
        engine.submit([op])


def test_a_failing_batch_is_resolved_only_when_no_part_runs_any_more(pages, monkeypatch):
    engine = PosixEngine(threads=4)
    file = engine.open(pages)
    running, real, failed = set(), os.preadv, threading.Event()

    def preadv(fd, buffers, offset):
        if offset == 0:
            failed.set()
            raise OSError(errno.EIO, "planted")
        running.add(offset)
        failed.wait(5)
        try:
            return real(fd, buffers, offset)
        finally:
            running.discard(offset)

    monkeypatch.setattr(os, "preadv", preadv)
    memory = aligned_bytes(4 * MAX_CALL_BYTES)
    future = engine.submit([ReadOp(file, 0, memory)])
    with pytest.raises(OSError, match="planted"):
        future.result(timeout=10)
    assert not running
    engine.close()


def test_short_reads_are_gone_on_with(pages, monkeypatch):
    engine = PosixEngine(threads=1, direct=False)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:1000]], offset))
    memory = aligned_bytes(3 * ALIGNMENT)
    engine.submit([ReadOp(engine.open(pages), 5 * ALIGNMENT, memory)]).result(timeout=10)
    assert numbers_in(memory) == [5, 6, 7]


def test_a_file_system_without_direct_io_is_read_through_the_page_cache(pages, monkeypatch):
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    engine = PosixEngine()
    file = engine.open(pages)
    assert not file.direct
    memory = aligned_bytes(ALIGNMENT)
    engine.submit([ReadOp(file, ALIGNMENT, memory)]).result(timeout=10)
    assert numbers_in(memory) == [1]


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP])
def test_a_file_that_refuses_direct_reads_is_read_through_the_page_cache(pages, tmp_path, monkeypatch, refusal):
    """Some file systems refuse without notice. Other files are still read directly."""
    other_path = tmp_path / "other"
    other_path.write_bytes(b"\7" * ALIGNMENT)
    real, refused_reads = os.preadv, []

    def preadv(fd, buffers, offset):
        if fd == file.fd and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused_reads.append(offset)
            raise OSError(refusal, "planted")
        return real(fd, buffers, offset)

    engine = PosixEngine(threads=2)
    file, second = engine.open(pages), engine.open(str(other_path))
    if not (file.direct and second.direct):
        pytest.skip("no direct I/O here")
    os.unlink(pages)  # what is open is read on
    monkeypatch.setattr(os, "preadv", preadv)
    memory = aligned_bytes(3 * MAX_CALL_BYTES)
    for _ in range(2):
        memory.zero_()
        engine.submit([ReadOp(file, ALIGNMENT, memory)]).result(timeout=10)
        assert numbers_in(memory) == list(range(1, 1 + len(memory) // ALIGNMENT))
    assert 1 <= len(refused_reads) <= 2  # once a thread
    assert (file.direct, second.direct) == (False, True)
    engine.close()


def test_memory_that_cannot_be_read_into_is_no_fault_of_the_file(pages, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EFAULT, "planted")

    monkeypatch.setattr(os, "preadv", refuse)
    engine = PosixEngine()
    future = engine.submit([ReadOp(engine.open(pages), 0, aligned_bytes(ALIGNMENT))])
    with pytest.raises(OSError) as caught:
        future.result(timeout=10)
    assert is_of_the_process(caught.value)
    engine.close()


def test_kvikio_is_set_up_before_a_file_is_opened(monkeypatch, pages):
    kvikio = fake_kvikio.install(monkeypatch, gds=False)
    engine = open_engine("kvikio")
    engine.open(pages)
    settings = kvikio.opened_under[0]
    assert settings["num_threads"] == 8
    assert settings["auto_direct_io_read"] is True
    assert settings["compat_mode"] is fake_kvikio.CompatMode.ON  # AUTO can hang where there is no GDS
    assert not engine.reads_device


def test_kvikio_with_gds_reads_device_memory_and_leaves_the_mode_alone(monkeypatch, pages):
    kvikio = fake_kvikio.install(monkeypatch, gds=True)
    engine = open_engine("kvikio")
    engine.open(pages)
    assert engine.reads_device
    assert kvikio.opened_under[0]["compat_mode"] is fake_kvikio.CompatMode.AUTO


@pytest.mark.parametrize(("gds", "engine_name"), [(True, "kvikio"), (False, "posix")])
def test_auto_takes_kvikio_where_gpudirect_is_and_posix_elsewhere(monkeypatch, gds, engine_name):
    kvikio = fake_kvikio.install(monkeypatch, gds=gds)
    assert open_engine("auto").name == engine_name
    assert open_engine("kvikio").reads_device is gds
    assert kvikio.settings["num_threads"] == 8


def test_auto_leaves_cuda_alone_where_there_is_no_gpudirect(monkeypatch):
    """A process that asks CUDA cannot use it in its forked children."""
    fake_kvikio.install(monkeypatch, gds=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: pytest.fail("CUDA was asked"))
    assert open_engine("auto").name == "posix"


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("user", [None, "user.json", "missing.json"])
def test_reads_are_asynchronous_by_a_configuration_that_is_named_before_kvikio_is_imported(
    monkeypatch, tmp_path, user, system
):
    fake_kvikio.install(monkeypatch, gds=True)
    for name in ("user.json", "system.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(kvikio_module, "_SYSTEM_CONFIG", tmp_path / ("system.json" if system else "none.json"))
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / (user or "")))
    if user is None:
        monkeypatch.delenv("CUFILE_ENV_PATH_JSON")
    names, import_kvikio = [], kvikio_module._import_kvikio
    monkeypatch.setattr(
        kvikio_module, "_import_kvikio", lambda: names.append(os.environ.get("CUFILE_ENV_PATH_JSON")) or import_kvikio()
    )
    description = open_engine("kvikio").describe()
    assert description.startswith("kvikio (GPUDirect Storage, ")
    assert ("synchronous" in description) == (user == "missing.json" and not system)
    if user is None and not system:
        assert isinstance(json.loads(Path(names[0]).read_text()), dict)
    else:
        assert names == [user and str(tmp_path / user)]


def test_without_cuda_kvikio_is_never_called(monkeypatch):
    fake_kvikio.install(monkeypatch, gds=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EngineUnavailableError, match="CUDA"):
        open_engine("kvikio")
    assert open_engine("auto").name == "posix"


def test_a_kvikio_that_lacks_a_setting_is_not_taken(monkeypatch):
    fake_kvikio.install(monkeypatch, gds=True)

    def refuse(*args):
        raise KeyError("auto_direct_io_read")

    monkeypatch.setattr(sys.modules["kvikio.defaults"], "set", refuse)
    with pytest.raises(EngineUnavailableError, match="or newer"):
        open_engine("kvikio")
    assert open_engine("auto").name == "posix"


def test_a_kvikio_that_does_not_import_is_not_taken(monkeypatch):
    fake_kvikio.install(monkeypatch, gds=True)

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "kvikio":
                raise OSError("libkvikio.so: no such file")

    monkeypatch.delitem(sys.modules, "kvikio")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(EngineUnavailableError, match=r"libkvikio\.so"):
        open_engine("kvikio")
    assert open_engine("auto").name == "posix"


def test_a_file_that_kvikio_cannot_open_is_an_oserror(monkeypatch, pages):
    kvikio = fake_kvikio.install(monkeypatch, gds=True)
    engine = open_engine("kvikio")

    def refuse(path, flags):
        raise RuntimeError("cuFileHandleRegister failed")

    monkeypatch.setattr(kvikio, "CuFile", refuse)
    with pytest.raises(OSError, match="cuFileHandleRegister"):
        engine.open(pages)


def test_a_closed_kvikio_engine_starts_no_read(monkeypatch, pages):
    kvikio = fake_kvikio.install(monkeypatch, gds=False)
    engine = open_engine("kvikio")
    file, started = engine.open(pages), []
    monkeypatch.setattr(kvikio.CuFile, "_start", lambda *args: started.append(args))
    engine.close()
    with pytest.raises(StoreClosedError):
        engine.submit([ReadOp(file, 0, aligned_bytes(ALIGNMENT))])
    assert started == []


@pytest.mark.parametrize("device", [False, True])
def test_a_kvikio_batch_that_fails_is_resolved_only_when_nothing_writes_any_more(monkeypatch, pages, device):
    """Otherwise, its destinations could be reused during a write of a large read with a failed task."""
    kvikio = fake_kvikio.install(monkeypatch, gds=device, device=device)
    engine = open_engine("kvikio")
    file, real, running = engine.open(pages), os.pread, set()

    def pread(fd, nbytes, offset):
        if offset == 0:
            raise OSError(errno.EFAULT, "planted")
        running.add(offset)
        time.sleep(0.1)
        data = real(fd, nbytes, offset)
        running.discard(offset)
        return data

    monkeypatch.setattr(os, "pread", pread)
    memory = aligned_bytes(4 * kvikio_module.TASK_BYTES)
    future = engine.submit([ReadOp(file, 0, memory)])
    with pytest.raises(OSError, match="planted") as caught:
        future.result(timeout=10)
    assert not running
    assert caught.value.filename == pages
    start_read = kvikio.CuFile._start

    def start(self, array, offset):
        if offset == 0:
            raise RuntimeError("planted too")
        return start_read(self, array, offset)

    monkeypatch.setattr(kvikio.CuFile, "_start", start)
    with pytest.raises(OSError, match="planted too"):
        engine.submit([ReadOp(file, 0, memory)]).result(timeout=10)
    assert not running
    engine.close()


@pytest.mark.parametrize(
    ("error", "of_the_process"),
    [
        (RuntimeError("cuFile error: IO failed"), False),
        (OSError(errno.EIO, "planted"), False),
        (OSError(errno.EFAULT, "planted"), True),
        (RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"), True),
    ],
)
def test_kvikio_says_whose_fault_it_was(monkeypatch, pages, error, of_the_process):
    kvikio = fake_kvikio.install(monkeypatch, gds=True, device=True)

    def refuse(*args):
        raise error

    monkeypatch.setattr(kvikio.CuFile, "raw_read_async", refuse)
    engine = open_engine("kvikio")
    with pytest.raises(OSError) as caught:
        engine.submit([ReadOp(engine.open(pages), 0, aligned_bytes(ALIGNMENT))]).result(timeout=10)
    assert is_of_the_process(caught.value) is of_the_process
    assert caught.value.filename == pages
    engine.close()


def test_gpudirect_waits_for_no_stream_of_the_model(monkeypatch, pages):
    """`pread` into device memory would synchronise the default stream."""
    kvikio = fake_kvikio.install(monkeypatch, gds=True, device=True)
    engine = open_engine("kvikio")
    memory = aligned_bytes(3 * ALIGNMENT)
    engine.submit([ReadOp(engine.open(pages), ALIGNMENT, memory)]).result(timeout=10)
    assert numbers_in(memory) == [1, 2, 3]
    assert kvikio.default_stream_synchronised == 0
    engine.close()


@pytest.mark.parametrize("closed_first", [False, True])
def test_slabs_are_registered_once_and_deregistered_when_they_go(monkeypatch, pages, closed_first):
    kvikio = fake_kvikio.install(monkeypatch, gds=True, device=True)
    engine = open_engine("kvikio")
    file = engine.open(pages)
    slabs = [aligned_bytes(8 * ALIGNMENT).view(8, ALIGNMENT) for _ in range(2)]
    for slab in slabs:
        engine.register(slab)
        engine.register(slab)  # refused, and no harm done
    assert sorted(kvikio.registered) == sorted(slab.untyped_storage().data_ptr() for slab in slabs)
    for slab in slabs:
        engine.submit([ReadOp(file, 5 * ALIGNMENT, slab[3:6].view(-1))]).result(timeout=10)
        assert numbers_in(slab[3:6]) == [5, 6, 7]
    engine.submit([ReadOp(file, 0, aligned_bytes(ALIGNMENT))]).result(timeout=10)
    assert kvikio.reads_registered == [True, True, False]
    if closed_first:
        engine.close()
        assert kvikio.registered == {}
    del slab
    slabs.pop()
    if not closed_first:
        engine.submit([]).result(timeout=10)
        assert list(kvikio.registered) == [slabs[0].untyped_storage().data_ptr()]
        slabs.clear()
        engine.close()
        assert kvikio.registered == {}


def test_stores_that_are_opened_again_share_the_streams_of_reads(monkeypatch):
    devices = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: devices.append(device) or object())
    kvikio_module._lane.cache_clear()
    for _ in range(5):
        for number in range(8):
            kvikio_module._lane(torch.device("cuda", 0), number)
    assert len(devices) == 8
    kvikio_module._lane.cache_clear()


@pytest.fixture
def asking(monkeypatch, tmp_path):
    """Query GPUDirect again, with a kvikio that returns given answers."""

    def ask(body: str, driver: bool = True) -> bool:
        package = tmp_path / "kvikio"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / "cufile_driver.py").write_text(
            f"import pathlib, time\npathlib.Path({str(tmp_path / 'asked')!r}).touch()\n{body}"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(kvikio_module, "_DRIVER", (str(package if driver else tmp_path / "none"),))
        kvikio_module.has_gpudirect.cache_clear()
        return kvikio_module.has_gpudirect()

    yield ask
    kvikio_module.has_gpudirect.cache_clear()


@pytest.mark.parametrize(
    ("body", "has_gpudirect"),
    [
        ("get = {'is_gds_available': True}.get", True),
        ("get = {'is_gds_available': False}.get", False),
        ("raise RuntimeError('no libcufile')", False),
    ],
)
def test_gpudirect_is_asked_for_in_another_process_and_once(asking, monkeypatch, body, has_gpudirect):
    assert asking(body) is has_gpudirect
    assert "kvikio" not in sys.modules
    monkeypatch.setattr(subprocess, "Popen", None)
    assert kvikio_module.has_gpudirect() is has_gpudirect  # once a process


def test_a_driver_that_hangs_keeps_nobody(asking, monkeypatch, caplog):
    monkeypatch.setattr(kvikio_module, "_PROBE_SECONDS", 1.0)
    started = time.monotonic()
    assert not asking("time.sleep(600)")
    assert time.monotonic() - started < 30
    assert "did not respond" in caplog.text


def test_without_the_driver_nobody_is_asked(asking, tmp_path):
    assert not asking("get = {'is_gds_available': True}.get", driver=False)
    assert not (tmp_path / "asked").exists()


def test_an_unknown_engine_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"'tape'.*kvikio, page_cache, posix"):
        open_engine("tape")


def test_the_engine_is_said_once_in_the_log(caplog, monkeypatch):
    with caplog.at_level("INFO", logger="hf_tiered_cache"):
        open_engine("posix")
    assert [r.message for r in caplog.records] == ["I/O engine: posix (8 threads, O_DIRECT where possible)"]


def test_the_page_cache_is_read_through_and_nothing_else_is_kept(pages, tmp_path):
    engine = open_engine("page_cache")
    assert not engine.open(pages).direct
    model, ids = build("llama"), prompt(64)
    with KVStore(tmp_path / "kv", engine=engine, host_memory=0) as store:
        store.precompute(model, ids[0, :48], progress=False)
        for _ in range(2):
            cache = TieredCache(model, store, record=False)
            model.generate(ids, past_key_values=cache, max_new_tokens=1)
            assert cache.stats.tokens_restored == 48
            assert cache.stats.host.hits == 0 < cache.stats.disk.bytes


def test_an_engine_stands_for_itself(tmp_path):
    engine = PosixEngine()
    assert open_engine(engine) is engine
    engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
@pytest.mark.parametrize("pages", [512, 513, 700, 2047])
def test_large_memory_begins_with_a_huge_page_and_is_whole(pages):
    several = [aligned_bytes(pages * ALIGNMENT) for _ in range(3)]
    assert [memory.data_ptr() % (2 << 20) for memory in several] == [0, 0, 0]
    for number, memory in enumerate(several):
        memory.fill_(number)
    assert [memory.numel() for memory in several] == [pages * ALIGNMENT] * 3
    assert all(bool((memory == number).all()) for number, memory in enumerate(several))
