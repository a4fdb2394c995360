"""Reads of an object store that take unusually long are requested a second time."""

from __future__ import annotations

import itertools
import time
from contextlib import closing

import pytest

from hf_tiered_cache import KVStore

obstore = pytest.importorskip("obstore", reason="needs obstore: pip install obstore")
from hf_tiered_cache.store.backends.object_store import ObjectStoreBackend  # noqa: E402

_numbers = itertools.count()
_HANGS = 20.0
_USUAL = 0.05  # seconds that the reads before took: one is requested again after twice as long


class Client:
    """Client of an object store whose requests take the given seconds, in turn, or fail with the given error."""

    def __init__(self):
        self.answers, self.requests = iter(()), 0

    def __getattr__(self, name):
        return getattr(obstore, name)

    def get(self, store, name, *, options):
        self.requests += 1
        answer = next(self.answers, 0.0)
        if isinstance(answer, Exception):
            raise answer
        time.sleep(answer)
        return obstore.get(store, name, options=options)


@pytest.fixture
def backend():
    with closing(ObjectStoreBackend(f"memory://hedged-{next(_numbers)}")) as backend:
        backend.client = Client()
        backend.put_object("object", b"content", replace=False)
        yield backend


@pytest.fixture
def read(backend):
    """Return a function that reads an object, or its beginning as a lookup does, with these answers of the client."""
    version = backend.find_object("object").version

    def read(*answers, look_up=False):
        backend.client.answers = iter(answers)
        if look_up:
            return backend.get_beginnings(["object", "missing"], 7)["object"]
        return backend.get_object("object", version, 0, 7)

    for reads in backend.hedges:  # not measured: a busy machine would request some of them again
        reads._seconds.extend([_USUAL] * 40)
        reads._allowed = 2.0
    return read


@pytest.mark.parametrize("look_up", [False, True])
def test_a_read_that_hangs_is_requested_again_and_the_first_answer_counts(backend, read, tmp_path, look_up):
    began = time.monotonic()
    assert read(_HANGS, look_up=look_up) == b"content"
    assert time.monotonic() - began < _HANGS / 2
    assert [(reads.hedged, reads.won) for reads in backend.hedges] == [(1 - look_up,) * 2, (0 + look_up,) * 2]
    with KVStore(tmp_path / "store", remote=backend) as store:
        remote = store.stats.remote
        assert remote.hedged_reads == sum(reads.hedged for reads in backend.hedges)
        assert remote.won_hedges == sum(reads.won for reads in backend.hedges)


def test_the_first_request_may_still_win(backend, read):
    assert read(0.5, _HANGS) == b"content"
    assert [(reads.hedged, reads.won) for reads in backend.hedges] == [(1, 0), (0, 0)]


def test_a_second_request_that_fails_does_no_harm(backend, read):
    assert read(0.5, obstore.exceptions.GenericError("slow down")) == b"content"
    with pytest.raises(OSError, match="GenericError"):
        read(obstore.exceptions.GenericError("down"))


def test_a_second_request_is_sent_for_one_of_twenty_reads_at_most(backend, read):
    before = backend.client.requests
    for _ in range(8):
        read(0.2, 0.2)
        for _ in range(3):
            read()
    assert 0 < backend.client.requests - before - 32 <= 0.05 * (40 + 32)


def test_reads_that_usually_take_as_long_are_not_requested_again(backend):
    reads = backend.hedges[0]
    reads._seconds.extend([0.02] * 90 + [0.03] * 10)
    assert reads._limit() == 0.04
    reads._seconds.extend([0.02] * 90 + [0.5] * 10)
    assert reads._limit() == 0.5


def test_no_read_is_requested_twice_before_some_were_measured(backend):
    version = backend.find_object("object").version
    for _ in range(10):
        backend.client.answers = iter([0.05, 0.0])
        backend.get_object("object", version, 0, 7)
    assert backend.client.requests == 10


def test_reads_that_are_closed_are_errors_of_the_store(backend, read):
    running_call = backend._ranges.submit(lambda: time.sleep(0.3))
    waiting = [backend._ranges.submit(lambda: time.sleep(0.3)) for _ in range(64)][-1]  # more than there are threads
    backend.close()
    for call in (waiting, read, lambda: read(look_up=True)):
        with pytest.raises(OSError, match="the store is closed"):
            call()
    running_call()
