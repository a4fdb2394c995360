"""Base of backends over servers that keep values under keys, such as Redis and Mooncake Store.

The value of an object's key is a head of 32 bytes and the first part of the object. Further parts have keys of their
own, which contain the version of the object, so parts of two versions never mix. Memory limits and expiry are those of
the server: an object that it has dropped is not found. One of which it has dropped a part is deleted when that part is
read, unless the place is only read.
"""

from __future__ import annotations

import errno
import os
import struct
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from ..objects import ObjectBackend
from ..tree import Stored

HEAD = struct.Struct("<8s16sQ")  # magic, version, bytes of the object
_MAGIC = b"HFTCRD\r\n"
_MOST_BYTES = 1 << 38  # maximum size of an object
PREFIX = "hf_tiered_cache"
"""Beginning of the keys, if an address names none."""


class Head(NamedTuple):
    """Beginning of the value of an object's key."""

    version: bytes
    size: int

    @classmethod
    def of(cls, value: Any) -> Head | None:
        """Decode the beginning of a value. Returns None if this library did not write it."""
        if not isinstance(value, bytes) or len(value) < HEAD.size or not value.startswith(_MAGIC):
            return None
        return cls(*HEAD.unpack_from(value)[1:])

    def encode(self) -> bytes:
        """Return the bytes of the head."""
        return HEAD.pack(_MAGIC, *self)

    @property
    def extent(self) -> int:
        """Bytes of the object, as far as known: an impossible size is damage, and says nothing about parts."""
        return self.size if self.size <= _MOST_BYTES else 0

    @property
    def stored(self) -> Stored:
        """Metadata of the object."""
        return Stored(self.version, self.size, HEAD.size + self.extent)


class Range(NamedTuple):
    """Bytes of the value of a key."""

    key: str
    start: int
    stop: int


class ValueBackend(ObjectBackend):
    """Backend with the objects of a store as values of a server, under keys that begin with `prefix`."""

    first_bytes: ClassVar[int] = 4 << 20
    """Bytes of the first part, which is in the value of the object's key."""
    part_bytes: ClassVar[int] = 4 << 20
    """Bytes of the other parts."""

    def __init__(self, place: str, prefix: str) -> None:
        self.keys = f"{prefix or PREFIX}:"
        super().__init__(place)

    # --- the values

    @abstractmethod
    def read_values(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return bytes of values in one round trip; fewer where a value ends, none of a missing one. Raises OSError."""

    def set_part(self, key: str, content: bytes) -> None:
        """Write the value of a new key, which may be dropped until `keep` is called. Raises OSError."""
        self.set_value(key, content, replace=True)

    def keep(self, keys: Sequence[str]) -> None:  # most servers need nothing
        """Keep parts, since their object is complete. Raises OSError."""

    @abstractmethod
    def set_value(self, key: str, content: bytes, replace: bool) -> bool:
        """Write a value. Returns False if there is one, and it is not to be replaced. Raises OSError."""

    @abstractmethod
    def delete_values(self, keys: Sequence[str]) -> bool:
        """Delete values. Returns whether one of them existed. Raises OSError."""

    @abstractmethod
    def list_keys(self, beginning: str) -> list[str]:
        """Return the keys that begin with these characters. Raises OSError."""

    # --- the objects

    def find_object(self, name: str) -> Stored | None:
        head = self._head(name)
        return None if head is None else head.stored

    def list_objects(self, folder: str) -> dict[str, Stored]:
        beginning = f"{self.keys}{folder}/" if folder else self.keys
        names = [key.removeprefix(beginning) for key in self.list_keys(beginning)]
        names = [name for name in names if not {"/", "#"} & set(name)]  # not of a subfolder, and no part
        heads = self.read_values([Range(beginning + name, 0, HEAD.size) for name in names])
        head_by_name = {name: Head.of(value) for name, value in zip(names, heads, strict=True)}
        return {name: head.stored for name, head in head_by_name.items() if head is not None}

    def get_object(self, name: str, version: Any, offset: int, nbytes: int) -> bytes:
        around = Range(self.keys + name, 0, HEAD.size)
        ranges = self._ranges(name, version, offset, offset + nbytes)
        before, *pieces, after = self.read_values([around, *ranges, around])
        head = Head.of(before)
        if head is None or head.version != version or before != after:
            raise FileNotFoundError(errno.ENOENT, "it was replaced or deleted", name)
        content = b"".join(pieces)
        if len(content) < min(offset + nbytes, head.size) - min(offset, head.size):
            if self.writable and self._head(name) == head:  # of no use, and can be stored again
                self._discard([self.keys + name, *self._parts(name, head)])
            raise FileNotFoundError(errno.ENOENT, "the server has dropped a part of it", name)
        return content

    def get_beginnings(self, names: Sequence[str], nbytes: int) -> dict[str, bytes]:
        most = HEAD.size + min(nbytes, self.first_bytes)
        values = self.read_values([Range(self.keys + name, 0, most) for name in names])
        return {name: value[HEAD.size :] for name, value in zip(names, values, strict=True) if Head.of(value)}

    def put_object(self, name: str, content: bytes, replace: bool) -> None:
        if len(content) > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"an object has at most {_MOST_BYTES} bytes", name)
        before = self._head(name)
        if before is not None and not replace:
            raise FileExistsError(errno.EEXIST, "it exists", name)
        head = Head(os.urandom(16), len(content))
        parts = self._parts(name, head)
        is_stored = False
        try:
            for number, key in enumerate(parts):
                self.set_part(key, content[self.first_bytes + number * self.part_bytes :][: self.part_bytes])
            value = head.encode() + content[: self.first_bytes]
            is_stored = self.set_value(self.keys + name, value, replace and before is not None)
            if not is_stored:  # written meanwhile, a value of another program, or written by a call that was repeated
                current_head = self._head(name)
                is_stored = current_head == head
                if replace and current_head not in (None, head):
                    before, is_stored = current_head, self.set_value(self.keys + name, value, True)
        finally:
            if not is_stored:  # also if the server is full: parts without an object would keep it full
                self._discard(parts)
        if not is_stored:
            raise FileExistsError(errno.EEXIST, "it exists", name)
        self.keep(parts)
        if before is not None:
            self._discard(self._parts(name, before))

    def delete_object(self, name: str) -> bool:
        head = self._head(name)
        if head is None:
            return False
        existed = self.delete_values([self.keys + name])
        self._discard(self._parts(name, head))
        return existed

    def _head(self, name: str) -> Head | None:
        return Head.of(self.read_values([Range(self.keys + name, 0, HEAD.size)])[0])

    def _ranges(self, name: str, version: bytes, start: int, stop: int) -> list[Range]:
        """Return where the bytes of an object are."""
        ranges = []
        first, shift = 0, HEAD.size
        for number, key in enumerate([self.keys + name, *self._parts(name, Head(version, stop))]):
            end = self.first_bytes + number * self.part_bytes
            if max(start, first) < min(stop, end):
                ranges.append(Range(key, max(start, first) - first + shift, min(stop, end) - first + shift))
            first, shift = end, 0
        return ranges

    def _parts(self, name: str, head: Head) -> list[str]:
        """Return the keys of all parts but the first."""
        count = -(-(head.extent - self.first_bytes) // self.part_bytes)
        return [f"{self.keys}{name}#{head.version.hex()}#{number}" for number in range(1, 1 + count)]

    def _discard(self, parts: Sequence[str]) -> None:
        """Delete parts without an object. What cannot be deleted now is left to the server."""
        with suppress(OSError):
            if parts:
                self.delete_values(parts)
