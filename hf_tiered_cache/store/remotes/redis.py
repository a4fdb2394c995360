"""Redis, Valkey, and other servers with its protocol. Needs redis-py.

The value of an object's key is a head of 32 bytes and the first part of the object. Further parts have keys of their
own, which contain the version of the object, so parts of two versions never mix. Memory limits and expiry are those of
the server: an object that it has dropped, or a part of it, is not found.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from ...errors import ConfigError
from ..files import Stored
from ..objects import ObjectBackend

_PART_BYTES = 4 << 20
"""Bytes of a part. Redis limits a value to 512 MiB, and serves nobody else while it copies one."""
_HEAD = struct.Struct("<8s16sQ")  # magic, version, bytes of the object
_MAGIC = b"HFTCRD\r\n"
_UNFINISHED_SECONDS = 3600
"""Lifetime of the parts of an object that is not complete yet, in case its writer dies."""
_SECONDS = 10.0
_PREFIX = "hf_tiered_cache"


class _Head(NamedTuple):
    version: bytes
    size: int


class RedisBackend(ObjectBackend):
    """Backend with the objects of a store as values of a Redis server.

    A lock holds within one process.

    Args:
        address: "redis://host:port/database/prefix" or "rediss://..." for TLS. The prefix of the keys is
            "hf_tiered_cache" if it is omitted. User and password are part of the address, as in other Redis clients,
            or are taken from the variables REDIS_USERNAME and REDIS_PASSWORD. They are not shown.

    Raises:
        ConfigError: redis-py is not installed, or the address is not valid.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        try:
            import redis
        except ImportError as error:
            raise ConfigError(
                f"{parts.scheme}:// requires the package redis ({error}); pip install 'hf-tiered-cache[redis]'"
            ) from error
        database, _, prefix = parts.path.strip("/").partition("/")
        place = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
        self.keys = f"{prefix or _PREFIX}:"
        self.faults = redis.exceptions
        environment = {"username": os.environ.get("REDIS_USERNAME"), "password": os.environ.get("REDIS_PASSWORD")}
        try:
            self.client: Any = redis.Redis.from_url(
                urlunsplit((parts.scheme, parts.netloc, f"/{database or 0}", parts.query, "")),
                socket_timeout=_SECONDS,
                socket_connect_timeout=2.0,
                **{} if "@" in parts.netloc else environment,
            )
        except ValueError as error:
            raise ConfigError(f"{place} is no address of a Redis server: {error}") from None
        super().__init__(place)

    def find_object(self, name: str) -> Stored | None:
        head = self._head(name)
        return None if head is None else _stored(head)

    def list_objects(self, folder: str) -> dict[str, Stored]:
        beginning = f"{self.keys}{folder}/" if folder else self.keys
        names = []
        with self._connected():
            for key in self.client.scan_iter(match=f"{_escaped(beginning)}*", count=1000):
                name = key.decode(errors="replace").removeprefix(beginning)
                if not {"/", "#"} & set(name):  # of a subfolder, or a part
                    names.append(name)
            with self.client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.getrange(beginning + name, 0, _HEAD.size - 1)
                heads = map(_decoded, pipeline.execute())
        return {name: _stored(head) for name, head in zip(names, heads, strict=True) if head is not None}

    def get_object(self, name: str, version: Any, offset: int, nbytes: int) -> bytes:
        stop = offset + nbytes
        # no transaction: a server whose memory is full refuses one, also for reading
        with self._connected(), self.client.pipeline(transaction=False) as pipeline:
            pipeline.getrange(self.keys + name, 0, _HEAD.size - 1)
            for part in range(offset // _PART_BYTES, max(offset, stop - 1) // _PART_BYTES + 1):
                first = part * _PART_BYTES
                start, end = max(offset, first) - first, min(stop, first + _PART_BYTES) - first - 1
                shift = 0 if part else _HEAD.size
                pipeline.getrange(self._part(name, version, part), start + shift, end + shift)
            pipeline.getrange(self.keys + name, 0, _HEAD.size - 1)
            before, *pieces, after = pipeline.execute()
        head = _decoded(before)
        if head is None or head.version != version or before != after:
            raise FileNotFoundError(errno.ENOENT, "it was replaced or deleted", name)
        content = b"".join(pieces) if nbytes else b""
        if len(content) < min(stop, head.size) - min(offset, head.size):
            raise FileNotFoundError(errno.ENOENT, "the server has dropped a part of it", name)
        return content

    def get_beginnings(self, names: Sequence[str], nbytes: int) -> dict[str, bytes]:
        with self._connected(), self.client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.getrange(self.keys + name, 0, _HEAD.size + min(nbytes, _PART_BYTES) - 1)
            values = pipeline.execute()
        return {name: value[_HEAD.size :] for name, value in zip(names, values, strict=True) if _decoded(value)}

    def put_object(self, name: str, content: bytes, replace: bool) -> None:
        version = os.urandom(16)
        with self._connected():
            before = self._head(name)
            if before is not None and not replace:
                raise FileExistsError(errno.EEXIST, "it exists", name)
            parts = self._parts(name, _Head(version, len(content)))
            for number, key in enumerate(parts, 1):
                self.client.set(key, content[number * _PART_BYTES :][:_PART_BYTES], ex=_UNFINISHED_SECONDS)
            beginning = _HEAD.pack(_MAGIC, version, len(content)) + content[:_PART_BYTES]
            if not self.client.set(self.keys + name, beginning, nx=not replace):
                self._delete(parts)
                raise FileExistsError(errno.EEXIST, "it exists", name)
            with self.client.pipeline(transaction=False) as pipeline:
                for key in parts:
                    pipeline.persist(key)
                pipeline.execute()
            if before is not None:
                self._delete(self._parts(name, before))

    def delete_object(self, name: str) -> bool:
        with self._connected():
            head = self._head(name)
            if head is None:
                return False
            existed = bool(self.client.delete(self.keys + name))
            self._delete(self._parts(name, head))
        return existed

    def close(self) -> None:
        super().close()
        self.client.close()

    def _head(self, name: str) -> _Head | None:
        with self._connected():
            return _decoded(self.client.getrange(self.keys + name, 0, _HEAD.size - 1))

    def _part(self, name: str, version: bytes, number: int) -> str:
        return f"{self.keys}{name}#{version.hex()}#{number}" if number else self.keys + name

    def _parts(self, name: str, head: _Head) -> list[str]:
        """Return the keys of all parts but the first."""
        return [self._part(name, head.version, number) for number in range(1, -(-head.size // _PART_BYTES))]

    def _delete(self, keys: Sequence[str]) -> None:
        if keys:
            self.client.delete(*keys)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Raise the exceptions of the client as OSErrors."""
        try:
            yield
        except self.faults.RedisError as error:
            number = errno.EIO
            if isinstance(error, self.faults.TimeoutError):
                number = errno.ETIMEDOUT
            elif isinstance(error, self.faults.OutOfMemoryError):
                number = errno.ENOSPC
            elif isinstance(error, self.faults.AuthenticationError | self.faults.NoPermissionError):
                number = errno.EACCES
            raise OSError(number, type(error).__name__, self.place) from None


def _decoded(value: bytes) -> _Head | None:
    """Return the head of an object, given the beginning of its value; None if there is none of this library."""
    if len(value) < _HEAD.size or not value.startswith(_MAGIC):
        return None
    _, version, size = _HEAD.unpack_from(value)
    return _Head(version, size)


def _stored(head: _Head) -> Stored:
    return Stored(head.version, head.size, _HEAD.size + head.size)


def _escaped(beginning: str) -> str:
    """Return a pattern of keys that matches these characters alone."""
    return "".join(f"\\{letter}" if letter in "*?[]^\\" else letter for letter in beginning)
