"""A damaged record gives nothing away: no passage is deleted that it may name."""

from __future__ import annotations

import json
import re

import pytest

from hf_tiered_cache.errors import FormatError
from hf_tiered_cache.store.documents import DocumentRecord, Documents
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


def test_a_record_without_a_checksum_is_read(documents, path):
    facts = json.loads(path.read_bytes())
    assert len(facts.pop("checksum")) == 16
    path.write_bytes(encode_record(facts))
    assert documents.read(*B.key) == B
    assert documents.only_of([A], A.passages) == {OWN}
    path.write_bytes(b"{" + path.read_bytes())
    with pytest.raises(FormatError, match="move it elsewhere"):
        documents.only_of([A], [OWN])
