"""Encoder and decoder of segment files, the only one. docs/format.md specifies the format.

    header page | hash chain | digest table | scan hashes, and order of tokens, if any | blocks, group after group

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
from .codecs import RAW, codec_in, coded_provenance
from .container import DIGEST_DTYPE, TAG_BYTES, Guard, Seal, check_head, finish_head, parse_prefix, xxh3
from .geometry import ALIGNMENT, BLOCK_ALIGNMENT, HASH_TOKENS, Geometry, KVLayout, aligned
from .kinds import SEGMENT_MAGIC
from .records import decoding, hexadecimal, seconds, text, whole
from .shape import SegmentShape, TokenTables

MAGIC = SEGMENT_MAGIC
FORMAT_VERSION = 9
"""Newest version that is read. Older programs can read a file if its version is lower (see `_version`)."""
HEADER_BYTES = ALIGNMENT
_NUMBER_BYTES = 4  # of an entry of the sections order, tables and importance
_SECTIONS = ("chain", "digests", "scan", "order", "tables", "importance", "blocks")
_OPTIONAL = ("scan", "order", "tables", "importance")
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
    order: Section = Section(0, 0)
    tables: Section = Section(0, 0)
    importance: Section = Section(0, 0)
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


def is_behind_text(provenance: str) -> bool:
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
    """Return the id of a segment: a hash of its tokens, geometry, provenance and token tables.

    The tokens are given by the prefix hash before the first one, and by a hash of all prefix hashes (`end_of_chain`).
    """
    name = hashlib.blake2b(digest_size=HASH_BYTES)
    for item in (parent, last, repr(shape.geometry.to_json()).encode(), provenance.encode()):
        name.update(item)
    for section in _sections_of_tables(shape).values():
        name.update(section)
    return name.hexdigest()


def _sections_of_tables(shape: SegmentShape) -> dict[str, bytes]:
    """Return the sections of the token tables, unpadded: order, or tables if an order does not suffice; importance."""
    if (tables := shape.tables) is None:
        return {}
    if (by_layer := tables.as_layers(shape.block_groups, len(shape.layout.layers))) is not None:
        sections = {"order": by_layer.astype("<u4").tobytes()}
    else:
        numbers = np.array([len(tables.slot_of_token)]), tables.of_group, tables.slot_of_token
        sections = {"tables": b"".join(array.astype("<u4").tobytes() for array in numbers)}
    if tables.importance is not None:
        sections["importance"] = tables.importance.astype("<f4").tobytes()
    return sections


def _optional_sections(header: SegmentHeader) -> dict[str, bytes]:
    """Return the sections that only some segments have, without padding."""
    scan = {"scan": header.scan_hashes} if header.scan_hashes else {}
    return scan | _sections_of_tables(header.shape)


def lay_out(header: SegmentHeader, num_hashes: int) -> SegmentHeader:
    """Return `header` with the offsets of its sections, computed from its shape and the number of prefix hashes."""
    return _lay_out(header, num_hashes, {name: len(data) for name, data in _optional_sections(header).items()})


def _lay_out(header: SegmentHeader, num_hashes: int, of_tables: Mapping[str, int]) -> SegmentHeader:
    """Compute section offsets from given sizes of the optional sections, which a decoded header's shape lacks."""
    nbytes = {
        "chain": num_hashes * HASH_BYTES,
        "digests": header.shape.block_count * DIGEST_DTYPE.itemsize,
        **of_tables,
        "blocks": header.shape.blocks_bytes,
    }
    locations: dict[str, Any] = {}
    offset = HEADER_BYTES
    for name in _SECTIONS:
        locations[name] = Section(offset, aligned(nbytes.get(name, 0)))
        offset += locations[name].nbytes
    return replace(header, **locations)


def encode_head(header: SegmentHeader, prefix_hashes: list[bytes], digests: np.ndarray, guard: Guard) -> bytes:
    """Encode all data before the blocks: header page, chain, digests and optional sections, each padded to 4 KiB.

    Args:
        header: header as returned by `lay_out`.
        prefix_hashes: the segment's prefix hashes, `HASH_BYTES` each.
        digests: `DIGEST_DTYPE` `[blocks]`, one KV cache group after the other.
        guard: guard of the blocks; computes the tag if the file is encrypted.
    """
    data = {"chain": b"".join(prefix_hashes), "digests": digests.tobytes(), **_optional_sections(header)}
    fields = {}
    for name in _SECTIONS[:-1]:
        section = getattr(header, name)
        data[name] = data.get(name, b"").ljust(section.nbytes, b"\0")
        fields[name] = replace(section, digest=xxh3(data[name]))
    header = replace(header, **fields)
    tables = b"".join(data[name] for name in _SECTIONS[:-1])
    return finish_head(PREFIX, _encode_page(header, len(prefix_hashes)) + tables, HEADER_BYTES, guard)


def _encode_page(header: SegmentHeader, num_hashes: int) -> bytearray:
    """Encode the header page, with zeros for checksum and tag."""
    _check_provenance(header)
    data: dict[str, Any] = {
        "id": header.id,
        "fingerprint": header.fingerprint,
        "provenance": header.provenance,
        "tokens": header.shape.tokens,
        "position": header.position,
        "parent": header.parent.hex(),
        "links": num_hashes,
        "geometry": header.shape.geometry.to_json(),
        "layout": header.shape.layout.to_json(),
        "created": header.created,
        "expires": header.expires,
        "sections": {name: [s.offset, s.nbytes, s.digest] for name, s in sections(header).items()},
    }
    if not header.shape.page_aligned:
        data["alignment"] = header.shape.alignment
    if header.seal is not None:
        data["cipher"] = header.seal.to_json()
    room = HEADER_BYTES - PREFIX.size - (0 if header.seal is None else TAG_BYTES)
    page_json = _with_names(data, header, room)
    if len(page_json) > room:
        raise FormatError(f"a header of {len(page_json)} bytes does not fit into its page of {HEADER_BYTES}")
    page = bytearray(PREFIX.pack(MAGIC, _version(header), len(page_json), 0) + page_json)
    return page.ljust(HEADER_BYTES, b"\0")


def _with_names(data: dict[str, Any], header: SegmentHeader, room: int) -> bytes:
    """Encode the header's JSON with label and model description; their longest texts are cut until it fits `room`."""
    names = {"": header.label, **header.model}  # "" is the key of the label
    while True:
        header_names = {"label": names.get(""), "model": {name: value for name, value in names.items() if name}}
        page_json = _encode_json(data | {name: value for name, value in header_names.items() if value})
        if len(page_json) <= room or not names:
            return page_json
        longest = max(names, key=lambda name: len(names[name]))
        names[longest] = names[longest][: max(0, len(names[longest]) - (len(page_json) - room))]
        if not names[longest]:
            del names[longest]


def _encode_json(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def _version(header: SegmentHeader) -> int:
    """Return the lowest format version that supports the content of a file."""
    geometry = header.shape.geometry
    needs = {
        9: not header.shape.page_aligned,
        8: header.scan.nbytes,
        7: geometry.pairs,
        6: header.tables.nbytes,
        5: geometry.codec != RAW,
        4: header.seal,
        3: header.importance.nbytes,
        2: header.order.nbytes or geometry.solo_layers,
    }
    return next((version for version, is_needed in needs.items() if is_needed), 1)


def sections(header: SegmentHeader) -> dict[str, Section]:
    """Return the sections by name, in the order of the file, without absent optional sections."""
    all_sections = {name: getattr(header, name) for name in _SECTIONS}
    return {name: section for name, section in all_sections.items() if section.nbytes or name not in _OPTIONAL}


def _extents(header: SegmentHeader) -> dict[str, tuple[int, int]]:
    return {name: (section.offset, section.nbytes) for name, section in sections(header).items()}


def decode_header(page: bytes) -> tuple[SegmentHeader, int]:
    """Decode the first page of a file.

    Returns:
        The header and the number of prefix hashes in the chain.

    Raises:
        NewerFormatError: the file has a newer format version.
        FormatError: the page is damaged or of another kind.
    """
    if len(page) < HEADER_BYTES:
        raise FormatError("it is too short")
    length, _ = parse_prefix(PREFIX, page, MAGIC, FORMAT_VERSION)
    check_head(PREFIX, page[:HEADER_BYTES])
    with decoding("the header cannot be read"):
        header, num_hashes = _header_of(page[PREFIX.size : PREFIX.size + length])
        _check_sections(header, num_hashes)
    return header, num_hashes


def _check_sections(header: SegmentHeader, num_hashes: int) -> None:
    """Raise FormatError if the sections do not follow from the shape.

    Token tables are not read yet. With them, the sizes computed from the shape are upper bounds.
    """
    shape, groups = header.shape, len(header.shape.block_groups)
    most = {
        "scan": SCAN_BYTES * num_hashes,
        "order": _NUMBER_BYTES * len(shape.layout.layers) * shape.tokens,
        "tables": _NUMBER_BYTES * (1 + groups * (1 + shape.tokens)),
        "importance": _NUMBER_BYTES * shape.tokens,
    }
    laid = _lay_out(header, num_hashes, {name: size for name, size in most.items() if getattr(header, name).nbytes})
    right = _extents(laid) == _extents(header)
    if header.tables.nbytes:
        sections_in_header, end = sections(header), HEADER_BYTES
        right = all(section.nbytes <= getattr(laid, name).nbytes for name, section in sections_in_header.items())
        for section in sections_in_header.values():
            right, end = right and section.offset == end, end + section.nbytes
    if not right:
        raise FormatError("the header's offsets do not match its geometry")


def _header_of(page_json: bytes) -> tuple[SegmentHeader, int]:
    """Decode header and number of prefix hashes from the page's JSON. Any exception means that the JSON is invalid."""
    if len(re.findall(rb"[\[{]", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", page_json))) > _MOST_BRACKETS:
        raise FormatError("the header is nested too deeply")
    data = json.loads(page_json)
    tokens, num_hashes = whole(data["tokens"], 1, _MOST_TOKENS), whole(data["links"], 1, _MOST_TOKENS)
    if tokens != num_hashes * HASH_TOKENS:
        raise FormatError(f"{num_hashes} prefix hashes do not cover {tokens} tokens")
    layout, geometry = KVLayout.from_json(data["layout"]), Geometry.from_json(data["geometry"])
    shape = SegmentShape(layout, geometry, tokens)
    if data.get("alignment", BLOCK_ALIGNMENT) != BLOCK_ALIGNMENT:
        raise FormatError(f"blocks have an invalid alignment of {data['alignment']!r} bytes")
    if "alignment" not in data and not shape.page_aligned:  # as in all files before format 9
        shape = replace(shape, alignment=ALIGNMENT)
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
    return header, num_hashes


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

    Returns:
        The header with scan hashes, and with token tables in its shape; the prefix hashes of the chain, concatenated;
        and the digests of each KV cache group, `DIGEST_DTYPE` `[chunks]`.
    """
    arrays = {}
    for name, section in sections(header).items():
        if name != "blocks":
            at = section.offset - HEADER_BYTES
            arrays[name] = data[at : at + section.nbytes]
            if xxh3(arrays[name]) != section.digest:
                raise FormatError(f"the section {name!r} fails its checksum")
    shape = replace(header.shape, tables=_tables(header.shape, arrays))
    header = replace(header, shape=shape, scan_hashes=arrays.get("scan", b"")[: num_hashes * SCAN_BYTES])
    if _extents(lay_out(header, num_hashes)) != _extents(header):
        raise FormatError("the header's offsets do not match its token tables")
    if shape.geometry.pairs:
        shape.check_tables()
    digests = np.frombuffer(arrays["digests"], DIGEST_DTYPE, shape.block_count)
    firsts = [shape.first_block(group.index) for group in shape.block_groups]
    return header, arrays["chain"][: num_hashes * HASH_BYTES], tuple(np.split(digests, firsts[1:]))


def _tables(shape: SegmentShape, arrays: Mapping[str, bytes]) -> TokenTables | None:
    """Decode the token tables. Returns None if there are none, and all tokens are in order."""
    tokens, groups = shape.tokens, shape.block_groups
    importance = np.frombuffer(arrays["importance"], "<f4", tokens) if "importance" in arrays else None
    if "order" in arrays:
        layers = len(shape.layout.layers)
        by_layer = np.frombuffer(arrays["order"], "<u4", layers * tokens).reshape(layers, tokens)
        return TokenTables.by_layer(by_layer, groups, importance)
    if "tables" not in arrays:
        return None
    numbers = np.frombuffer(arrays["tables"], "<u4")
    count, slots = int(numbers[0]), numbers[1 + len(groups) :]
    if count > len(groups) or count * tokens > len(slots):
        raise FormatError(f"{count} token tables of {len(groups)} KV cache groups do not fit into their section")
    return TokenTables(slots[: count * tokens].reshape(count, tokens), numbers[1 : 1 + len(groups)], importance)
