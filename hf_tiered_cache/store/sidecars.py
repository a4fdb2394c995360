"""Sidecars: arrays made from a segment's KV or from its use. They can be replaced or lost without harm.

There is one file per kind, named after the segment, a dot and the kind:

    prefix | JSON | digests of blocks | tag, if encrypted | blocks: the arrays, concatenated

A sidecar is bound to the exact bytes of the segment that it was made from. In a store with a key it is encrypted like a
segment. docs/format.md specifies it byte by byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..errors import FormatError, IntegrityError, QuotaError, StoreBusyError, reason_of
from .backend import SegmentBackend, Upload
from .cipher import Plain
from .container import (
    DIGEST_DTYPE,
    TAG_BYTES,
    Guard,
    Seal,
    check_head,
    check_not_sparse,
    check_tag,
    finish_head,
    parse_prefix,
    write_blocks,
)
from .engines import EngineFile, ReadOp
from .faults import Counters, figure_of
from .geometry import ALIGNMENT, aligned
from .kinds import SIDECAR, SIDECAR_MAGIC, decoding, sidecar_sizes
from .lazy import torch
from .memory import aligned_bytes
from .segment import SegmentReader
from .tree import Stored

MAGIC = SIDECAR_MAGIC
FORMAT_VERSION = 1
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn"),
    *("int64", "int32", "int16", "int8", "uint8"),
)
"""Names of the supported dtypes of arrays."""
PREFIX = struct.Struct("<8sIIQQ")  # magic, version, bytes of the JSON, bytes of the arrays, xxh3-64 of the head
_MOST_JSON, _MOST_BYTES, _MOST_DIMS = 64 << 10, 1 << 40, 8
_BLOCK_BYTES, _ARRAY_ALIGNMENT = 64 << 10, 64
_BUFFER_BYTES = 16 << 20  # maximum number of bytes that are read and verified at a time


class Kept(NamedTuple):
    """Arguments of `Sidecars.keep`, except the segment."""

    kind: str
    arrays: dict[str, torch.Tensor]
    facts: dict[str, Any]


@dataclass(frozen=True)
class _Place:
    """Name, dtype and shape of one array of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Head:
    """Decoded header of a sidecar: all data before the blocks."""

    segment: str
    content: str
    """Identifier of the segment's bytes that it was made from (see `_content_of`)."""
    kind: str
    facts: str
    """Parameters that it was made with, as JSON with sorted keys."""
    arrays: tuple[_Place, ...]
    seal: Seal | None
    digests: np.ndarray
    """Digests of its blocks, `DIGEST_DTYPE` `[blocks]`."""

    @property
    def nbytes(self) -> int:
        """Total bytes of all arrays, each padded."""
        return sum(aligned(array.nbytes, _ARRAY_ALIGNMENT) for array in self.arrays)


class Sidecars:
    """Sidecars of the segments of a store. `reserved` is its `Space.reserved`."""

    def __init__(
        self,
        backend: SegmentBackend,
        cipher: Plain,
        counters: Counters,
        reserved: Callable[[str, int, Collection[str]], AbstractContextManager[Upload]],
    ) -> None:
        self._backend, self._cipher, self._counters, self._reserved = backend, cipher, counters, reserved

    # --- writing and reading

    def keep(
        self, reader: SegmentReader, kind: str, arrays: Mapping[str, torch.Tensor], facts: Mapping[str, Any]
    ) -> bool:
        """Write a sidecar of a segment, replacing an existing one of this kind.

        A kind is named by a lowercase letter, followed by lowercase letters, digits or `_`. Arrays are dense tensors by
        name, with dtypes in `DTYPES`. `kept` needs the same `facts`, which are JSON, and not encrypted.

        Returns whether it is stored now. A full disk, the quota, an unwritable place or an unavailable lock drop it,
        which is counted. It is also dropped if the segment was deleted or replaced. Raises ValueError for bad input.
        """
        name = f"{reader.id}.{kind}"
        if SIDECAR.names.fullmatch(name) is None:
            raise ValueError(f"{kind!r} is not a valid kind of sidecar")
        if odd := {array.dtype for array in arrays.values()} - set(_dtypes().values()):
            raise ValueError(f"arrays of {odd} are not supported in sidecars")
        if not self._backend.writable:
            self._counters.add("dropped_writes")
            return False
        seal = self._cipher.new_seal()
        guard, nbytes = self._cipher.guard(seal), sum(aligned(a.nbytes, _ARRAY_ALIGNMENT) for a in arrays.values())
        blocks = _pack(nbytes, arrays.values())
        data = {
            "segment": reader.id,
            "content": _content_of(reader),
            "kind": kind,
            "facts": json.loads(_text(facts)),
            "arrays": [[key, str(a.dtype).removeprefix("torch."), list(a.shape)] for key, a in arrays.items()],
        }
        text = _text(data | ({} if seal is None else {"cipher": seal.to_json()})).encode()
        if len(text) > _MOST_JSON:
            raise ValueError(f"names and facts of {len(text)} bytes exceed the limit of {_MOST_JSON}")
        head_bytes = _head_bytes(len(text), nbytes)
        try:
            with self._reserved(name, head_bytes + blocks.numel(), {reader.id}) as upload:
                digests = write_blocks(upload, head_bytes, guard, 0, blocks)
                head = bytearray(PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), nbytes, 0) + text + digests.tobytes())
                upload.write(memoryview(finish_head(PREFIX, head.ljust(head_bytes, b"\0"), head_bytes, guard)), 0)
                if not reader.is_current():
                    return False
                upload.publish(True)
                self._counters.add("bytes_written", upload.nbytes())
        except (OSError, QuotaError, StoreBusyError) as error:
            self._counters.note(
                "dropped_writes", f"sidecars {type(error).__name__}", f"{name} could not be saved: {reason_of(error)}"
            )
            return False
        return True

    def kept(self, reader: SegmentReader, kind: str, facts: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
        """Return the arrays of one kind of a segment by name: dense CPU tensors, each with memory of its own.

        None if there is no sidecar, it was made from other bytes or with other facts, or, counted, cannot be used.
        """
        sidecar = self._read(reader, kind, _text(facts))
        return None if sidecar is None else sidecar.arrays

    def all_of(self, reader: SegmentReader) -> list[Kept]:
        """Read all usable sidecars of a segment, to `keep` them for another segment with the same tokens."""
        kinds: Collection[str] = ()
        with suppress(OSError):
            kinds = self.sizes().get(reader.id, {})
        return [sidecar for kind in kinds if (sidecar := self._read(reader, kind)) is not None]

    def _read(self, reader: SegmentReader, kind: str, facts: str | None = None) -> Kept | None:
        """Return a sidecar of a segment. None if there is none for these facts, or, counted, if it cannot be used."""
        name = f"{reader.id}.{kind}"
        try:
            head, guard, stored, file = self._open(name)
            if head.content == _content_of(reader) and facts in (None, head.facts):
                return Kept(kind, self._arrays(name, head, guard, stored, file), json.loads(head.facts))
        except FileNotFoundError:
            pass
        except (OSError, MemoryError, FormatError, IntegrityError) as error:
            figure = figure_of(error)
            message = f"{self._backend.where(name)} cannot be used: {reason_of(error)}; it is created again"
            self._counters.note(figure, name, message)
            if figure == "verification_failures" and self._backend.writable:  # damaged
                self._delete(name)
        return None

    # --- files

    def _open(self, name: str) -> tuple[_Head, Guard, Stored, EngineFile]:
        """Open a file and verify its header. Raises FormatError or OSError."""
        stored, data, file = self._backend.open(name, _length)
        head = _decode_head(data)
        if f"{head.segment}.{head.kind}" != name:
            raise FormatError(f"the header belongs to {head.segment}.{head.kind}")
        guard = self._cipher.guard(head.seal)
        if head.seal is not None:
            check_tag(PREFIX, data, len(data), guard)
        return head, guard, stored, file

    def _arrays(
        self, name: str, head: _Head, guard: Guard, stored: Stored, file: EngineFile
    ) -> dict[str, torch.Tensor]:
        """Read, verify and decrypt the arrays. Raises IntegrityError or OSError."""
        with torch.inference_mode(False):  # as in `aligned_bytes`
            tensors = {array.name: torch.empty(array.shape, dtype=array.dtype) for array in head.arrays}
        count, block_bytes = _blocks(head.nbytes)
        step = max(1, _BUFFER_BYTES // max(1, block_bytes))
        buffer = aligned_bytes(min(step, count) * block_bytes)
        for first in range(0, count, step):
            blocks = buffer[: min(step, count - first) * block_bytes]
            begin = first * block_bytes  # offset in the blocks of the file
            self._backend.read([ReadOp(file, stored.size - count * block_bytes + begin, blocks)]).result()
            if guard.open(first, blocks.view(-1, block_bytes), head.digests[first : first + step]) is not None:
                raise IntegrityError(f"{name} fails its checksum", version=stored.version)
            offset = -begin  # of an array in `blocks`
            for array in head.arrays:
                start, stop = max(0, offset), min(offset + array.nbytes, blocks.numel())
                if start < stop:
                    target = tensors[array.name].view(-1).view(torch.uint8)
                    target[start - offset : stop - offset] = blocks[start:stop]
                offset += aligned(array.nbytes, _ARRAY_ALIGNMENT)
        return tensors

    def check(self, name: str) -> int:
        """Verify the checksums of a file. Returns its size. Raises FormatError, IntegrityError or OSError."""
        head, guard, stored, file = self._open(name)
        self._arrays(name, head, guard, stored, file)
        return stored.size

    # --- maintenance

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the bytes that each kind takes, by segment. Raises OSError."""
        return sidecar_sizes(self._backend.sidecars())

    def by_segment(self) -> dict[str, int]:
        """Return the bytes that all sidecars of a segment take, by segment. Raises OSError."""
        return {segment: sum(kinds.values()) for segment, kinds in self.sizes().items()}

    def remove(self, segments: Collection[str]) -> None:
        """Delete the sidecars of these segments. `sweep` deletes later what cannot be deleted now."""
        removed_ids = set(segments)
        with suppress(OSError):
            for name in self._backend.sidecars() if removed_ids else ():
                if name.partition(".")[0] in removed_ids:
                    self._delete(name)

    def sweep(self, dry_run: bool = False) -> dict[str, int]:
        """Delete sidecars of segments that do not exist, unless `dry_run`, and return the bytes of each file."""
        removed_sizes: dict[str, int] = {}
        with suppress(OSError):
            sizes = self._backend.sidecars()  # first: a segment that is stored meanwhile must not count as gone
            stored_ids = set(self._backend.names())
            for name in [name for name in sizes if name.partition(".")[0] not in stored_ids]:
                if self._backend.is_own(name) if dry_run else self._delete(name):
                    removed_sizes[self._backend.where(name)] = sizes[name]
        return removed_sizes

    def _delete(self, name: str) -> bool:
        with suppress(OSError):
            return self._backend.delete(name)
        return False


@cache
def _dtypes() -> dict[str, torch.dtype]:
    return {name: getattr(torch, name) for name in DTYPES}


def _content_of(reader: SegmentReader) -> str:
    """Return an identifier of a segment's bytes. It changes if a block changes or is encrypted again."""
    return f"{reader.header.digests.digest:016x}"


def _text(facts: Any) -> str:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def _blocks(nbytes: int) -> tuple[int, int]:
    """Return the number of blocks that `nbytes` of arrays take, and the bytes per block."""
    block_bytes = min(_BLOCK_BYTES, aligned(nbytes, ALIGNMENT))
    return -(-nbytes // max(1, block_bytes)), block_bytes


def _pack(nbytes: int, arrays: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenate arrays into uint8 `[blocks, block bytes]`, with zeros as padding between and after them."""
    count, block_bytes = _blocks(nbytes)
    data, offset = torch.zeros(count * block_bytes, dtype=torch.uint8), 0
    for array in arrays:
        data[offset : offset + array.nbytes].view(array.dtype).copy_(array.detach().reshape(-1))
        offset += aligned(array.nbytes, _ARRAY_ALIGNMENT)
    return data.view(count, block_bytes)


# --- header (all data before the blocks)


def _head_bytes(json_bytes: int, nbytes: int) -> int:
    return aligned(PREFIX.size + json_bytes + _blocks(nbytes)[0] * DIGEST_DTYPE.itemsize + TAG_BYTES, ALIGNMENT)


def _length(stored: Stored, page: bytes) -> int:
    """Return the length of the header. See `HeadLength`. Raises FormatError, or OSError if memory might not suffice."""
    json_bytes, nbytes, _ = parse_prefix(PREFIX, page, MAGIC, FORMAT_VERSION)
    if json_bytes > _MOST_JSON or nbytes > _MOST_BYTES:
        raise FormatError(f"{json_bytes} bytes of JSON and {nbytes} bytes of arrays exceed the limits")
    head_bytes, size = _head_bytes(json_bytes, nbytes), prod(_blocks(nbytes))
    if stored.size != head_bytes + size:
        raise FormatError(f"the file has {stored.size} bytes instead of {head_bytes + size}")
    check_not_sparse(stored.size, stored)
    return head_bytes


def _decode_head(data: bytes) -> _Head:
    """Decode a header. Raises FormatError, also for content that `Sidecars.keep` would not have written."""
    json_bytes, nbytes, _ = parse_prefix(PREFIX, data, MAGIC, FORMAT_VERSION)
    if len(data) != _head_bytes(json_bytes, nbytes):
        raise FormatError("the data before the blocks is truncated")
    check_head(PREFIX, data)
    end = PREFIX.size + json_bytes
    with decoding("the data before the blocks cannot be read"):
        header = json.loads(data[PREFIX.size : end])
        head = _Head(
            segment=header["segment"],
            content=header["content"],
            kind=header["kind"],
            facts=_text(header["facts"]),
            arrays=tuple(_Place(str(name), _dtypes()[dtype], _shape(shape)) for name, dtype, shape in header["arrays"]),
            seal=Seal.of(header),
            digests=np.frombuffer(data, DIGEST_DTYPE, _blocks(nbytes)[0], end),
        )
    if head.nbytes != nbytes:
        raise FormatError(f"arrays of {head.nbytes} bytes do not fit into {nbytes}")
    return head


def _shape(sizes: Any) -> tuple[int, ...]:
    shape = tuple(sizes)
    is_valid = len(shape) <= _MOST_DIMS and all(type(size) is int and size >= 0 for size in shape)
    if not is_valid or prod(size or 1 for size in shape) > _MOST_BYTES:
        raise ValueError(f"{sizes!r} is not a valid shape")
    return shape
