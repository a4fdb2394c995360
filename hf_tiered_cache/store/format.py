"""Encoder and decoder of segment files, the only one. docs/format.md specifies the format.

    header page | hash chain | digest table | scan hashes and token tables, if any | blocks, group after group

Every section starts on a 4 KiB boundary, and a checksum covers every byte of the file except the padding after the last
block. In an encrypted file only the blocks are encrypted (see cipher.py); a tag authenticates the data before them.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import FormatError
from . import EXACT, HASH_BYTES, PASSAGE, SCAN_BYTES
from .codecs import codec_in, coded_provenance
from .container import DIGEST_DTYPE, TAG_BYTES, Guard, Seal, check_head, finish_head, parse_prefix, xxh3
from .geometry import ALIGNMENT, HASH_TOKENS, Geometry, KVLayout, aligned
from .kinds import SEGMENT_MAGIC, decoding, hexadecimal, seconds, text, whole
from .shape import SegmentShape, TokenTables

MAGIC = SEGMENT_MAGIC
FORMAT_VERSION = 11
"""Newest version that is read. It is written for keys without their biases, which older readers would not add."""
OLDEST_VERSION = 10
"""Oldest version that is read, and the one that is written for all other KV. Those before it were not released."""
HEADER_BYTES = ALIGNMENT
_SECTIONS = ("chain", "digests", "scan", "tables", "blocks")
_MOST_TOKENS, _MOST_POSITION = 1 << 28, 1 << 48
_MOST_BRACKETS = 1000  # a valid layout has a few, and one for each kind of layer
PREFIX = struct.Struct("<8sIIQ")  # magic, version, length of the JSON, xxh3-64 of the page with this field zero


@dataclass(frozen=True)
class Section:
    """Byte range of the file and, except for the blocks, its xxh3-64 (padding included)."""

    offset: int
    nbytes: int
    digest: int = 0


@dataclass(frozen=True)
class SegmentHeader:
    """Content of the first page of a segment: sufficient to find, check and read it without the catalogue."""

    id: str
    fingerprint: str
    shape: SegmentShape
    parent: bytes
    """Prefix hash before the first token; the chain's root for the first segment of a sequence."""
    position: int
    """Position of the first token in the sequence it was computed in."""
    created: float
    provenance: str = EXACT
    expires: float | None = None
    model: Mapping[str, str] = field(default_factory=dict)
    """Description of the model for people, such as `name`, `class` and `dtype`. Only the fingerprint permits reuse."""
    label: str = ""
    """User-defined label."""
    seal: Seal | None = None
    """Encryption parameters; None if the file is not encrypted."""
    scan_hashes: bytes = b""
    """Scan hashes of a passage, `SCAN_BYTES` per prefix hash. They find its tokens in prompts."""
    chain: Section = Section(0, 0)
    digests: Section = Section(0, 0)
    scan: Section = Section(0, 0)
    tables: Section = Section(0, 0)
    blocks: Section = Section(0, 0)

    @property
    def file_bytes(self) -> int:
        return self.blocks.offset + self.blocks.nbytes


_BEHIND = "behind"


def passage_provenance(lead: int) -> str:
    """Return the provenance, without codec, of passages that are computed after `lead` tokens (see `Passages`)."""
    return PASSAGE if lead <= 1 else f"{PASSAGE} {_BEHIND} {lead}"


def is_passage(provenance: str) -> bool:
    """Return whether KV of this provenance belongs to a passage, which is restored at any position."""
    return provenance.partition(" ")[0] == PASSAGE


def has_lead_text(provenance: str) -> bool:
    """Return whether KV of this provenance belongs to passages computed after other text. Such KV is never exact."""
    return provenance.startswith(f"{PASSAGE} {_BEHIND} ")


def end_of_chain(prefix_hashes: Sequence[bytes], provenance: str) -> bytes:
    """Return a hash of all prefix hashes of a segment.

    It is the last one, which covers those before it. The hashes of a passage are independent, so all are hashed.
    """
    if not is_passage(provenance):
        return prefix_hashes[-1]
    return hashlib.blake2b(b"".join(prefix_hashes), digest_size=HASH_BYTES).digest()


def segment_id(parent: bytes, last: bytes, shape: SegmentShape, provenance: str) -> str:
    """Return the id of a segment: a hash of its tokens (see `end_of_chain`), geometry, provenance and token tables."""
    name = hashlib.blake2b(digest_size=HASH_BYTES)
    for item in (parent, last, repr(shape.geometry.to_json()).encode(), provenance.encode()):
        name.update(item)
    name.update(_encode_tables(shape.tables))
    return name.hexdigest()


def _encode_tables(tables: TokenTables | None) -> bytes:
    """Encode the section of the token tables, unpadded: empty if all tokens are in order."""
    if tables is None:
        return b""
    numbers = np.array([len(tables.slot_of_token)]), tables.of_group, tables.slot_of_token
    return b"".join(array.astype("<u4").tobytes() for array in numbers)


def lay_out(header: SegmentHeader, num_hashes: int) -> SegmentHeader:
    """Return `header` with the offsets of its sections, computed from its shape and the number of prefix hashes."""
    return _lay_out(header, num_hashes, len(header.scan_hashes), len(_encode_tables(header.shape.tables)))


def _lay_out(header: SegmentHeader, num_hashes: int, scan_bytes: int, tables_bytes: int) -> SegmentHeader:
    """Compute section offsets, given the sizes of the sections that a header page alone does not determine."""
    nbytes = {
        "chain": num_hashes * HASH_BYTES,
        "digests": header.shape.first_blocks[-1] * DIGEST_DTYPE.itemsize,
        "scan": scan_bytes,
        "tables": tables_bytes,
        "blocks": header.shape.blocks_bytes,
    }
    locations: dict[str, Any] = {}
    offset = HEADER_BYTES
    for name in _SECTIONS:
        locations[name] = Section(offset, aligned(nbytes[name]))
        offset += locations[name].nbytes
    return replace(header, **locations)


def encode_head(header: SegmentHeader, prefix_hashes: list[bytes], digests: np.ndarray, guard: Guard) -> bytes:
    """Encode all data before the blocks, given a header of `lay_out` and digests, `DIGEST_DTYPE` `[blocks]`."""
    _check_provenance(header)
    contents = {
        "chain": b"".join(prefix_hashes),
        "digests": digests.tobytes(),
        "scan": header.scan_hashes,
        "tables": _encode_tables(header.shape.tables),
    }
    placed = {}
    for name, content in contents.items():
        section = getattr(header, name)
        contents[name] = content.ljust(section.nbytes, b"\0")
        placed[name] = section.offset, section.nbytes, xxh3(contents[name])
    placed["blocks"] = header.blocks.offset, header.blocks.nbytes, 0
    data: dict[str, Any] = {
        "id": header.id,
        "fingerprint": header.fingerprint,
        "provenance": header.provenance,
        "tokens": header.shape.tokens,
        "position": header.position,
        "parent": header.parent.hex(),
        "links": len(prefix_hashes),
        "geometry": header.shape.geometry.to_json(),
        "layout": header.shape.layout.to_json(),
        "created": header.created,
        "expires": header.expires,
        "sections": placed,
    }
    if header.seal is not None:
        data["cipher"] = header.seal.to_json()
    room = HEADER_BYTES - PREFIX.size - (0 if header.seal is None else TAG_BYTES)
    page_json = _with_names(data, header, room)
    if len(page_json) > room:
        raise FormatError(f"a header of {len(page_json)} bytes does not fit into its page of {HEADER_BYTES}")
    version = FORMAT_VERSION if header.shape.layout.unbiased else OLDEST_VERSION
    page = bytearray(PREFIX.pack(MAGIC, version, len(page_json), 0) + page_json).ljust(HEADER_BYTES, b"\0")
    return finish_head(PREFIX, page + b"".join(contents.values()), HEADER_BYTES, guard)


def _with_names(data: dict[str, Any], header: SegmentHeader, room: int) -> bytes:
    """Encode the header's JSON with label and model description; their longest texts are cut until it fits `room`."""
    names = {"": header.label, **header.model}  # "" is the key of the label
    while True:
        header_names = {"label": names.get(""), "model": {name: value for name, value in names.items() if name}}
        named_data = data | {name: value for name, value in header_names.items() if value}
        page_json = json.dumps(named_data, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
        if len(page_json) <= room or not names:
            return page_json
        longest = max(names, key=lambda name: len(names[name]))
        names[longest] = names[longest][: max(0, len(names[longest]) - (len(page_json) - room))]
        if not names[longest]:
            del names[longest]


def sections(header: SegmentHeader) -> dict[str, Section]:
    """Return the sections by name, in the order of the file."""
    return {name: getattr(header, name) for name in _SECTIONS}


def decode_header(page: bytes) -> tuple[SegmentHeader, int]:
    """Decode the first page of a file to the header and the number of prefix hashes. Raises FormatError."""
    page_json = _json_of(page)
    with decoding("the header cannot be read"):
        if len(re.findall(rb"[\[{]", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", page_json))) > _MOST_BRACKETS:
            raise FormatError("the header is nested too deeply")
        data = json.loads(page_json)
        tokens, num_hashes = whole(data["tokens"], 1, _MOST_TOKENS), whole(data["links"], 1, _MOST_TOKENS)
        if tokens != num_hashes * HASH_TOKENS:
            raise FormatError(f"{num_hashes} prefix hashes do not cover {tokens} tokens")
        layout, geometry = KVLayout.from_json(data["layout"]), Geometry.from_json(data["geometry"])
        shape = SegmentShape(layout, geometry, tokens)
        expires = data["expires"]
        header = SegmentHeader(
            id=hexadecimal(data["id"]),
            fingerprint=text(data["fingerprint"]),
            shape=shape,
            parent=bytes.fromhex(hexadecimal(data["parent"])),
            position=whole(data["position"], 0, _MOST_POSITION),
            created=seconds(data["created"]),
            provenance=text(data["provenance"]),
            expires=None if expires is None else seconds(expires),
            model={str(name): str(value) for name, value in dict(data.get("model") or {}).items()},
            label=str(data.get("label") or ""),
            seal=Seal.of(data),
        )
        placed: dict[str, Any] = {
            name: Section(*(whole(number, 0, 1 << 64) for number in section))
            for name, section in data["sections"].items()
            if name in _SECTIONS
        }
        header = replace(header, **placed)
        _check_provenance(header)
        _check_sections(header, num_hashes)
    return header, num_hashes


def decode_times(page: bytes) -> tuple[float, float | None]:
    """Return creation and expiry in the first page of a file. Needs no torch, unlike its layout. Raises FormatError."""
    page_json = _json_of(page)
    with decoding("the header cannot be read"):
        data = json.loads(page_json)
        return seconds(data["created"]), None if data["expires"] is None else seconds(data["expires"])


def _json_of(page: bytes) -> bytes:
    if len(page) < HEADER_BYTES:
        raise FormatError("it is too short")
    length, _ = parse_prefix(PREFIX, page, MAGIC, FORMAT_VERSION, OLDEST_VERSION)
    check_head(PREFIX, page[:HEADER_BYTES])
    return page[PREFIX.size : PREFIX.size + length]


def _check_sections(header: SegmentHeader, num_hashes: int) -> None:
    """Raise FormatError if the sections do not follow one another, or exceed what the shape permits.

    Token tables are not read yet: with them, KV cache groups may hold fewer tokens. `decode_tables` checks exact sizes.
    """
    groups = len(header.shape.block_groups)
    most = _lay_out(header, num_hashes, SCAN_BYTES * num_hashes, 4 * (1 + groups * (1 + header.shape.tokens)))
    end = HEADER_BYTES
    for name, section in sections(header).items():
        if section.offset != end or section.nbytes > getattr(most, name).nbytes:
            raise FormatError("the header's offsets do not match its geometry")
        end += section.nbytes


def _check_provenance(header: SegmentHeader) -> None:
    """Raise FormatError if the provenance does not match the codec, or if merged layers claim to be exact.

    Lossy KV must never be used as exact KV, whichever program wrote the file.
    """
    if (codec := header.shape.geometry.codec) != (named_codec := codec_in(header.provenance)):
        raise FormatError(
            f"blocks are stored as {codec}, but the provenance {header.provenance!r} specifies {named_codec}"
        )
    if header.shape.geometry.pairs and header.provenance == coded_provenance(EXACT, codec):
        raise FormatError(f"layers are merged, but the provenance {header.provenance!r} specifies exact KV")


def decode_tables(
    header: SegmentHeader, num_hashes: int, data: bytes
) -> tuple[SegmentHeader, bytes, tuple[np.ndarray, ...]]:
    """Decode the data between the header page and the blocks.

    Returns the header with scan hashes and token tables, the prefix hashes of the chain, concatenated, and the digests
    of each KV cache group, `DIGEST_DTYPE` `[chunks]`.
    """
    arrays = {}
    for name in _SECTIONS[:-1]:
        section = getattr(header, name)
        at = section.offset - HEADER_BYTES
        arrays[name] = data[at : at + section.nbytes]
        if xxh3(arrays[name]) != section.digest:
            raise FormatError(f"the section {name!r} fails its checksum")
    shape = replace(header.shape, tables=_decode_tables(header.shape, arrays["tables"]))
    header = replace(header, shape=shape, scan_hashes=arrays["scan"][: num_hashes * SCAN_BYTES])
    expected = sections(lay_out(header, num_hashes))
    if any(section.nbytes != expected[name].nbytes for name, section in sections(header).items()):
        raise FormatError("the header's offsets do not match its token tables")
    if shape.geometry.pairs:
        shape.check_tables()
    digests = np.frombuffer(arrays["digests"], DIGEST_DTYPE, shape.first_blocks[-1])
    return header, arrays["chain"][: num_hashes * HASH_BYTES], tuple(np.split(digests, shape.first_blocks[1:-1]))


def _decode_tables(shape: SegmentShape, section: bytes) -> TokenTables | None:
    """Decode the section of the token tables. Returns None if it is empty: all tokens are in order."""
    if not section:
        return None
    tokens, groups = shape.tokens, len(shape.block_groups)
    numbers = np.frombuffer(section, "<u4")
    count, slots = int(numbers[0]), numbers[1 + groups :]
    if count > groups or count * tokens > len(slots):
        raise FormatError(f"{count} token tables of {groups} KV cache groups do not fit into their section")
    return TokenTables(slots[: count * tokens].reshape(count, tokens), numbers[1 : 1 + groups])
