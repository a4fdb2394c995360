"""Ctrl-C at any moment, finalizers in any thread, children forked at any time: nothing stays held, nobody waits."""

from __future__ import annotations

import atexit
import functools
import gc
import linecache
import os
import signal
import sqlite3
import sys
import threading
import time
import weakref

import numpy as np
import processes
import pytest
import torch
from families import build, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import hashes, open_store, runs_of, segment
from side_stream import Pending
from thorough import amount

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache.sequence import SequenceState
from hf_tiered_cache.cache.storage import _seal
from hf_tiered_cache.patches.scope import current
from hf_tiered_cache.store.catalogue import Catalogue
from hf_tiered_cache.store.database import transaction
from hf_tiered_cache.store.disk import SegmentStore
from hf_tiered_cache.store.engines.posix import PosixFile
from hf_tiered_cache.store.threads import Worker
from hf_tiered_cache.store.tree import open_regular
from hf_tiered_cache.tiers import device as device_module
from hf_tiered_cache.tiers.collector import StatsCollector
from hf_tiered_cache.tiers.device import CopyStream
from hf_tiered_cache.tiers.handles import BlockRequest
from hf_tiered_cache.tiers.residency import Residency
from hf_tiered_cache.tiers.slabs import ORPHANED, RESERVED

CPU = torch.device("cpu")
CHUNKS = 10
HITS = amount(500, 5000)
"""Number of signals at random times."""
GREEDY = {"do_sample": False, "max_new_tokens": 3}


class Interrupt(KeyboardInterrupt):
    """Exception that a signal handler raises."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Create two segments of ten chunks, and return their blocks by segment and KV cache group."""
    store, blocks = open_store(tmp_path_factory.mktemp("store")), {}
    for seed in "ab":
        header, chain, block_groups = segment(hashes(CHUNKS, seed))
        store.publish(header, chain, block_groups)
        blocks |= {(header.id, block_group): data for block_group, data in enumerate(block_groups)}
    return [store.reader(name) for name in sorted({name for name, _ in blocks})], blocks


def interrupted(action, when, paths=(f"{os.sep}tiers{os.sep}",)):
    """Run `action`; at its `when`-th step within these files an interrupt comes. Returns whether it did."""
    steps_left = when

    def trace(frame, event, argument):
        nonlocal steps_left
        if not any(name in frame.f_code.co_filename for name in paths):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event in ("call", "line") and not line.startswith(
            "with "
        ):  # the interpreter looks at signals at neither end
            steps_left -= 1
            if steps_left == 0:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def check_whole(residency, readers, blocks):
    """Assert that every block arrives and is right, and that nothing is held afterwards."""
    for reader in readers:
        for block_group in (0, 1):
            lease = residency.fetch([BlockRequest(reader, block_group, np.arange(CHUNKS))], CPU, StatsCollector())
            lease.wait()
            assert torch.equal(torch.cat([run for _, run in runs_of(lease)]), blocks[reader.id, block_group])
            residency.release(lease)
    del lease
    deadline = time.monotonic() + 10
    while residency._pins and time.monotonic() < deadline:  # a read that was given up may be under way
        time.sleep(0.001)
        residency.segments()
    assert not residency._pins
    for tier in residency.tiers:
        for pool in tier.pools():
            assert not pool.pins.any()
            assert not np.isin(pool.owner, (RESERVED, ORPHANED)).any()
        real = sum(slab.numel() for pool in tier.pools() for slab in pool.slabs if slab is not None)
        assert real <= tier.allocated <= tier.budget


@pytest.mark.parametrize("direct", [False, True])
@settings(max_examples=4 * settings.default.max_examples)
@given(when=st.integers(1, 400), host=st.integers(12, 60), device=st.sampled_from([0, 12, 30]), kind=st.integers(0, 3))
def test_an_interrupt_at_any_step_leaves_nothing_held(stored, when, host, device, kind, direct):
    readers, blocks = stored
    kinds = frozenset({"cpu"}) if device else frozenset()
    residency = Residency(host * 4096, device * 4096, device_types=kinds, direct=direct)
    first, second = readers

    def serve(reader, block_group):
        lease = residency.fetch([BlockRequest(reader, block_group, np.arange(CHUNKS))], CPU, StatsCollector())
        lease.wait()
        residency.release(lease)

    def action():
        serve(first, 0)
        if kind == 1:
            residency.forget([first.id])
        elif kind == 2:
            residency.clear()
        elif kind == 3:
            residency.admit(second.owners[0], blocks[second.id, 0])
        serve(second, 0)
        serve(first, 1)

    serve(first, 0)
    interrupted(action, when)
    check_whole(residency, readers, blocks)


def test_real_signals_leave_nothing_held(stored):
    readers, blocks = stored
    residency = Residency(40 * 4096, 20 * 4096, device_types=frozenset({"cpu"}))

    def raise_it(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, raise_it)
    generator, deadline, hits = np.random.default_rng(0), time.monotonic() + 60, 0
    try:
        while hits < HITS and time.monotonic() < deadline:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-3 * generator.random())
                for reader in readers:
                    lease = residency.fetch([BlockRequest(reader, 0, np.arange(CHUNKS))], CPU, StatsCollector())
                    lease.wait()
                    residency.release(lease)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                hits += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupt:  # between the two
        pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hits > 50
    lease = None
    check_whole(residency, readers, blocks)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_real_signals_lose_no_descriptor(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: None)  # pytest's keeps what a finalizer was about
    path, hits = tmp_path / "file", 0
    path.write_bytes(bytes(4096))

    def raise_it(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, raise_it)
    generator, deadline = np.random.default_rng(0), time.monotonic() + 60
    while hits < HITS and time.monotonic() < deadline:
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-4 * generator.random())
            for _ in range(1000):  # an interrupt in a finalizer is swallowed
                PosixFile(str(path), direct=True)
                with open_regular(path):
                    pass
        except Interrupt:
            hits += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    gc.collect()
    assert hits >= HITS
    assert not descriptors(tmp_path)


INTERRUPTING_HOOK = """
import os, sys
from hf_tiered_cache.store.tree import READ_FLAGS, open_file

def interrupt(event, arguments):
    if event == "open" and isinstance(arguments[0], int):  # a file object takes a descriptor
        raise KeyboardInterrupt

sys.addaudithook(interrupt)
before = os.listdir("/proc/self/fd")
try:
    open_file(sys.argv[1], READ_FLAGS)
except KeyboardInterrupt:
    print(os.listdir("/proc/self/fd") == before)
"""


def test_an_interrupt_in_an_audit_hook_loses_no_descriptor(tmp_path):
    """Signals are handled in hooks that are Python code, such as that of `filelock` on Python 3.12."""
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", INTERRUPTING_HOOK, str(tmp_path / "file")]
    ended = processes.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["True"]


def test_real_signals_leave_no_thread(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: None)

    def raise_it(*_):
        raise Interrupt

    threads = len(os.listdir("/proc/self/task"))
    before = signal.signal(signal.SIGALRM, raise_it)
    generator, deadline, hits = np.random.default_rng(0), time.monotonic() + 60, 0
    while hits < HITS and time.monotonic() < deadline:
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-3 * generator.random())
            for _ in range(1000):  # an interrupt in a finalizer is swallowed
                Worker()
        except Interrupt:
            hits += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    gc.collect()
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert hits >= HITS
    assert len(os.listdir("/proc/self/task")) <= threads


@pytest.mark.parametrize("device", [0, 30])
def test_memory_may_be_cleared_while_the_device_is_not_done_with_it(stored, monkeypatch, device):
    readers, blocks = stored
    pending = Pending()

    class Slow(CopyStream):
        def computed(self):
            return pending

    monkeypatch.setattr(device_module, "copy_stream", lambda device: Slow())
    residency = Residency(60 * 4096, device * 4096, device_types=frozenset({"cpu"}))
    for _ in range(3):
        lease = residency.fetch([BlockRequest(readers[0], 0, np.arange(CHUNKS))], CPU, StatsCollector())
        lease.wait()
        residency.release(lease)
    second_lease = residency.fetch([BlockRequest(readers[1], 0, np.arange(CHUNKS))], CPU, StatsCollector())
    second_lease.wait()
    residency.clear()
    assert torch.equal(torch.cat([run for _, run in runs_of(second_lease)]), blocks[readers[1].id, 0])
    assert all(tier.allocated <= tier.budget for tier in residency.tiers)
    assert residency.segments() == set()
    pending.done = True
    residency.release(second_lease)
    check_whole(residency, readers, blocks)


def test_a_fault_of_our_own_hides_no_segment(model, tmp_path, monkeypatch):
    """Only errors of a file count against it."""
    with KVStore(tmp_path, host_memory=0) as store:
        store.precompute(model, prompt(100), progress=False)
        with monkeypatch.context() as patch:
            patch.setattr(Residency, "_arrive", lambda *args: {}[0])
            cache = TieredCache(model, store)
            output = model.generate(prompt(100), past_key_values=cache, **GREEDY)
            assert cache.stats.details.recomputed
        second_cache = TieredCache(model, store)
        assert torch.equal(model.generate(prompt(100), past_key_values=second_cache, **GREEDY), output)
        assert second_cache.stats.tokens_restored == 96


def test_a_cache_whose_pass_was_interrupted_before_it_was_noted_goes_on_with_any_prompt(model, tmp_path, monkeypatch):
    """Its layers then hold tokens that it does not know."""
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        with monkeypatch.context() as patch:
            patch.setattr(SequenceState, "commit", lambda *args: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                model.generate(prompt(100), past_key_values=cache, **GREEDY)
        for seed in (1, 2):
            output = model.generate(prompt(90, seed=seed), past_key_values=cache, **GREEDY)
            assert torch.equal(output, model.generate(prompt(90, seed=seed), **GREEDY))


@given(when=st.integers(1, 160), method=st.sampled_from(["exact", "h2o:budget=0.5"]))
def test_an_interrupt_on_the_way_into_or_out_of_a_pass_leaves_the_model_as_it_was(shared, when, method):
    model, store = shared
    cache, ids = TieredCache(model, store, method=method, record=False), prompt(100)
    paths = ("contextlib.py", f"{os.sep}scope.py")
    if interrupted(lambda: model.generate(ids, past_key_values=cache, **GREEDY), when, paths):
        assert current() is None
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert torch.equal(model.generate(prompt(90, seed=7), **GREEDY), shared_answer(model))
        second_output = model.generate(prompt(90, seed=7), past_key_values=cache, **GREEDY)
        assert torch.equal(second_output, shared_answer(model))


@pytest.fixture(scope="module")
def shared(model, tmp_path_factory):
    with KVStore(tmp_path_factory.mktemp("shared")) as store:
        store.precompute(model, prompt(100), progress=False)
        shared_answer(model)
        yield model, store


@functools.cache
def shared_answer(model):
    return model.generate(prompt(90, seed=7), **GREEDY)


@pytest.fixture(scope="module")
def sharp():
    """Build a model whose answers depend strongly on what it attends to."""
    model = build("llama", initializer_range=0.2)
    prompts = [prompt(144, seed=3)[:, :length] for length in (96, 144)]
    return model, prompts, [model.generate(ids, **GREEDY) for ids in prompts]


@settings(max_examples=settings.default.max_examples // 2)
@given(when=st.integers(1, 500))
def test_an_interrupt_while_kv_is_recorded_stores_nothing_wrong_and_fails_no_other_request(
    sharp, tmp_path_factory, when
):
    model, prompts, answers = sharp
    with KVStore(tmp_path_factory.mktemp("recorded"), host_memory=0) as store:
        cache = TieredCache(model, store)

        def action():
            with torch.no_grad():
                model(input_ids=prompts[0], past_key_values=cache, logits_to_keep=1)
            store._storage.seal()
            cache.crop(-12)

        interrupted(action, when, (f"{os.sep}record.py", f"{os.sep}caught.py"))
        store._storage.seal()
        for _ in range(2):
            for ids, answer in zip(prompts, answers, strict=True):
                for request_cache in (TieredCache(model, store), cache):
                    assert torch.equal(model.generate(ids, past_key_values=request_cache, **GREEDY), answer)


def test_caches_may_be_made_while_a_store_is_closed(tmp_path):
    """The set of recorders changes under who goes through it."""

    class Idle:
        def finish(self):
            return True

    recorders, lock, stop = weakref.WeakSet(), threading.RLock(), threading.Event()

    def register():
        idle_recorders = []
        while not stop.is_set():
            idle_recorders = [*idle_recorders[-50:], Idle()]
            with lock:
                recorders.add(idle_recorders[-1])

    thread, interval = threading.Thread(target=register), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(1000):
            assert _seal(recorders, lock)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def descriptors(root):
    targets = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [target for target in targets if target.startswith(str(root))]


@pytest.mark.parametrize("target", ["store.index.Index.scan", "cache.storage.ScoreTable.load"])
def test_an_interrupt_while_a_store_is_opened_leaves_nothing_open(tmp_path, monkeypatch, target):
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(f"hf_tiered_cache.{target}", lambda *args: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            KVStore(tmp_path)
    deadline = time.monotonic() + 10
    while (set(threading.enumerate()) - before or descriptors(tmp_path)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before
    assert not descriptors(tmp_path)


def test_an_interrupt_leaves_no_transaction_open(tmp_path):
    """Otherwise, all other processes would be locked out."""
    db = sqlite3.connect(tmp_path / "catalogue.sqlite", isolation_level=None)

    class Interrupted:
        def execute(self, statement):
            db.execute(statement)
            if statement.startswith("BEGIN"):
                raise Interrupt

    with pytest.raises(Interrupt), transaction(Interrupted()):
        pass
    assert not db.in_transaction
    db.close()


@pytest.mark.parametrize("when", ["before the row", "after the row"])
def test_a_segment_whose_publication_is_interrupted_has_a_row_or_no_file(tmp_path, monkeypatch, when):
    store, add = open_store(tmp_path), Catalogue.add

    def interrupted_add(self, rows, publish):
        if when == "after the row":
            add(self, rows, publish)
        else:
            publish()
        raise Interrupt

    monkeypatch.setattr(Catalogue, "add", interrupted_add)
    with pytest.raises(Interrupt):
        store.publish(*segment(hashes(4, "a")))
    files = {path.stem for path in (tmp_path / "segments").iterdir()}
    assert files == store.index.catalogue.ids()
    assert len(files) == (when == "after the row")


# --- finalizers


def test_a_collection_in_the_writers_thread_waits_for_nobody(model, tmp_path, monkeypatch):
    """It may meet a cache that another thread is sealing, while that one waits for the writer to make room."""
    publish, entered = SegmentStore.publish, threading.Event()

    def slow(self, *args, **kwargs):
        entered.set()
        time.sleep(0.3)
        gc.collect()
        return publish(self, *args, **kwargs)

    monkeypatch.setattr(SegmentStore, "publish", slow)
    store = KVStore(tmp_path, queue_memory="1KiB")
    caches = [TieredCache(model, store) for _ in range(2)]
    with torch.no_grad():
        for seed, cache in enumerate(caches):
            model(input_ids=prompt(100, seed=seed), past_key_values=cache, logits_to_keep=1)
    caches[0].store_now()
    entered.wait()
    flushing = threading.Thread(target=store.flush, daemon=True)
    flushing.start()
    time.sleep(0.1)
    cycle = [caches.pop()]
    cycle.append(cycle)
    del cycle, cache
    flushing.join(30)
    assert not flushing.is_alive()
    assert sum(row.tokens for row in store.segments()) == 2 * 96
    store.close()


def test_a_store_may_be_collected_in_its_own_threads(model, tmp_path):
    """Everything is written and closed, and no thread remains."""
    before, unraisable = set(threading.enumerate()), []
    hook, sys.unraisablehook = sys.unraisablehook, unraisable.append
    try:
        store = KVStore(tmp_path)
        writer = store._storage.writer
        model.generate(prompt(100), past_key_values=TieredCache(model, store), **GREEDY)
        release = threading.Event()
        writer.later(release.wait)
        holder = [store]
        del store
        writer.later(holder.clear)  # the last reference goes there
        release.set()
        writer.close()
        del writer
        deadline = time.monotonic() + 10
        while set(threading.enumerate()) - before and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
    finally:
        sys.unraisablehook = hook
    assert not set(threading.enumerate()) - before
    assert not unraisable
    with KVStore(tmp_path) as second_store:
        assert sum(row.tokens for row in second_store.segments()) == 96


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_leaves_at_once(model, tmp_path):
    """Other threads may have held locks at the fork."""
    store = KVStore(tmp_path)
    cache = TieredCache(model, store)
    model.generate(prompt(100), past_key_values=cache, **GREEDY)
    locks = [
        cache._executor.sequence.recorder._lock,
        store._storage._lock,
        store._storage.writer._lock,
        store._storage.residency._lock,
        store._storage.disk.index.catalogue._lock,
    ]
    locks_held, leave = threading.Event(), threading.Event()

    def hold():
        for lock in locks:
            lock.acquire()
        locks_held.set()
        leave.wait()
        for lock in reversed(locks):
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    locks_held.wait()
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()  # as at the end of any program
        cache = store = None
        os._exit(0)
    deadline = time.monotonic() + 20
    while not (pid_and_status := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not pid_and_status[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    leave.set()
    thread.join()
    store.close()
    assert pid_and_status[0] == child
