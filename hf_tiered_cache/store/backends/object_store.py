"""Object stores: S3 and what is compatible with it, Google Cloud Storage, and Azure. Needs obstore.

Credentials, endpoints and regions are taken from the environment, as the tools of each provider do: AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY, ...
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import obstore

from ...errors import ConfigError
from ..hedged import HedgedReads
from ..objects import ObjectBackend
from ..settings import split_address, without_secrets
from ..tree import Stored

_REQUESTS = 32  # requests in flight, for ranges and for lookups: an object store answers each slowly, and many at once
_CLIENT = {"connect_timeout": "2s", "timeout": "30s"}
"""The timeout is that of a request with all its bytes: a range of at most 1 MiB, or a part of an upload."""
_RETRIES = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}
"""Few: a request that waits longer computes instead."""
_NO_ANSWER = {
    "kind: Connect": "no connection; check the endpoint in the environment, and the network",
    "kind: Timeout": "no answer in time",
}
"""Reasons of requests without an answer, by how the client calls them."""
_memories: dict[str, Any] = {}  # objects of each "memory://" address of this process


class ObjectStoreBackend(ObjectBackend):
    """Backend with one object for each segment, sidecar and record.

    Processes that share a bucket see each other's segments. A lock holds within one process. An address is
    "s3://bucket/prefix", "gs://bucket/prefix", "az://account/container/prefix", or "memory://name" for objects in
    the memory of this process. Raises ConfigError if the address or the environment is not valid.
    """

    def __init__(self, address: str) -> None:
        self.client: Any = obstore
        self.store = _open(obstore, address)
        super().__init__(without_secrets(address).rstrip("/"), threads=_REQUESTS)
        # lookups do not wait for the ranges of a large segment
        self._ranges, self._beginnings = (HedgedReads(_REQUESTS, f"hf-tiered-{kind}") for kind in ("range", "look"))
        self.hedges = self._ranges, self._beginnings

    def find_object(self, name: str) -> Stored | None:
        with self._faults(name):
            try:
                return _stored(self.client.head(self.store, name))
            except FileNotFoundError:
                return None

    def list_objects(self, folder: str) -> dict[str, Stored]:
        with self._faults(folder):
            listing = self.client.list_with_delimiter(self.store, folder or None)
        return {meta["path"].rpartition("/")[2]: _stored(meta) for meta in listing["objects"]}

    def get_object(self, name: str, version: Any, offset: int, nbytes: int) -> bytes:
        content = self._ranges.submit(partial(self._get, name, offset, nbytes, version))()
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "it was replaced or deleted", name)
        return content

    def get_beginnings(self, names: Sequence[str], nbytes: int) -> dict[str, bytes]:
        results = {name: self._beginnings.submit(partial(self._get, name, 0, nbytes)) for name in names}
        contents = {name: result() for name, result in results.items()}
        return {name: content for name, content in contents.items() if content is not None}

    def _get(self, name: str, offset: int, nbytes: int, version: Any = None) -> bytes | None:
        """Return a range of an object, or None if there is no such object, or another version of it."""
        options: dict[str, Any] = {"range": (offset, offset + nbytes)}
        if isinstance(version, str):
            options["if_match"] = version
        try:
            with self._faults(name):
                try:
                    result = self.client.get(self.store, name, options=options)
                    if version is not None and _stored(result.meta).version != version:
                        return None  # some servers ignore `if_match`
                    return bytes(result.bytes())
                except self.client.exceptions.PreconditionError:
                    return None
                except self.client.exceptions.BaseError:
                    if offset >= self.client.head(self.store, name)["size"]:
                        return b""  # no range begins at the end
                    raise
        except FileNotFoundError:
            return None

    def put_object(self, name: str, content: bytes, replace: bool) -> None:
        if not replace and self.find_object(name) is not None:  # some servers ignore the condition of `create`
            raise FileExistsError(errno.EEXIST, "it exists", name)
        with self._faults(name):
            try:
                self.client.put(self.store, name, content, mode="overwrite" if replace else "create")
            except (self.client.exceptions.AlreadyExistsError, FileExistsError) as error:
                raise FileExistsError(errno.EEXIST, "it exists", name) from error

    def delete_object(self, name: str) -> bool:
        if self.find_object(name) is None:  # S3 does not report whether it existed
            return False
        with self._faults(name):
            try:
                self.client.delete(self.store, name)
            except FileNotFoundError:
                return False
        return True

    def close(self) -> None:
        super().close()
        for reads in self.hedges:
            reads.close()

    @contextmanager
    def _faults(self, name: str) -> Iterator[None]:
        """Raise the exceptions of the client as OSErrors, without what they say about credentials."""
        try:
            yield
        except OSError as error:
            if error.errno is not None:
                raise
            # of the client, with a message of many lines
            number, reason = errno.EIO, str(error).partition("\n")[0]
            if isinstance(error, FileNotFoundError):
                number, reason = errno.ENOENT, "there is no such object or bucket"
            raise OSError(number, reason, f"{self.place}/{name}") from None  # a FileNotFoundError for ENOENT
        except self.client.exceptions.BaseError as error:
            denied = self.client.exceptions.PermissionDeniedError, self.client.exceptions.UnauthenticatedError
            number = errno.EACCES if isinstance(error, denied) else errno.EIO
            message = str(error)  # with addresses and answers of servers, which may name keys
            reason = next((text for kind, text in _NO_ANSWER.items() if kind in message), type(error).__name__)
            raise OSError(number, reason, f"{self.place}/{name}") from None


def _open(client: Any, address: str) -> Any:
    scheme = split_address(address).scheme
    try:
        if scheme == "memory":
            return _memories.setdefault(address, client.store.MemoryStore())
        # plain HTTP if the endpoint that the environment names uses it, as for a server in the same network
        endpoints = (os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"))
        options = _CLIENT | {"allow_http": any(endpoint.startswith("http://") for endpoint in endpoints)}
        return client.store.from_url(address, client_options=options, retry_config=_RETRIES)
    except (client.exceptions.BaseError, ValueError, OSError) as error:
        reason, shown = str(error).partition("\n")[0], without_secrets(address)
        raise ConfigError(f"{shown} cannot be opened: {reason.replace(address, shown)}") from None


def _stored(meta: Mapping[str, Any]) -> Stored:
    tag = meta.get("e_tag")
    version = f'"{tag.strip(chr(34))}"' if tag else (meta["last_modified"].timestamp(), meta["size"])
    return Stored(version, meta["size"], meta["size"])
