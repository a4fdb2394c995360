"""Redis, Valkey, and other servers with its protocol. Needs redis-py."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ...errors import ConfigError
from ..settings import split_server, without_secrets
from .values import Range, ValueBackend

_UNFINISHED_SECONDS = 3600  # lifetime of the parts of an object that is not complete yet, in case its writer dies
_SECONDS, _CONNECT_SECONDS = 5.0, 2.0
"""Timeouts of an answer and of a connection. A call is not repeated: a request that waits longer computes instead."""
_LISTED = 1000  # number of keys that the server looks at in one step of a listing


class RedisBackend(ValueBackend):
    """Backend with the objects of a store as values of a Redis server. A lock holds within one process.

    An address is "redis://host:port/database/prefix" or "rediss://..." for TLS. The prefix of the keys is
    "hf_tiered_cache" if it is omitted. User and password are part of the address, as in other Redis clients, or are
    taken from the variables REDIS_USERNAME and REDIS_PASSWORD. They are not shown. Raises ConfigError if it is not
    valid.
    """

    def __init__(self, address: str) -> None:
        parts = split_server(address)
        database, _, prefix = parts.path.strip("/").partition("/")
        place = without_secrets(address).rstrip("/")
        if database and not database.isdecimal():  # the client would take database 0, for any prefix
            raise ConfigError(f"{place} names no number of a database; write redis://host:port/database/prefix")
        environment = {"username": os.environ.get("REDIS_USERNAME"), "password": os.environ.get("REDIS_PASSWORD")}
        try:
            self.client: Any = redis.Redis.from_url(
                urlunsplit((parts.scheme, parts.netloc, f"/{database or 0}", parts.query, "")),
                socket_timeout=_SECONDS,
                socket_connect_timeout=_CONNECT_SECONDS,
                # once, if the server has closed the connection; what took too long takes no longer
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,)),
                retry_on_timeout=False,
                **{} if "@" in parts.netloc else environment,
            )
        except ValueError as error:
            raise ConfigError(f"{place} is no address of a Redis server: {error}") from None
        super().__init__(place, prefix)

    def read_values(self, ranges: Sequence[Range]) -> list[bytes]:
        # no transaction: a server whose memory is full refuses one, also for reading
        with self._connected(), self.client.pipeline(transaction=False) as pipeline:
            for key, start, stop in ranges:
                pipeline.getrange(key, start, stop - 1)
            values = pipeline.execute(raise_on_error=False)
            for number, value in enumerate(values):
                if isinstance(value, redis.exceptions.ResponseError) and "WRONGTYPE" in str(value):
                    values[number] = b""  # of another program, such as a list
                elif not isinstance(value, bytes):
                    raise value if isinstance(value, Exception) else redis.exceptions.InvalidResponse("no bytes")
        return list(values)

    def set_part(self, key: str, content: bytes) -> None:
        with self._connected():
            self.client.set(key, content, ex=_UNFINISHED_SECONDS)

    def keep(self, keys: Sequence[str]) -> None:
        with self._connected(), self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.persist(key)
            pipeline.execute()

    def set_value(self, key: str, content: bytes, replace: bool) -> bool:
        with self._connected():
            return bool(self.client.set(key, content, nx=not replace))

    def delete_values(self, keys: Sequence[str]) -> bool:
        with self._connected():
            return bool(self.client.delete(*keys))

    def list_keys(self, beginning: str) -> list[str]:
        literally = re.sub(r"[*?\[\]^\\]", r"\\\g<0>", beginning)
        with self._connected():
            return [key.decode(errors="replace") for key in self.client.scan_iter(match=f"{literally}*", count=_LISTED)]

    def close(self) -> None:
        super().close()
        self.client.close()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Raise the exceptions of the client as OSErrors: if no Redis answers, they can be of any type."""
        try:
            yield
        except Exception as error:
            number = errno.EIO
            if isinstance(error, redis.exceptions.TimeoutError):
                number = errno.ETIMEDOUT
            elif isinstance(error, redis.exceptions.OutOfMemoryError):
                number = errno.ENOSPC
            elif isinstance(error, redis.exceptions.AuthenticationError | redis.exceptions.NoPermissionError):
                number = errno.EACCES
            raise OSError(number, type(error).__name__, self.place) from None
