"""Parts that segments and sidecars have in common: checksums, prefix, encryption parameters, tag and blocks.

A file has a head, which is all data before the blocks, and blocks. The head begins with a prefix: magic, format
version, length of the JSON that follows, and last a checksum. The checksum covers the first page of a segment, or the
whole head of a sidecar. In an encrypted file, the covered bytes end with a tag of the whole head. Both are computed
with zeros in their own places.

A block has two checksums: xxh3-64 for bytes that the CPU sees, and a linear digest for bytes that only the GPU sees.
"""

from __future__ import annotations

import errno
import hmac
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash

from ..errors import FormatError, OtherFormatError
from .backend import Upload
from .kinds import hexadecimal
from .lazy import torch
from .tree import Stored

DIGEST_DTYPE = np.dtype([("xxh3", "<u8"), ("lin64", "<u8")])
"""Row of a segment's digest table: 16 bytes per block."""
_PIECE_BYTES = 16 << 20  # bytes of blocks that are multiplied at a time; the products take as much memory again

xxh3: Callable[[memoryview | bytes], int] = xxhash.xxh3_64_intdigest
"""Function that returns the xxh3-64 of bytes. It runs at each look at a model's weights, so it is a C function."""


@lru_cache(maxsize=32)
def _weights(words: int, device: torch.device) -> torch.Tensor:
    """Return odd 64-bit constants, splitmix64 of their index: a change of any one word changes the sum."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, words + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)


def lin64(blocks: torch.Tensor) -> torch.Tensor:
    """Return the sum of each block's 64-bit words times fixed odd constants, modulo 2^64: int64 `[n]`.

    It uses only integer arithmetic, so all devices give the same digest. GPUDirect Storage reads bytes into the GPU
    that the CPU never sees. There, xxh3 would need a copy back to the host. `blocks` is uint8 `[n, block_bytes]`,
    block_bytes a multiple of 8.
    """
    words = blocks.view(torch.int64)  # [n, block_bytes / 8]
    weights, step = _weights(words.shape[1], blocks.device), max(1, _PIECE_BYTES // blocks.shape[1])
    return torch.cat([(piece * weights).sum(dim=1) for piece in words.split(step)])


class PackedBlocks(NamedTuple):
    """Blocks of a KV cache group, packed on a device that has also computed their lin64."""

    blocks: torch.Tensor
    """uint8 `[n, block_bytes]` on the CPU."""
    lin64: np.ndarray
    """int64 `[n]`, the bits of the unsigned digests."""


Group: TypeAlias = "torch.Tensor | PackedBlocks"
"""Blocks of a KV cache group, uint8 `[n, block_bytes]` on the CPU, with or without their lin64."""


def block_digests(blocks: torch.Tensor, linear: np.ndarray | None = None) -> np.ndarray:
    """Return both digests of blocks, uint8 `[n, block_bytes]`: `DIGEST_DTYPE` `[n]`; `linear` is lin64, if known."""
    table = np.empty(blocks.shape[0], DIGEST_DTYPE)
    table["xxh3"] = [xxh3(row) for row in rows(blocks)]
    table["lin64"] = (lin64(blocks).numpy() if linear is None else linear).view(np.uint64)
    return table


class Guard:
    """Converter between a file's blocks and memory, with a digest for each block and a tag for the file's header.

    This one stores blocks unencrypted, and detects accidental damage only.
    """

    def seal(
        self, first: int, blocks: torch.Tensor, linear: np.ndarray | None = None
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Yield the blocks as they are stored, piece by piece, with their digests. Each piece is valid until the next.

        `first` is the number of the first block in the file, `blocks` are uint8 `[n, block_bytes]` on the CPU, not
        modified, and `linear` is their lin64, int64 `[n]`, if it is already known.
        """
        yield blocks, block_digests(blocks, linear)

    def open(self, first: int, blocks: torch.Tensor, digests: np.ndarray) -> int | None:
        """Verify stored blocks, and decrypt them in place. Returns the index of the first damaged block, or None.

        `first` is the number of the first block in the file, `blocks` are uint8 `[n, block_bytes]` on the CPU, as they
        were read, and `digests` the stored digests, `DIGEST_DTYPE` `[n]`.
        """
        sums = np.fromiter((xxh3(row) for row in rows(blocks)), np.uint64, blocks.shape[0])
        bad = np.flatnonzero(sums != digests["xxh3"])
        return int(bad[0]) if len(bad) else None

    def tag(self, head: bytes) -> bytes:
        """Return the tag that proves that the writer of a header had the key; empty if there is no key."""
        return b""


def content_of(digests: np.ndarray) -> int:
    """Return an identifier of a KV cache group's content, from the digests of its blocks, `DIGEST_DTYPE` `[chunks]`."""
    return xxh3(digests.tobytes())


def rows(blocks: torch.Tensor) -> list[memoryview]:
    """Return the blocks of a CPU tensor, uint8 `[n, block_bytes]`, as memory views without a copy."""
    return [memoryview(row) for row in blocks.numpy()]


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
            raise OtherFormatError(f"it is encrypted with {data['name']!r}, which this version does not support")
        return cls(hexadecimal(data["key"], KEY_ID_BYTES), bytes.fromhex(hexadecimal(data["salt"], SALT_BYTES)))


# --- head


def parse_prefix(prefix: struct.Struct, head: bytes, magic: bytes, newest: int, oldest: int = 1) -> Sequence[int]:
    """Return the numbers of a prefix after the version: length of the JSON, others, and the checksum.

    Raises OtherFormatError if the version is not one from `oldest` to `newest`, FormatError if the magic differs.
    """
    if len(head) < prefix.size or head[: len(magic)] != magic:
        raise FormatError("it has another magic, or is too short")
    _, version, *numbers = prefix.unpack_from(head)
    if version > newest:
        raise OtherFormatError(f"format {version} is newer than {newest}; upgrade hf-tiered-cache")
    if version < oldest:
        raise OtherFormatError(f"format {version} was never released, and is not read; you may delete the file")
    return numbers


def finish_head(prefix: struct.Struct, head: bytearray, num_covered: int, guard: Guard) -> bytes:
    """Write tag and checksum, of the first `num_covered` bytes, into a head that has zeros in their places."""
    tag = guard.tag(bytes(head))
    head[num_covered - len(tag) : num_covered] = tag
    head[prefix.size - 8 : prefix.size] = xxh3(bytes(head[:num_covered])).to_bytes(8, "little")
    return bytes(head)


def check_head(prefix: struct.Struct, head: bytes) -> None:
    """Raise FormatError if the covered bytes of a head fail their checksum."""
    if xxh3(_blank(prefix, head, len(head))) != int.from_bytes(head[prefix.size - 8 : prefix.size], "little"):
        raise FormatError("the data before the blocks fails its checksum")


def check_tag(prefix: struct.Struct, head: bytes, num_covered: int, guard: Guard) -> None:
    """Raise FormatError if the head of an encrypted file was not written with the store's key."""
    end = num_covered - TAG_BYTES
    tag = guard.tag(_blank(prefix, head[:end], num_covered) + head[num_covered:])
    if not hmac.compare_digest(tag, head[end:num_covered]):  # in constant time
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
    """Write blocks at an offset of a file, and return their digests, `DIGEST_DTYPE` `[blocks]`. See `Guard.seal`."""
    digests = [np.empty(0, DIGEST_DTYPE)]
    for piece, table in guard.seal(first, blocks, linear) if len(blocks) else ():  # a KV cache group may hold no tokens
        upload.write(piece.numpy().data.cast("B"), offset)
        offset += piece.numel()
        digests.append(table)
    return np.concatenate(digests)
