"""Checksums of blocks: xxh3-64 for bytes the CPU sees, and a linear digest for bytes that only the GPU sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
import xxhash

DIGEST_DTYPE = np.dtype([("xxh3", "<u8"), ("lin64", "<u8")])
"""Row of a segment's digest table: 16 bytes per block."""
_PIECE_BYTES = 16 << 20
"""Bytes of blocks that are multiplied at a time; the products take as much memory again."""


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
    """Compute the sum of each block's 64-bit words times fixed odd constants, modulo 2^64.

    It uses only integer arithmetic, so all devices give the same digest. GPUDirect Storage reads bytes into the GPU
    that the CPU never sees. There, xxh3 would need a copy back to the host.

    Args:
        blocks: uint8 `[n, block_bytes]`, block_bytes a multiple of 8.

    Returns:
        int64 `[n]`, the bits of the unsigned digests.
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


Group = torch.Tensor | PackedBlocks
"""Blocks of a KV cache group, uint8 `[n, block_bytes]` on the CPU, with or without their lin64."""


def block_digests(blocks: torch.Tensor, linear: np.ndarray | None = None) -> np.ndarray:
    """Compute both digests of each block.

    Args:
        blocks: uint8 `[n, block_bytes]` on the CPU.
        linear: int64 `[n]`, their lin64 if it is already known.

    Returns:
        `DIGEST_DTYPE` `[n]`.
    """
    table = np.empty(blocks.shape[0], DIGEST_DTYPE)
    table["xxh3"] = [xxh3(row) for row in rows(blocks)]
    table["lin64"] = (lin64(blocks).numpy() if linear is None else linear).view(np.uint64)
    return table


class Guard(Protocol):
    """Converter between a file's blocks and memory, with a digest for each block and a tag for the file's header."""

    def seal(
        self, first: int, blocks: torch.Tensor, linear: np.ndarray | None = None
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Yield the blocks as they are stored, piece by piece, with their digests. Each piece is valid until the next.

        Args:
            first: number of the first block in the file.
            blocks: uint8 `[n, block_bytes]` on the CPU; not modified.
            linear: int64 `[n]`, their lin64 if it is already known.
        """

    def open(self, first: int, blocks: torch.Tensor, digests: np.ndarray) -> int | None:
        """Verify stored blocks, and decrypt them in place. Returns the index of the first damaged block, or None.

        Args:
            first: number of the first block in the file.
            blocks: uint8 `[n, block_bytes]` on the CPU, as they were read.
            digests: `DIGEST_DTYPE` `[n]`, the stored digests.
        """

    def tag(self, head: bytes) -> bytes:
        """Return the tag that proves that the writer of a header had the key; empty if there is no key."""


class Checksums:
    """Guard of blocks that are stored unencrypted. It detects accidental damage only."""

    def seal(
        self, first: int, blocks: torch.Tensor, linear: np.ndarray | None = None
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        yield blocks, block_digests(blocks, linear)

    def open(self, first: int, blocks: torch.Tensor, digests: np.ndarray) -> int | None:
        sums = np.fromiter((xxh3(row) for row in rows(blocks)), np.uint64, blocks.shape[0])
        bad = np.flatnonzero(sums != digests["xxh3"])
        return int(bad[0]) if len(bad) else None

    def tag(self, head: bytes) -> bytes:
        return b""


def content_of(digests: np.ndarray) -> int:
    """Return an identifier of a KV cache group's content, from the digests of its blocks, `DIGEST_DTYPE` `[chunks]`."""
    return xxh3(digests.tobytes())


def rows(blocks: torch.Tensor) -> list[memoryview]:
    """Return the blocks of a CPU tensor, uint8 `[n, block_bytes]`, as memory views without a copy."""
    return [memoryview(row) for row in blocks.numpy()]
