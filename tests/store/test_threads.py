"""Threads for calls that may hang."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from hf_tiered_cache.errors import StoreClosedError
from hf_tiered_cache.store.engines.base import in_threads
from hf_tiered_cache.store.threads import DaemonPool


def test_threads_run_calls_at_the_same_time_up_to_their_number():
    threads, gate, running = DaemonPool(3, "test"), threading.Event(), []

    def call():
        running.append(threading.get_ident())
        gate.wait(30)
        return len(running)

    futures = [threads.submit(call) for _ in range(5)]
    while len(running) < 3:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(set(running)) == len(running) == 3
    gate.set()
    assert all(future.result(30) for future in futures)
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(30)
    assert len(threads._threads) == 3
    threads.close(30)
    with pytest.raises(RuntimeError):
        threads.submit(call)


def test_closing_drops_what_has_not_begun_and_waits_for_nothing_that_hangs():
    threads, gate = DaemonPool(1, "test"), threading.Event()
    hanging = threads.submit(lambda: gate.wait(60))
    while not hanging.running():
        time.sleep(0.001)
    waiting = threads.submit(lambda: None)
    threads.close(0.01)
    assert waiting.cancelled()
    assert not hanging.done()
    gate.set()


@pytest.mark.parametrize("began", [0, 1])
def test_a_batch_of_reads_is_resolved_if_the_threads_are_closed(began):
    """Reads of which no thread began end with an error; one thread that began reads all."""
    threads, gate, started = DaemonPool(2, "test"), threading.Event(), threading.Event()

    def read(size):
        started.set()
        gate.wait(30)
        return size

    hanging = [threads.submit(gate.wait, 30) for _ in range(2 - began)]
    while not all(future.running() for future in hanging):
        time.sleep(0.001)
    batch = in_threads(threads, 2, [1, 2, 3], read)
    assert started.wait(30 * began) == bool(began)
    threads.close(0.01)
    gate.set()
    if began:
        assert batch.result(30) == 6
    else:
        with pytest.raises(StoreClosedError):
            batch.result(30)


def test_a_call_that_hangs_keeps_no_process_alive():
    code = """
import threading
from hf_tiered_cache.store.threads import DaemonPool
pool = DaemonPool(2, "test")
future = pool.submit(threading.Event().wait)
while not future.running():
    pass
print("ends")
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout == "ends\n"
