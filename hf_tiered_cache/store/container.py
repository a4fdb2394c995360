"""Parts that segments and sidecars have in common: prefix, checksum, encryption parameters, tag and blocks.

A file has a head, which is all data before the blocks, and blocks. The head begins with a prefix: magic, format
version, length of the JSON that follows, and last a checksum. The checksum covers the first page of a segment, or the
whole head of a sidecar. In an encrypted file, the covered bytes end with a tag of the whole head. Both are computed
with zeros in their own places.
"""

from __future__ import annotations

import errno
import hmac
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import FormatError, NewerFormatError
from .backend import Upload
from .digest import DIGEST_DTYPE, Guard, xxh3
from .files import Stored
from .schema import hexadecimal

CIPHER = "aes-256-gcm"
KEY_ID_BYTES, SALT_BYTES, TAG_BYTES = 8, 16, 32
_LARGE, _MOST_HOLES = 16 << 20, 16
"""More than `_LARGE` bytes must take 1/16 of their size on disk: a sparse file of a few KiB could fill all memory."""


@dataclass(frozen=True)
class Seal:
    """Encryption parameters of a file."""

    key_id: str
    """Id of the store's key: 16 hexadecimal digits."""
    salt: bytes
    """Salt of this file: the file's key is derived from it and the store's key."""

    def to_json(self) -> dict[str, str]:
        return {"name": CIPHER, "key": self.key_id, "salt": self.salt.hex()}

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Seal | None:
        """Decode the parameters in the JSON of a head. Returns None if the file is not encrypted."""
        if "cipher" not in header:
            return None
        data = header["cipher"]
        if data["name"] != CIPHER:
            raise NewerFormatError(f"it is encrypted with {data['name']!r}, which this version does not support")
        return cls(hexadecimal(data["key"], KEY_ID_BYTES), bytes.fromhex(hexadecimal(data["salt"], SALT_BYTES)))


# --- head


def parse_prefix(prefix: struct.Struct, head: bytes, magic: bytes, newest: int) -> Sequence[int]:
    """Return the numbers of a prefix after the version: length of the JSON, others, and the checksum.

    Args:
        prefix: layout of the prefix.
        head: beginning of the file.
        magic: expected magic.
        newest: newest format version that this process reads.

    Raises:
        NewerFormatError: the file has a newer format version. FormatError: it is of another kind.
    """
    if len(head) < prefix.size or head[: len(magic)] != magic:
        raise FormatError("it has another magic, or is too short")
    _, version, *numbers = prefix.unpack_from(head)
    if version > newest:
        raise NewerFormatError(f"format {version} is newer than {newest}; upgrade hf-tiered-cache")
    return numbers


def finish_head(prefix: struct.Struct, head: bytearray, covered: int, guard: Guard) -> bytes:
    """Write tag and checksum into a head that has zeros in their places.

    Args:
        prefix: layout of the prefix.
        head: all data before the blocks.
        covered: number of bytes that the checksum covers.
        guard: guard of the blocks, which computes the tag.
    """
    tag = guard.tag(bytes(head))
    head[covered - len(tag) : covered] = tag
    head[prefix.size - 8 : prefix.size] = xxh3(bytes(head[:covered])).to_bytes(8, "little")
    return bytes(head)


def check_head(prefix: struct.Struct, covered: bytes) -> None:
    """Raise FormatError if the covered bytes of a head fail their checksum."""
    if xxh3(_blank(prefix, covered, len(covered))) != int.from_bytes(covered[prefix.size - 8 : prefix.size], "little"):
        raise FormatError("the data before the blocks fails its checksum")


def check_tag(prefix: struct.Struct, head: bytes, covered: int, guard: Guard) -> None:
    """Raise FormatError if the head of an encrypted file was not written with the store's key."""
    end = covered - TAG_BYTES
    tag = guard.tag(_blank(prefix, head[:end], covered) + head[covered:])
    if not hmac.compare_digest(tag, head[end:covered]):  # in constant time
        raise FormatError("the data before the blocks was not written with the store's key")


def _blank(prefix: struct.Struct, data: bytes, size: int) -> bytes:
    """Return data with zeros as checksum, and zeros up to `size`."""
    return (data[: prefix.size - 8] + bytes(8) + data[prefix.size :]).ljust(size, b"\0")


def check_not_sparse(nbytes: int, stored: Stored) -> None:
    """Raise OSError if `nbytes` of a file cannot be on the disk. This is not damage: `stored` may be outdated."""
    if nbytes > _LARGE and nbytes > _MOST_HOLES * stored.nbytes:
        raise OSError(errno.EFBIG, f"{nbytes} bytes in a file that occupies {stored.nbytes}")


# --- blocks


def write_blocks(
    upload: Upload, offset: int, guard: Guard, first: int, blocks: torch.Tensor, linear: np.ndarray | None = None
) -> np.ndarray:
    """Write blocks and return their digests, `DIGEST_DTYPE` `[blocks]`.

    Args:
        upload: upload to write to.
        offset: byte offset of the first block in the file.
        guard: encrypts blocks, if the store has a key, and computes their digests.
        first: number of the first block in the file.
        blocks: uint8 `[blocks, block_bytes]` on the CPU.
        linear: int64 `[blocks]`, their lin64 if known.
    """
    digests = [np.empty(0, DIGEST_DTYPE)]
    for piece, table in guard.seal(first, blocks, linear) if len(blocks) else ():  # a KV cache group may hold no tokens
        upload.write(piece.numpy().data.cast("B"), offset)
        offset += piece.numel()
        digests.append(table)
    return np.concatenate(digests)
