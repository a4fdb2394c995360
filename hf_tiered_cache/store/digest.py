"""Checksums of blocks: xxh3-64 for bytes the CPU sees, and a linear digest for bytes that only the GPU sees."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
import xxhash

DIGEST_DTYPE = np.dtype([("xxh3", "<u8"), ("lin64", "<u8")])
"""One row of a segment's digest table: 16 bytes a block."""
_PIECE_BYTES = 16 << 20
"""Of blocks whose products are in memory at once, which take as much again."""


def xxh3(data: memoryview | bytes) -> int:
    """xxh3-64 of `data`."""
    return xxhash.xxh3_64_intdigest(data)


@lru_cache(maxsize=32)
def _weights(words: int, device: torch.device) -> torch.Tensor:
    """Odd 64-bit constants, splitmix64 of their index: a change of any one word changes the sum."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, words + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)


def lin64(blocks: torch.Tensor) -> torch.Tensor:
    """Sum of each block's 64-bit words times fixed odd constants, modulo 2^64.

    Integer arithmetic only, so any device gives the same digest: GPUDirect Storage brings bytes to the GPU that
    the CPU never sees, and there xxh3 would cost a copy back.

    Args:
        blocks: uint8 `[n, block_bytes]`, block_bytes a multiple of 8.

    Returns:
        int64 `[n]`, the bits of the unsigned digests.
    """
    words = blocks.view(torch.int64)  # [n, block_bytes / 8]
    weights, step = _weights(words.shape[1], blocks.device), max(1, _PIECE_BYTES // blocks.shape[1])
    return torch.cat([(piece * weights).sum(dim=1) for piece in words.split(step)])


class PackedBlocks(NamedTuple):
    """A block group's blocks, packed on a device that has also computed their lin64."""

    blocks: torch.Tensor
    """uint8 `[n, block_bytes]` on the CPU."""
    lin64: np.ndarray
    """int64 `[n]`, the bits of the unsigned digests."""


Group = torch.Tensor | PackedBlocks
"""A block group's blocks, uint8 `[n, block_bytes]` on the CPU, with or without their lin64."""


def block_digests(blocks: torch.Tensor, linear: np.ndarray | None = None) -> np.ndarray:
    """Both digests of each block.

    Args:
        blocks: uint8 `[n, block_bytes]` on the CPU.
        linear: int64 `[n]`, their lin64 if that is known.

    Returns:
        `DIGEST_DTYPE` `[n]`.
    """
    table = np.empty(blocks.shape[0], DIGEST_DTYPE)
    table["xxh3"] = [xxh3(row) for row in rows(blocks)]
    table["lin64"] = (lin64(blocks).numpy() if linear is None else linear).view(np.uint64)
    return table


class Guard(Protocol):
    """What stands between a file's blocks and memory: a digest for each block, and for the file's head a tag."""

    def seal(
        self, first: int, blocks: torch.Tensor, linear: np.ndarray | None = None
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Blocks as they are written, piece by piece, and their digests; each piece is good until the next.

        Args:
            first: number of the first block in the file.
            blocks: uint8 `[n, block_bytes]` on the CPU; left as it is.
            linear: int64 `[n]`, their lin64 if that is known.
        """

    def open(self, first: int, blocks: torch.Tensor, digests: np.ndarray) -> int | None:
        """Make what was read what was written, in place. Returns which block is the first that is damaged, or None.

        Args:
            first: number of the first block in the file.
            blocks: uint8 `[n, block_bytes]` on the CPU.
            digests: `DIGEST_DTYPE` `[n]`, as they were written.
        """

    def tag(self, head: bytes) -> bytes:
        """What proves that who wrote a head had the key."""


class Checksums:
    """Guards blocks that are stored as they are, against accidents only."""

    def seal(
        self, first: int, blocks: torch.Tensor, linear: np.ndarray | None = None
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        yield blocks, block_digests(blocks, linear)

    def open(self, first: int, blocks: torch.Tensor, digests: np.ndarray) -> int | None:
        found = np.fromiter((xxh3(row) for row in rows(blocks)), np.uint64, blocks.shape[0])
        bad = np.flatnonzero(found != digests["xxh3"])
        return int(bad[0]) if len(bad) else None

    def tag(self, head: bytes) -> bytes:
        return b""


def is_tagged(guard: Guard, head: bytes, tag: bytes) -> bool:
    """Whether `tag` is the head's, found out in a time that tells nothing."""
    return hmac.compare_digest(guard.tag(head), tag)


def content_of(digests: np.ndarray) -> int:
    """A name for what a block group contains, from the digests of its blocks, `DIGEST_DTYPE` `[chunks]`."""
    return xxh3(digests.tobytes())


def rows(blocks: torch.Tensor) -> list[memoryview]:
    """The blocks of a CPU tensor, uint8 `[n, block_bytes]`, as memory without a copy."""
    return [memoryview(row) for row in blocks.numpy()]
