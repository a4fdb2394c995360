"""Mooncake Store: memory of several machines as one pool, over RDMA or TCP. Needs mooncake-transfer-engine.

Settings are those of Mooncake itself, in the environment: MOONCAKE_TE_META_DATA_SERVER, MOONCAKE_PROTOCOL,
MOONCAKE_DEVICE, MOONCAKE_LOCAL_HOSTNAME, MOONCAKE_GLOBAL_SEGMENT_SIZE and MOONCAKE_LOCAL_BUFFER_SIZE.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs
from urllib.request import urlopen

from mooncake.store import MooncakeDistributedStore

from ...errors import ConfigError
from ...units import parse_bytes
from ..settings import split_server, without_secrets
from .values import Range, ValueBackend

_PORT, _METADATA_PORT, _ADMIN_PORT = 50051, 8080, 9003
"""Ports of a master: of its calls, of its metadata server, and of its web pages, by which keys are listed."""
_POOL, _BUFFER = "0", "64MiB"
"""Memory of this process that the pool gets, and memory for transfers, if the environment does not say."""
_MOST_VALUES = 256
"""Maximum number of values that are read at a time, which the client's buffer and the queues of its transport hold."""
_NOT_FOUND, _FULL = -704, -200
_PAGES_SECONDS = 10.0


class MooncakeBackend(ValueBackend):
    """Backend with the objects of a store in the memory of a Mooncake pool.

    By default this process only uses the pool. Others provide its memory, such as `mooncake_client`, or this one does
    with MOONCAKE_GLOBAL_SEGMENT_SIZE: what it provides is lost when it ends. A lock holds within one process.

    An address is "mooncake://host:port/prefix" of the master. The port is 50051 and the prefix "hf_tiered_cache" if
    they are omitted. The metadata server is "http://host:8080/metadata" unless MOONCAKE_TE_META_DATA_SERVER is set.
    "?admin=port" names the port of the master's web pages, by which keys are listed: 9003 if it is omitted. Raises
    ConfigError if the address is not valid, or the master does not answer.
    """

    # values are read as a whole, also for the beginning of a segment, and for each range of up to 1 MiB
    first_bytes, part_bytes = 128 << 10, 1 << 20

    def __init__(self, address: str) -> None:
        place = without_secrets(address).rstrip("/")
        parts = split_server(address)
        host, port = parts.hostname, parts.port or _PORT
        try:
            self._admin_port = int(parse_qs(parts.query).get("admin", [str(_ADMIN_PORT)])[0])
        except ValueError as error:
            raise ConfigError(f"{place} is no address of a Mooncake master: {error}") from None
        if not host:
            raise ConfigError(f"{place} names no host; write mooncake://host:port")
        self._host, environment = host, os.environ
        self.client: Any = MooncakeDistributedStore()
        status = self.client.setup(
            environment.get("MOONCAKE_LOCAL_HOSTNAME") or _own_address(host, port, place),
            environment.get("MOONCAKE_TE_META_DATA_SERVER", f"http://{host}:{_METADATA_PORT}/metadata"),
            parse_bytes(environment.get("MOONCAKE_GLOBAL_SEGMENT_SIZE", _POOL), "MOONCAKE_GLOBAL_SEGMENT_SIZE"),
            parse_bytes(environment.get("MOONCAKE_LOCAL_BUFFER_SIZE", _BUFFER), "MOONCAKE_LOCAL_BUFFER_SIZE"),
            environment.get("MOONCAKE_PROTOCOL", "tcp"),
            environment.get("MOONCAKE_DEVICE", ""),
            f"{host}:{port}",
        )
        if status:
            raise ConfigError(f"{place} does not answer, or its metadata server does not (status {status})")
        super().__init__(place, parts.path.strip("/"))

    def read_values(self, ranges: Sequence[Range]) -> list[bytes]:
        keys = list(dict.fromkeys(key for key, _, _ in ranges))
        exist = self.client.batch_is_exist(keys)
        if len(exist) != len(keys) or any(status < 0 for status in exist):
            raise self._fault("lookup", min(exist, default=-1))
        present = [key for key, status in zip(keys, exist, strict=True) if status]
        values: dict[str, bytes] = {}
        for first in range(0, len(present), _MOST_VALUES):
            keys_of_call = present[first : first + _MOST_VALUES]
            contents = self.client.get_batch(keys_of_call)
            if len(contents) != len(keys_of_call):
                raise self._fault("transfer", -1)
            values.update(zip(keys_of_call, contents, strict=True))
        lost_keys = [key for key, value in values.items() if not value]
        if lost_keys and any(self.client.batch_is_exist(lost_keys)):  # they have not been dropped meanwhile
            raise self._fault("transfer", -1)
        return [values.get(key, b"")[start:stop] for key, start, stop in ranges]

    def set_part(self, key: str, content: bytes) -> None:
        self._check(self.client.put(key, content))

    def set_value(self, key: str, content: bytes, replace: bool) -> bool:
        if replace:
            self._check(self.client.upsert(key, content))
            return True
        self._check(self.client.put(key, content))  # reports no error if the key exists
        (stored_content,) = self.read_values([Range(key, 0, len(content))])
        return stored_content == content

    def delete_values(self, keys: Sequence[str]) -> bool:
        statuses = [self.client.remove(key, True) for key in keys]
        for status in statuses:
            if status not in (0, _NOT_FOUND):
                raise self._fault("deletion", status)
        return 0 in statuses

    def list_keys(self, beginning: str) -> list[str]:
        try:
            with urlopen(f"http://{self._host}:{self._admin_port}/get_all_keys", timeout=_PAGES_SECONDS) as page:
                keys = page.read().decode(errors="replace").splitlines()
        except OSError as error:
            raise OSError(
                errno.EIO, f"keys cannot be listed at port {self._admin_port} ({error})", self.place
            ) from None
        return [key for key in keys if key.startswith(beginning)]

    def close(self) -> None:
        super().close()
        self.client.close()

    def _check(self, status: int) -> None:
        if status:
            raise self._fault("write", status)

    def _fault(self, operation: str, status: int) -> OSError:
        number = errno.ENOSPC if status == _FULL else errno.EIO
        return OSError(number, f"{operation}: status {status} of Mooncake", self.place)


def _own_address(host: str, port: int, place: str) -> str:
    try:
        with socket.create_connection((host, port), timeout=2.0) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"{place} cannot be reached: {error}") from None
