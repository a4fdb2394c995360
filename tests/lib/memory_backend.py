"""Backend in memory, for tests: objects in a dict."""

from __future__ import annotations

import errno
import itertools
import threading

from hf_tiered_cache.store.backend import Stored
from hf_tiered_cache.store.objects import ObjectBackend

_numbers = itertools.count()


class MemoryBackend(ObjectBackend):
    """Backend that keeps all objects in a dict.

    Args:
        capacity: Number of bytes that fit, or None for no limit.
    """

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(f"memory:{next(_numbers)}")
        self._capacity = capacity
        self.objects: dict[str, tuple[int, bytes]] = {}
        self._changing = threading.Lock()

    def find_object(self, name):
        version, content = self.objects.get(name, (0, None))
        return None if content is None else Stored(version, len(content), len(content))

    def list_objects(self, folder):
        names = [name.rpartition("/") for name in list(self.objects)]
        objects = {
            name: self.find_object(f"{parent}{slash}{name}") for parent, slash, name in names if parent == folder
        }
        return {name: stored for name, stored in objects.items() if stored is not None}

    def get_object(self, name, version, offset, nbytes):
        current, content = self.objects.get(name, (None, b""))
        if current != version:
            raise FileNotFoundError(errno.ENOENT, "no such version", name)
        return content[offset : offset + nbytes]

    def put_object(self, name, content, replace):
        with self._changing:
            if name in self.objects and not replace:
                raise FileExistsError(errno.EEXIST, "it exists", name)
            self.objects[name] = next(_numbers), content

    def delete_object(self, name):
        return self.objects.pop(name, None) is not None

    def free(self):
        if self._capacity is None:
            return None
        return self._capacity - self.usage() - sum(len(content) for _, content in list(self.objects.values()))
