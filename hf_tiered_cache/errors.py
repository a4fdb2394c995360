"""Everything that can go wrong, each with a name of its own.

A fault of the disk never raises out of a request: it is a counted miss, and the prompt is computed as if
nothing were stored. What raises is a mistake that only the caller can mend.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable


class TieredCacheError(Exception):
    """Base of every exception raised by hf_tiered_cache."""


class ConfigError(TieredCacheError, ValueError):
    """An argument is not valid: a size that cannot be read, an unknown method, engine or policy."""


class UnsupportedModelError(ConfigError):
    """The model keeps state that is not the KV of single tokens, so it cannot be cut into chunks."""


class CacheMismatchError(TieredCacheError):
    """A cache is used with another model, or a strict one with a prompt that does not begin with what it holds.

    Or in a pass that is not its attached model's own, where only such a pass gives each layer a mask that fits it.
    """


class StoreError(TieredCacheError):
    """The store cannot be used at all: its path is no folder, or it was closed."""


class StoreClosedError(StoreError):
    """The store was used after `close()`."""


class StoreBusyError(StoreError):
    """Another process or thread holds the store's lock and does not let go of it."""


class ModelChangedError(StoreError):
    """The weights were changed after KV was computed with them, so that it cannot be stored under their name."""


class ConversationInUseError(StoreError):
    """Another process, or a newer cache of this one, goes on with the conversation. Nothing is lost on either side."""

    def __init__(self, conversation: str, pid: int | None, since: float | None) -> None:
        who = "another process" if pid is None else f"process {pid}"
        do = "suspend it there, or end that process"
        if pid == os.getpid():
            who, do = "a newer cache of this process", "go on with that one, or call its suspend()"
        when = "" if since is None else time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(since))
        super().__init__(f"the conversation {conversation!r} is in use by {who}{when}; {do}, and try again")
        self.conversation, self.pid, self.since = conversation, pid, since


class EngineUnavailableError(StoreError):
    """The I/O engine asked for does not work on this machine."""


class FormatError(StoreError):
    """A file is no whole segment: bad magic, header, table or length."""


class NotOursError(FormatError):
    """A segment may be whole, and is not for this store to read or to judge: it is left alone."""


class NewerFormatError(NotOursError):
    """A segment was written by a newer version of the library."""


class OtherKeyError(NotOursError):
    """A segment is encrypted with another key than the store's, or only one of the two has a key."""


class IntegrityError(StoreError):
    """The bytes of a block are not those that were written."""

    def __init__(self, message: str, valid_hashes: int = 0, version: Hashable = None) -> None:
        super().__init__(message)
        self.valid_hashes = valid_hashes
        """The segment's prefix hashes that stand before the first bad block."""
        self.version = version
        """Which bytes were read (see `Stored`); None if that is not known."""


class QuotaError(StoreError):
    """A segment does not fit: the quota, the free-space floor or the disk itself is exhausted."""


class RestoreError(TieredCacheError):
    """Stored KV did not arrive or does not fit the model. Internal: the request is planned again without it."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f"segment {segment}: {reason}")
        self.segment = segment


class LayerOrderError(TieredCacheError):
    """Layers run in another order than that of their caches. Internal: the request is computed without a restore."""


class LostKVError(TieredCacheError):
    """Stored KV that decoded tokens attend to cannot be read any more. The pass is undone, and the segment reported.

    Ask again with all tokens so far and a new cache: what is stored whole is restored, and the rest is computed.
    """

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(
            f"{reason}; this token is not decoded without it. Pass all tokens so far to generate() with a new "
            "TieredCache: what is stored whole is restored, and the rest is computed"
        )
        self.segment = segment
