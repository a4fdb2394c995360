"""Engines: batches arrive whole or fail as a whole, whatever the engine; the planner loses and doubles nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time

import fake_kvikio
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_tiered_cache.errors import ConfigError, EngineUnavailableError, StoreClosedError
from hf_tiered_cache.geometry import ALIGNMENT
from hf_tiered_cache.store.engines import PosixEngine, ReadOp, open_engine
from hf_tiered_cache.store.engines.base import MAX_CALL_BYTES, MAX_IOVECS, READ_THROUGH_BYTES, EngineFile, coalesce
from hf_tiered_cache.store.memory import aligned_bytes

PAGES = 1500


@pytest.fixture
def pages(tmp_path):
    """A file of numbered pages."""
    path = tmp_path / "pages"
    numbers = np.repeat(np.arange(PAGES, dtype=np.uint16), ALIGNMENT // 2)
    path.write_bytes(numbers.tobytes())
    return str(path)


@pytest.fixture(params=["posix", "posix buffered", "kvikio", "kvikio with GDS"])
def engine(request, monkeypatch):
    if request.param.startswith("kvikio"):
        fake_kvikio.install(monkeypatch, gds="GDS" in request.param)
        made = open_engine("kvikio")
    else:
        made = PosixEngine(direct=request.param == "posix")
    yield made
    made.close()


def numbers_in(memory: torch.Tensor) -> list[int]:
    return memory.view(-1, ALIGNMENT).view(torch.uint8).numpy().view(np.uint16)[:, 0].tolist()


runs = st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(1, 300)), max_size=30)


@given(runs)
def test_a_plan_covers_every_byte_once_and_keeps_its_bounds(asked):
    files = [EngineFile(), EngineFile()]
    ops = [
        ReadOp(files[i % 2], first * ALIGNMENT, torch.empty(count * ALIGNMENT, dtype=torch.uint8))
        for i, (first, count) in enumerate(asked)
    ]
    calls = coalesce(ops)
    covered: dict[int, tuple[EngineFile, int]] = {}
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
                    assert address not in covered
                    covered[address] = (call.file, offset + byte)
                offset += piece.numel()
        assert offset == call.offset + call.nbytes
    wanted = {
        op.dest.data_ptr() + byte: (op.file, op.offset + byte)
        for op in ops
        for byte in range(0, op.dest.numel(), ALIGNMENT)
    }
    assert covered == wanted


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


@given(asked=runs)
def test_posix_brings_what_was_asked_for(tmp_path_factory, asked):
    path = tmp_path_factory.getbasetemp() / "numbered"
    if not path.exists():
        path.write_bytes(np.repeat(np.arange(PAGES, dtype=np.uint16), ALIGNMENT // 2).tobytes())
    engine = PosixEngine(threads=3)
    file = engine.open(str(path))
    asked = [(first, min(count, PAGES - first)) for first, count in asked]
    memory = [aligned_bytes(count * ALIGNMENT) for _, count in asked]
    ops = [ReadOp(file, first * ALIGNMENT, m) for (first, _), m in zip(asked, memory, strict=True)]
    report = engine.submit(ops).result(timeout=60)
    for (first, count), m in zip(asked, memory, strict=True):
        assert numbers_in(m) == list(range(first, first + count))
    assert report.nbytes >= sum(m.numel() for m in memory)
    engine.close()


def test_every_engine_fills_scattered_destinations(engine, pages):
    file = engine.open(pages)
    memory = aligned_bytes(400 * ALIGNMENT).view(400, ALIGNMENT)
    ops = [ReadOp(file, (PAGES - 1 - i) * ALIGNMENT, memory[i]) for i in range(0, 400, 2)]
    ops.append(ReadOp(file, 0, memory[101]))
    report = engine.submit(ops).result(timeout=60)
    assert numbers_in(memory[0:400:2].contiguous()) == [PAGES - 1 - i for i in range(0, 400, 2)]
    assert numbers_in(memory[101]) == [0]
    assert report.nbytes >= 201 * ALIGNMENT


def test_an_empty_batch_is_done(engine):
    assert engine.submit([]).result(timeout=10).nbytes == 0


def test_reading_past_the_end_fails_with_an_oserror(engine, pages):
    file = engine.open(pages)
    memory = aligned_bytes(4 * ALIGNMENT)
    with pytest.raises(OSError):
        engine.submit([ReadOp(file, (PAGES - 2) * ALIGNMENT, memory)]).result(timeout=10)


def test_opening_a_missing_file_is_an_oserror(engine, tmp_path):
    with pytest.raises(FileNotFoundError):
        engine.open(str(tmp_path / "none"))


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


def test_auto_takes_kvikio_where_cuda_is_and_posix_elsewhere(monkeypatch):
    assert open_engine("auto").name == ("kvikio" if torch.cuda.is_available() else "posix")
    fake_kvikio.install(monkeypatch, gds=False)
    assert open_engine("auto").name == "kvikio"


def test_without_cuda_kvikio_is_never_called(monkeypatch):
    fake_kvikio.install(monkeypatch, gds=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EngineUnavailableError, match="CUDA"):
        open_engine("kvikio")
    assert open_engine("auto").name == "posix"


def test_a_kvikio_that_lacks_a_setting_is_not_taken(monkeypatch):
    fake_kvikio.install(monkeypatch, gds=False)

    def refuse(*args):
        raise KeyError("auto_direct_io_read")

    monkeypatch.setattr(sys.modules["kvikio.defaults"], "set", refuse)
    with pytest.raises(EngineUnavailableError, match="or newer"):
        open_engine("kvikio")
    assert open_engine("auto").name == "posix"


def test_a_kvikio_that_does_not_import_is_not_taken(monkeypatch):
    fake_kvikio.install(monkeypatch, gds=False)

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


@pytest.mark.parametrize("what", ["closed", "the second read"])
def test_a_kvikio_batch_that_cannot_be_submitted_leaves_no_read_under_way(monkeypatch, pages, what):
    """Its destinations go to others at once."""
    fake_kvikio.install(monkeypatch, gds=False)
    engine = open_engine("kvikio")
    file = engine.open(pages)
    real, slow, started = file.cufile.pread, os.pread, []
    monkeypatch.setattr(os, "pread", lambda *args: (time.sleep(0.1), slow(*args))[1])

    def pread(*args):
        if what != "closed" and started:
            raise RuntimeError("planted")
        started.append(real(*args))
        return started[-1]

    monkeypatch.setattr(file.cufile, "pread", pread)
    if what == "closed":
        engine.close()
    memory = aligned_bytes(2 * ALIGNMENT).view(2, ALIGNMENT)
    with pytest.raises(StoreClosedError if what == "closed" else RuntimeError):
        engine.submit([ReadOp(file, i * ALIGNMENT, memory[i]) for i in range(2)])
    assert started
    assert all(read.future.done() for read in started)


def test_an_unknown_engine_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"'tape'.*kvikio, posix"):
        open_engine("tape")


def test_the_engine_is_said_once_in_the_log(caplog, monkeypatch):
    with caplog.at_level("INFO", logger="hf_tiered_cache"):
        open_engine("posix")
    assert [r.message for r in caplog.records] == ["I/O engine: posix (8 threads, O_DIRECT where possible)"]


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
