"""Files that are named like segments and are none: a counted miss, in bounded time and memory, and the store opens."""

from __future__ import annotations

import copy
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest
import segments
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import hashes, open_store, read_back, read_file, segment, without_catalogue

from hf_tiered_cache.errors import FormatError, IntegrityError, OtherFormatError
from hf_tiered_cache.passages.finder import PassageIndex
from hf_tiered_cache.restore.hashes import longest_prefix
from hf_tiered_cache.store import maintain
from hf_tiered_cache.store.container import xxh3
from hf_tiered_cache.store.format import HEADER_BYTES, MAGIC, OLDEST_VERSION, PREFIX, decode_header, lay_out
from hf_tiered_cache.tiers.scores import LRU, ScoreTable

NAME = "0" * 32
NUMBERS = [True, -1, 0, 3, 2**31, 2**63, 2**70, 1e300, float("nan"), float("inf")]
ODD = [*NUMBERS, None, "", "load", "float32", "../../x", [], [[]], {}, [1] * 8, ["a"] * 8, {"a": 1}]


def page_of(path):
    page = path.read_bytes()[:HEADER_BYTES]
    length = PREFIX.unpack_from(page)[2]
    return json.loads(page[PREFIX.size : PREFIX.size + length])


def forge(path, data, size=None, version=OLDEST_VERSION):
    """Write a page with a right checksum over what stands at `path`, or a sparse file of `size` bytes."""
    text = data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()
    page = bytearray(PREFIX.pack(MAGIC, version, len(text), 0) + text).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]
    PREFIX.pack_into(page, 0, MAGIC, version, len(text), xxh3(bytes(page)))
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.write(page)
        if size is not None:
            file.truncate(size)


def forge_section(path, name, data):
    """Write `data`, a whole file, to `path`; section `name` is other than it was, and gets a right checksum."""
    path.write_bytes(data)
    page = page_of(path)
    start, size, _ = page["sections"][name]
    page["sections"][name][2] = xxh3(bytes(data[start : start + size]))
    forge(path, page)


def places(data, prefix=()):
    """Yield the path to every value."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*prefix, key)
        yield from places(value, (*prefix, key))


def put_value(page, way, value):
    """Put a copy of `value` at the end of a way (see `places`)."""
    holder = page
    for key in way[:-1]:
        holder = holder[key]
    holder[way[-1]] = copy.deepcopy(value)


def open_forged(root, name, content, change):
    """Open a store after `change` changed the header page, a dict, of its only segment, a file of `content`."""
    path = root / "segments" / f"{name}.kv"
    path.write_bytes(content)
    change(page := page_of(path))
    forge(path, page)
    without_catalogue(root)
    return open_store(root)


def assert_counted(store, name):
    """Assert that a file that is not served was counted, or is one of the catalogue's."""
    stats = store.counters.snapshot()
    counted = stats.damaged_files + stats.read_errors == 1 or stats.newer_files > 0  # these stay, and count again
    assert counted or store.index.catalogue.ids() == {name}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    store = open_store(tmp_path_factory.mktemp("forged"))
    header, chain, blocks = segment(hashes(4), model={"name": "small"}, label="a text")
    assert store.publish(header, chain, blocks)
    content = store.path(header.id).read_bytes()
    store.close()
    return store.backend.root, header.id, content


@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_any_value_anywhere_in_a_header_is_a_counted_miss(made, data):
    def put(page):
        for _ in range(data.draw(st.integers(1, 2))):
            put_value(page, data.draw(st.sampled_from(list(places(page)))), data.draw(st.sampled_from(ODD)))

    root, name, content = made
    started = time.monotonic()
    store = open_forged(root, name, content, put)
    rows = store.find(hashes(4))
    if rows:
        with suppress(IntegrityError):  # cut otherwise into as many bytes, blocks fail their checksums: a miss, too
            read_back(store, name)  # what still serves is what was there
    else:
        assert_counted(store, name)
    assert maintain.verify(store).segments == 1
    assert time.monotonic() - started < 5
    store.close()


def test_a_text_in_place_of_the_geometry_is_damage(made):
    """Parsed letter by letter, its seventh would be a codec of a newer version."""
    root, name, content = made
    path = root / "segments" / f"{name}.kv"
    path.write_bytes(content)
    forge(path, page_of(path) | {"geometry": "float32"})
    with pytest.raises(FormatError, match="geometry") as caught:
        read_file(path)
    assert not isinstance(caught.value, OtherFormatError)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
def test_json_that_is_nested_deeply_is_no_header(tmp_path, opening):
    path = tmp_path / f"{NAME}.kv"
    forge(path, (opening * 4072)[: 4072 // len(opening) * len(opening)], 1 << 20)
    with pytest.raises(FormatError):
        read_file(path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a segment", "link to nothing", "device", "socket"])
def test_what_is_no_regular_file_is_not_opened(tmp_path, monkeypatch, kind):
    store = open_store(tmp_path)
    header, chain, blocks = segment(hashes(4))
    assert store.publish(header, chain, blocks)
    store.close()
    path = tmp_path / "segments" / f"{NAME}.kv"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "in it").mkdir(parents=True)
    elif kind == "socket":
        monkeypatch.chdir(path.parent)  # the name of a socket is short
        socket.socket(socket.AF_UNIX).bind(path.name)
    else:
        path.symlink_to({"link to a segment": store.path(header.id), "device": "/dev/zero"}.get(kind, "nothing"))
    started = time.monotonic()
    store = open_store(tmp_path)
    assert store.index.catalogue.ids() == {header.id}
    assert store.counters.snapshot().damaged_files == 1
    assert store.reader(NAME) is None
    assert list(maintain.verify(store).bad) in ([NAME], [])
    maintain.gc(store)
    assert read_back(store, header.id)
    assert time.monotonic() - started < 5


OPEN = """
import sys, resource
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from segments import *
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = open_store(Path(sys.argv[2]))
after, counted = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, store.counters.snapshot()
print((after - before) >> 10, counted.read_errors + counted.damaged_files)
"""


def test_a_sparse_file_takes_no_memory(tmp_path):
    """The file has a page of 4 KiB that promises tables of gigabytes."""
    store = open_store(tmp_path)
    header, _chain, _blocks = segment(hashes(4))
    assert store.publish(*segment(hashes(4)))
    path = store.path(header.id)
    page = page_of(path)
    store.close()
    count = 1 << 28
    huge = lay_out(replace(header, shape=replace(header.shape, tokens=count // 16 * 16)), count // 16)
    page |= {"tokens": count // 16 * 16, "links": count // 16}
    for name in page["sections"]:
        page["sections"][name][:2] = [getattr(huge, name).offset, getattr(huge, name).nbytes]
    forge(path, page, huge.file_bytes)
    assert decode_header(path.open("rb").read(HEADER_BYTES))[0].blocks == huge.blocks  # nothing is wrong with the page
    assert huge.blocks.offset > 300 << 20 > path.stat().st_blocks * 512
    without_catalogue(tmp_path)
    arguments = [sys.executable, "-c", OPEN, os.path.dirname(segments.__file__), str(tmp_path)]
    mebibytes, counted = map(int, subprocess.run(arguments, capture_output=True, check=True, timeout=60).stdout.split())
    assert mebibytes < 64
    assert counted == 1


COLUMNS = ["fingerprint", "provenance", "chain", "usable_links", "tokens", "position", "nbytes", "used", "expires"]


@pytest.mark.parametrize("table", ["segments", "models", "scores"])
def test_any_value_in_a_catalogue_costs_at_most_a_scan(tmp_path, table):
    store = open_store(tmp_path)
    header, chain, blocks = segment(hashes(4), model={"name": "small"})
    assert store.publish(header, chain, blocks)
    store.index.keep_scores([(header.id, 0, np.ones(8, "<f4").tobytes())])
    store.close()
    for column in {"segments": COLUMNS, "models": ["facts"], "scores": ["row"]}[table]:
        for value in (5, -1.5, "text", b"", b"\xff\0\x01", '{"a"', "[1]"):
            with closing(sqlite3.connect(tmp_path / "catalogue.sqlite")) as database, database:
                database.execute(f"UPDATE {table} SET {column} = ?", (value,))
            store = open_store(tmp_path, quota=1 << 30)
            scores = ScoreTable(LRU().learn)
            scores.load(store.index.scores())
            scores.of((header.id, 0, 0), np.arange(4))
            scores.note([((header.id, 0, 0), 4, np.arange(4), np.ones(4), np.ones(4))])
            assert all(isinstance(facts, dict) for facts in store.index.models().values())
            for rows in (store.index.rows(), store.find(hashes(4))):
                longest_prefix(hashes(4), rows)
                assert all(store.found([row])[0] is None or read_back(store, row.id) for row in rows)
            assert sum(row.nbytes for row in store.index.rows()) >= 0
            store.victims(1)
            PassageIndex(store).seeds(np.zeros(4, np.uint32))
            store.close()
