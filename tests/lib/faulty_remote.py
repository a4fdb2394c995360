"""Remote in memory, for tests: places that stores share, with faults and a count of calls."""

from __future__ import annotations

import time
from collections import Counter

from memory_backend import MemoryBackend


class FaultyRemote(MemoryBackend):
    """Connection to a place. Several connections share its objects.

    Args:
        objects: Objects of the place.
        capacity: Number of bytes that fit, or None.
    """

    def __init__(self, objects, capacity=None):
        super().__init__(capacity)
        self.objects = objects
        self.calls = Counter()
        """Number of calls by name. A lookup is one call, however many names it has."""
        self.errors = {}
        """Errors by the name of the call that raises them."""
        self.delay = 0.0
        """Seconds that each call takes in addition."""

    def _begin(self, call):
        self.calls[call] += 1
        time.sleep(self.delay)
        if call in self.errors:
            raise self.errors[call]

    def get_beginnings(self, names, nbytes):
        self._begin("look_up")
        return {name: self.objects[name][1][:nbytes] for name in names if name in self.objects}

    def find_object(self, name):
        self._begin("find")
        return super().find_object(name)

    def list_objects(self, folder):
        self._begin("list")
        return super().list_objects(folder)

    def get_object(self, name, version, offset, nbytes):
        self._begin("get")
        return super().get_object(name, version, offset, nbytes)

    def put_object(self, name, content, replace):
        self._begin("put")
        if self._capacity is not None and sum(len(c) for _, c in self.objects.values()) + len(content) > self._capacity:
            raise OSError(28, "no space is left", name)
        super().put_object(name, content, replace)

    def delete_object(self, name):
        self._begin("delete")
        return super().delete_object(name)

    def segments(self):
        """Return the names of the segments."""
        return sorted(name for name in self.objects if name.startswith("segments/"))

    def entries(self):
        """Return the names of the lookup entries."""
        return sorted(name for name in self.objects if name.startswith("prefixes/"))

    def change(self, name, change):
        """Replace the bytes of an object."""
        version, content = self.objects[name]
        self.objects[name] = version, change(content)
