"""Segments without a model: random blocks with synthetic prefix hashes."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import processes
import torch
from drawn_faults import du

from hf_tiered_cache.store.backend import SegmentBackend
from hf_tiered_cache.store.cipher import Plain
from hf_tiered_cache.store.disk import SegmentStore
from hf_tiered_cache.store.engines import PosixEngine
from hf_tiered_cache.store.folder import FolderBackend, head_of_file
from hf_tiered_cache.store.format import HASH_BYTES, SegmentHeader
from hf_tiered_cache.store.geometry import HASH_TOKENS, Geometry, KVLayout, LayerKV
from hf_tiered_cache.store.quota import Limits
from hf_tiered_cache.store.segment import Head, read_head
from hf_tiered_cache.store.shape import SegmentShape

LAYOUT = KVLayout((LayerKV(2, 8, 2, 8),) * 5, torch.float32)


def hashes(count: int, seed: str = "a", parent: bytes = b"") -> list[bytes]:
    """Return `count` prefix hashes of a synthetic chain."""
    result = []
    for i in range(count):
        parent = hashlib.blake2b(parent + f"{seed}{i}".encode(), digest_size=HASH_BYTES).digest()
        result.append(parent)
    return result


def without_catalogue(root: Path) -> None:
    """Delete the catalogue of a closed store."""
    for suffix in ("", "-wal", "-shm"):
        (root / f"catalogue.sqlite{suffix}").unlink(missing_ok=True)


def segment(
    chain: list[bytes],
    *,
    geometry: Geometry | None = None,
    fingerprint: str = "model",
    position: int = 0,
    expires: float | None = None,
    created: float | None = None,
    fill: int | None = None,
    **names: Any,
) -> tuple[SegmentHeader, list[bytes], list[torch.Tensor]]:
    """Create header, prefix hashes and blocks (one tensor per KV cache group); `names` sets `model` and `label`."""
    shape = SegmentShape(LAYOUT, geometry or Geometry(), len(chain) * HASH_TOKENS)
    header = SegmentHeader(
        id=hashlib.blake2b(b"".join(chain) + fingerprint.encode(), digest_size=HASH_BYTES).hexdigest(),
        fingerprint=fingerprint,
        shape=shape,
        parent=b"\0" * HASH_BYTES,
        position=position,
        created=time.time() if created is None else created,
        expires=expires,
        **names,
    )
    generator = np.random.default_rng(int(header.id[:8], 16))
    blocks = []
    for block_group in shape.block_groups:
        data = generator.integers(0, 256, (shape.chunks_in(block_group), block_group.block_bytes), dtype=np.uint8)
        blocks.append(torch.from_numpy(data if fill is None else np.full_like(data, fill)))
    return header, chain, blocks


def open_store(root: Path, *, verify: bool = True, cipher: Plain | None = None, **limits) -> SegmentStore:
    """Open a segment store with its own engine and counters."""
    return store_over(FolderBackend(root, PosixEngine()), verify=verify, cipher=cipher, **limits)


def store_over(backend: SegmentBackend, *, verify: bool = True, cipher: Plain | None = None, **limits) -> SegmentStore:
    """Open a segment store over any backend."""
    bounds = Limits(**{"floor": 0} | limits)
    return SegmentStore(backend, verify=verify, limits=bounds, cipher=cipher or Plain())


def read_file(path: Path, cipher: Plain | None = None) -> Head:
    """Read the header and tables of a file."""
    return read_head(head_of_file, path, cipher)


def read_back(store: SegmentStore, segment_id: str) -> list[torch.Tensor]:
    """Read all blocks of a segment through the engine, by KV cache group."""
    from hf_tiered_cache.store.memory import aligned_bytes

    reader = store.reader(segment_id)
    assert reader is not None
    block_groups = []
    for block_group in reader.shape.block_groups:
        memory = aligned_bytes(reader.shape.chunks_in(block_group) * block_group.block_bytes).view(
            -1, block_group.block_bytes
        )
        reader.read(block_group.index, [(0, memory)]).result()
        block_groups.append(memory)
    return block_groups


def runs_of(lease):
    """Return the runs of blocks that a handle of one request has read."""
    (leased,) = lease.fetched
    return leased.arrived.runs()


def written_at_once(root: Path, limit: int, writers: int, action: str) -> int:
    """Return the peak size of a store's folder while several processes publish 12 segments each.

    Args:
        root: Folder of the store.
        limit: Quota of the store.
        writers: Number of processes.
        action: Code that runs for segment number `i`, with the store `s` and the process's number `n`.
    """
    code = (
        "import sys; sys.path[:0] = [sys.argv[2]]\n"
        "from pathlib import Path; from segments import *\n"
        "s, n = open_store(Path(sys.argv[1]), quota=int(sys.argv[4])), sys.argv[3]\n"
        f"for i in range(12):\n{indent(action, '    ')}"
    )
    arguments = [sys.executable, "-c", code, str(root), os.path.dirname(__file__)]
    running = [processes.Popen([*arguments, str(number), str(limit)]) for number in range(writers)]
    peak = 0
    while any(process.poll() is None for process in running):
        if root.exists():
            peak = max(peak, du(root))
        time.sleep(0.002)
    assert [process.returncode for process in running] == [0] * writers
    return peak
