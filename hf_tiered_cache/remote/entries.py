"""Lookup entries of a remote: the beginning of each segment, under some of its prefix hashes.

A prompt is looked up by asking for the entries of all its prefix hashes at once. An entry is a hint: the segment that
it names is checked when it is read. Segments themselves are stored under their ids, as in a folder.

A segment of n prefix hashes has entries under the first, second, fourth, eighth, ... and under the last one. Many
segments share their first tokens, such as a system prompt, and under a hash that they share only the longest of them
is found. Under its last hash each of them is found, and a prompt that diverges from a segment finds at least half of
what they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from ..errors import FormatError, NotOursError
from ..store import EXACT, HASH_BYTES, PASSAGE, hashes_of
from ..store.catalogue import SegmentRow
from ..store.format import HEADER_BYTES, SegmentHeader, decode_header, end_of_chain, is_passage, segment_id
from ..store.geometry import HASH_TOKENS
from ..store.kinds import ENTRY
from ..store.objects import ObjectBackend

_MOST_HASHES = 4096  # maximum number of prefix hashes of an entry: the first 65,536 tokens of a segment are found
ENTRY_BYTES = HEADER_BYTES + _MOST_HASHES * HASH_BYTES
"""Maximum size of an entry."""
_SWEPT = 256  # number of entries that are read at once by a sweep


@dataclass(frozen=True)
class Entry:
    """A segment in a remote, with its number of prefix hashes. The chain of `row` has at most `_MOST_HASHES`."""

    row: SegmentRow
    num_hashes: int


def is_found_by_prefix(provenance: str) -> bool:
    """Return whether prompts look up KV of this provenance by their prefix hashes."""
    return provenance.partition(" ")[0] == EXACT


def is_shared(header: SegmentHeader) -> bool:
    """Return whether other machines can use a segment: complete KV of a prompt, or a passage.

    What a method has compacted belongs to a conversation of this store, and may lack tokens.
    """
    return header.provenance.partition(" ")[0] in (EXACT, PASSAGE)


def encode_entry(beginning: bytes) -> bytes:
    """Return the entry of a segment, given the beginning of its file up to the blocks."""
    _, num_hashes = decode_header(beginning[:HEADER_BYTES])
    return beginning[: HEADER_BYTES + min(num_hashes, _MOST_HASHES) * HASH_BYTES]


def entry_names(chain: bytes) -> list[str]:
    """Return the names of the entries of a segment, in the order of its tokens.

    `chain` are all its prefix hashes, concatenated. Only the first `_MOST_HASHES` count.
    """
    count = min(len(chain) // HASH_BYTES, _MOST_HASHES)
    counts = {1 << power for power in range(count.bit_length())} | {count}
    return [chain[(number - 1) * HASH_BYTES : number * HASH_BYTES].hex() for number in sorted(counts)]


def find_entries(remote: ObjectBackend, names: Sequence[str]) -> dict[str, Entry]:
    """Return the entries of prefix hashes that exist and have not expired. Raises OSError."""
    entries = _read(remote, names)
    return {name: entry for name, entry in entries.items() if entry is not None and not entry.row.is_expired}


def delete_entry(remote: ObjectBackend, name: str, segment_id: str, chain: bytes | None = None) -> str:
    """Delete the entry of a prefix hash if it names a segment, or, given its `chain`, another one of the same tokens.

    The segment in the remote may have another geometry, and so another id. Returns the id that the entry named, or an
    empty string if it was not deleted. Raises OSError if it cannot be read or deleted.
    """
    for entry in _read(remote, [name]).values():
        is_named = entry is None or entry.row.id == segment_id
        if entry is not None and chain is not None:
            is_named |= entry.num_hashes * HASH_BYTES == len(chain) and chain.startswith(entry.row.chain)
        if is_named:
            remote.records.delete(ENTRY, name)
            return segment_id if entry is None else entry.row.id
    return ""


def sweep_entries(remote: ObjectBackend, dry_run: bool = False) -> list[str]:
    """Delete the entries whose segments are gone, unless `dry_run`, and return their names. Raises OSError."""
    names = remote.records.names(ENTRY)
    ids = set(remote.names())  # listed last: a segment is stored before its entries
    dangling = []
    for start in range(0, len(names), _SWEPT):
        entries = _read(remote, names[start : start + _SWEPT])
        swept = [name for name, entry in entries.items() if entry is None or entry.row.id not in ids]
        for name in () if dry_run else swept:
            remote.records.delete(ENTRY, name)
        dangling += swept
    return dangling


def _read(remote: ObjectBackend, names: Sequence[str]) -> dict[str, Entry | None]:
    """Return the entries of prefix hashes that exist, None for a damaged one. Raises OSError.

    Those that a newer version of this library wrote are left out, and so left alone.
    """
    paths = {f"{ENTRY.folder}/{name}": name for name in names}
    contents = remote.get_beginnings(list(paths), ENTRY_BYTES)
    entries: dict[str, Entry | None] = {}
    for path, content in zip(contents, map(bytes, contents.values()), strict=True):
        try:
            header, num_hashes = decode_header(content[:HEADER_BYTES])
        except NotOursError:
            continue
        except FormatError:
            entries[paths[path]] = None
            continue
        chain = content[HEADER_BYTES:][: min(num_hashes, _MOST_HASHES) * HASH_BYTES]
        chain = chain[: len(chain) // HASH_BYTES * HASH_BYTES]
        is_valid = bytes.fromhex(paths[path]) in hashes_of(chain) and is_found_by_prefix(header.provenance)
        row = SegmentRow.of(header, chain, header.file_bytes)
        entries[paths[path]] = Entry(row, num_hashes) if is_valid else None
    return entries


_MOST_SHARE = 0.75  # share of a segment above which it is fetched as a whole


def beginning_of(header: SegmentHeader, prefix_hashes: Sequence[bytes], num_hashes: int) -> SegmentHeader:
    """Return the header of the first chunks of a segment, which cover `num_hashes` of its prefix hashes.

    It is the header of a segment of fewer tokens, with blocks that are the first ones of each KV cache group. If most
    of the segment is needed, or if its tokens are not in order, the header itself is returned.
    """
    shape = header.shape
    step = lcm(shape.geometry.chunk_tokens, HASH_TOKENS)
    tokens = -(-num_hashes * HASH_TOKENS // step) * step
    if tokens > _MOST_SHARE * shape.tokens or shape.tables is not None or shape.geometry.pairs:
        return header
    if is_passage(header.provenance):
        return header
    shape = replace(shape, tokens=tokens)
    last = end_of_chain(prefix_hashes[: tokens // HASH_TOKENS], header.provenance)
    return replace(header, id=segment_id(header.parent, last, shape, header.provenance), shape=shape)
