"""A damaged record gives nothing away: no passage is deleted that it may name."""

from __future__ import annotations

import errno
import json
import re
import shutil
from unittest.mock import Mock

import pytest
from segments import hashes, segment, without_catalogue

from hf_tiered_cache import KVStore
from hf_tiered_cache.errors import FormatError, OtherFormatError
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.store.conversations import ConversationRecord
from hf_tiered_cache.store.documents import DocumentRecord, Documents
from hf_tiered_cache.store.format import FORMAT_VERSION
from hf_tiered_cache.store.kinds import encode_record, record_name
from hf_tiered_cache.store.root import StoreRoot

SHARED, OWN = "0123456789abcdef" * 2, "fedcba9876543210" * 2


def record(label, *passages):
    return DocumentRecord(
        label=label, fingerprint="model", made="exact None", passages=passages, tokens=64, created=1.0, changed=2.0
    )


A, B = record("a", SHARED, OWN), record("b", SHARED)


@pytest.fixture
def documents(tmp_path):
    documents = Documents(StoreRoot(tmp_path / "store"))
    documents.write([A, B])
    return documents


@pytest.fixture
def path(documents):
    return documents.files.path / "documents" / record_name(*B.key)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SHARED.encode(), b"1" + SHARED[1:].encode()),
        (b'"label": "b"', b'"label": "c"'),
        (b'"label"', b'"labem"'),
        (b"}", b""),
        (b"{", b"\xff"),
    ],
)
def test_no_passage_goes_that_a_damaged_record_may_name(documents, path, old, new):
    assert documents.only_of([A], A.passages) == {OWN}
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(FormatError, match=rf"{re.escape(str(path))}: .*so nothing .*; move it elsewhere"):
        documents.only_of([A], A.passages)
    documents.sweep(())
    assert path.exists() and documents.read(*A.key) is None  # whose passages are not stored
    assert documents.only_of([B], B.passages) == {SHARED}


def test_every_flipped_bit_is_seen_or_changes_nothing(documents, path):
    content = path.read_bytes()
    for at in range(0, len(content), 4):
        damaged = bytearray(content)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        try:
            assert documents.only_of([A], A.passages) == {OWN}
        except FormatError:
            continue


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:40] + b"\xff" + content[41:], "byte 40 is not UTF-8"),
        (lambda content: content[:-40], "it is not JSON"),
        (lambda content: content.replace(b'"format"', b'"formal"'), "it lacks 'format'"),
        (lambda content: b"[]", "a document: list indices must be integers"),
    ],
    ids=["byte", "cut", "name", "list"],
)
def test_an_error_names_the_damage_and_does_not_repeat_the_record(damage, message):
    content = record("a", *(f"{number:032x}" for number in range(1000))).encode()
    with pytest.raises(FormatError, match=message) as error:
        DocumentRecord.decode(damage(content))
    assert len(str(error.value)) < 150


def test_a_record_without_a_checksum_is_read(documents, path):
    facts = json.loads(path.read_bytes())
    assert len(facts.pop("checksum")) == 16
    path.write_bytes(encode_record(facts))
    assert documents.read(*B.key) == B
    assert documents.only_of([A], A.passages) == {OWN}
    path.write_bytes(b"{" + path.read_bytes())
    with pytest.raises(FormatError, match="move it elsewhere"):
        documents.only_of([A], [OWN])


# --- records that cannot be used are neither replaced nor passed over in silence


def test_a_record_of_a_newer_format_is_not_replaced(documents, path):
    newer = path.read_bytes().replace(b'"format": 1', b'"format": 2')
    path.write_bytes(newer)
    with pytest.raises(OtherFormatError, match=rf"{re.escape(str(path))}: .*format 2.*upgrade hf-tiered-cache"):
        documents.write([B])
    assert path.read_bytes() == newer
    assert documents.sweep(()) and path.exists()


def test_a_record_that_cannot_be_read_now_is_not_replaced(documents, path, monkeypatch):
    content = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(StoreRoot, "read", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):
            documents.write([record("b", OWN)])
    assert path.read_bytes() == content
    path.write_bytes(content.replace(b'"tokens": 64', b'"tokens": -4'))  # damaged
    documents.write([record("b", OWN)])
    assert documents.read(*B.key) == record("b", OWN)


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        ("newer", "upgrade hf-tiered-cache"),
        ("damaged", "move it elsewhere"),
        ("other name", "move it elsewhere"),
        ("unreadable", "check the disk"),
    ],
)
def test_a_record_that_is_left_out_is_logged_once(documents, path, monkeypatch, caplog, fault, advice):
    content = path.read_bytes()
    if fault == "newer":
        path.write_bytes(content.replace(b'"format": 1', b'"format": 2'))
    elif fault == "damaged":
        path.write_bytes(content[:-9])
    elif fault == "other name":
        path.write_bytes(A.encode())
    else:
        monkeypatch.setattr(StoreRoot, "read", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    left_out = set() if fault == "unreadable" else {"a"}
    for _ in range(2):
        assert {document.label for document in documents.all()} == left_out
    messages = [message for message in caplog.messages if str(path) in message]
    assert len(messages) == 1
    assert advice in messages[0] and "\n" not in messages[0]


def test_missing_and_blank_records_are_not_logged(documents, path, caplog):
    path.write_bytes(bytes(100))  # its writer was killed
    assert documents.all() == [A] and documents.read("other", "model", "exact None") is None
    shutil.rmtree(path.parent)
    assert documents.all() == []
    assert not caplog.messages


def test_gc_keeps_records_of_segments_that_this_version_does_not_read(tmp_path):
    header, *data = segment(hashes(4))
    with KVStore(tmp_path, engine="posix") as store:
        storage = storage_of(store)
        assert storage.disk.publish(header, *data)
        storage.conversations.write(
            [ConversationRecord("alice", "model", "exact", "exact", (header.id,), 64, 1, 1.0, 1.0, 1)]
        )
        storage.documents.write([A])
    path = tmp_path / "segments" / f"{header.id}.kv"
    content = bytearray(path.read_bytes())
    content[8:12] = (FORMAT_VERSION + 1).to_bytes(4, "little")
    path.write_bytes(content)
    without_catalogue(tmp_path)
    with KVStore(tmp_path, engine="posix") as store:
        for dry_run in (True, False):
            report = store.gc(dry_run=dry_run)
            assert (report.conversations, report.documents, report.deleted) == (0, 0, {})
        path.unlink()
        report = store.gc()
        assert (report.conversations, report.documents) == (1, 1)
