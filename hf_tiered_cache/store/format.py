"""The segment file, byte by byte. docs/format.md specifies it on one page; this module is its only reader and writer.

    header page | hash chain | digest table | blocks, lane after lane

Every section starts on a 4 KiB boundary, and every byte of the file is under a checksum.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import FormatError, NewerFormatError
from ..geometry import ALIGNMENT, Geometry, KVLayout, SegmentShape, aligned
from .digest import DIGEST_DTYPE, xxh3

MAGIC = b"HFTCKV\r\n"
"""Ends in CR LF, so that a file sent through a text filter is seen to be damaged."""
FORMAT_VERSION = 1
LINK_BYTES = 16
HEADER_BYTES = ALIGNMENT
_PREFIX = struct.Struct("<8sIIQ")  # magic, version, length of the JSON, xxh3-64 of the page with this field zero


@dataclass(frozen=True)
class Section:
    """A run of bytes in the file and, but for the blocks, its xxh3-64 (padding included)."""

    offset: int
    nbytes: int
    digest: int = 0


@dataclass(frozen=True)
class SegmentHeader:
    """The first page of a segment: enough to find, check and read it without the catalogue."""

    id: str
    fingerprint: str
    shape: SegmentShape
    parent: bytes
    """Link of the hash chain before the first token; the chain's root for the first segment of a sequence."""
    position: int
    """Position of the first token in the sequence it was computed in."""
    created: float
    provenance: str = "exact"
    expires: float | None = None
    chain: Section = Section(0, 0)
    digests: Section = Section(0, 0)
    blocks: Section = Section(0, 0)

    @property
    def file_bytes(self) -> int:
        return self.blocks.offset + self.blocks.nbytes

    @property
    def block_count(self) -> int:
        return self.shape.chunks * len(self.shape.lanes)


def segment_id(parent: bytes, last: bytes, geometry: Geometry, provenance: str) -> str:
    """The name of a segment between two links of a chain: what it holds, how it is cut and how it came about."""
    name = hashlib.blake2b(digest_size=LINK_BYTES)
    for item in (parent, last, repr(geometry.to_json()).encode(), provenance.encode()):
        name.update(item)
    return name.hexdigest()


def lay_out(header: SegmentHeader, links: int) -> SegmentHeader:
    """`header` with the offsets of its sections, which follow from its shape and the number of links."""
    chain = Section(HEADER_BYTES, aligned(links * LINK_BYTES))
    digests = Section(chain.offset + chain.nbytes, aligned(header.block_count * DIGEST_DTYPE.itemsize))
    blocks = Section(digests.offset + digests.nbytes, header.shape.blocks_bytes)
    return replace(header, chain=chain, digests=digests, blocks=blocks)


def encode_head(header: SegmentHeader, links: list[bytes], digests: np.ndarray) -> bytes:
    """Everything before the blocks: header page, chain and digest table, each padded to 4 KiB.

    Args:
        header: as `lay_out` returned it.
        links: the segment's links, `LINK_BYTES` each.
        digests: `DIGEST_DTYPE` `[lanes * chunks]`, lane after lane.
    """
    chain = b"".join(links).ljust(header.chain.nbytes, b"\0")
    table = digests.tobytes().ljust(header.digests.nbytes, b"\0")
    header = replace(
        header,
        chain=replace(header.chain, digest=xxh3(chain)),
        digests=replace(header.digests, digest=xxh3(table)),
    )
    return _encode_page(header, len(links)) + chain + table


def _encode_page(header: SegmentHeader, links: int) -> bytes:
    data: dict[str, Any] = {
        "id": header.id,
        "fingerprint": header.fingerprint,
        "provenance": header.provenance,
        "tokens": header.shape.tokens,
        "position": header.position,
        "parent": header.parent.hex(),
        "links": links,
        "geometry": header.shape.geometry.to_json(),
        "layout": header.shape.layout.to_json(),
        "created": header.created,
        "expires": header.expires,
        "sections": {
            name: [s.offset, s.nbytes, s.digest]
            for name, s in (("chain", header.chain), ("digests", header.digests), ("blocks", header.blocks))
        },
    }
    text = json.dumps(data, separators=(",", ":")).encode()
    if _PREFIX.size + len(text) > HEADER_BYTES:
        raise FormatError(f"a header of {len(text)} bytes does not fit its page of {HEADER_BYTES}")
    page = bytearray(_PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), 0) + text)
    page.extend(bytes(HEADER_BYTES - len(page)))
    struct.pack_into("<Q", page, _PREFIX.size - 8, xxh3(bytes(page)))
    return bytes(page)


def decode_header(page: bytes) -> tuple[SegmentHeader, int]:
    """Read the first page of a file.

    Returns:
        The header and the number of links in the chain.

    Raises:
        NewerFormatError: the file was written by a later format.
        FormatError: the page is damaged or of another kind.
    """
    if len(page) < HEADER_BYTES or page[:8] != MAGIC:
        raise FormatError("not a segment file (bad magic or too short)")
    _, version, length, digest = _PREFIX.unpack_from(page)
    if version > FORMAT_VERSION:
        raise NewerFormatError(f"segment format {version} is newer than {FORMAT_VERSION}; upgrade hf-tiered-cache")
    blank = bytearray(page[:HEADER_BYTES])
    struct.pack_into("<Q", blank, _PREFIX.size - 8, 0)
    if xxh3(bytes(blank)) != digest:
        raise FormatError("the header page fails its checksum")
    try:
        data = json.loads(page[_PREFIX.size : _PREFIX.size + length])
        shape = SegmentShape(
            KVLayout.from_json(data["layout"]), Geometry.from_json(data["geometry"]), int(data["tokens"])
        )
        sections = {name: Section(*data["sections"][name]) for name in ("chain", "digests", "blocks")}
        header = SegmentHeader(
            id=data["id"],
            fingerprint=data["fingerprint"],
            shape=shape,
            parent=bytes.fromhex(data["parent"]),
            position=int(data["position"]),
            created=float(data["created"]),
            provenance=data["provenance"],
            expires=data["expires"],
            **sections,
        )
        links = int(data["links"])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the header cannot be read: {error!r}") from error
    if lay_out(header, links).blocks != header.blocks:
        raise FormatError("the header's offsets do not follow from its geometry")
    return header, links


def decode_tables(header: SegmentHeader, links: int, data: bytes) -> tuple[bytes, np.ndarray]:
    """Read chain and digest table from `data`, the bytes between the header page and the blocks.

    Returns:
        The chain's links side by side, and the digests, `DIGEST_DTYPE` `[lanes, chunks]`.
    """
    chain = data[: header.chain.nbytes]
    table = data[header.chain.nbytes :]
    if xxh3(chain) != header.chain.digest or xxh3(table) != header.digests.digest:
        raise FormatError("the hash chain or the digest table fails its checksum")
    count = header.block_count
    digests = np.frombuffer(table, DIGEST_DTYPE, count).reshape(len(header.shape.lanes), header.shape.chunks)
    return chain[: links * LINK_BYTES], digests
