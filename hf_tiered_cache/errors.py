"""Exceptions of the library.

A disk fault raises no exception out of a request: it counts as a miss, and the prompt is computed as if nothing were
stored. `LostKVError` is the only one of these: KV that decoded tokens attend to can no longer be read. All others
report errors that only the caller can fix.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def suggest(name: object, names: Iterable[str], advice: str) -> str:
    """Return the end of a message about an unknown name: "; did you mean 'exact'? Advice", or "; advice".

    The most similar of all known names is suggested. The advice is a clause that says how to continue.
    """
    by_lower = {candidate.lower(): candidate for candidate in names}
    similar = get_close_matches(name.lower(), by_lower, n=1) if isinstance(name, str) else []
    return f"; did you mean {by_lower[similar[0]]!r}? {advice[0].upper()}{advice[1:]}" if similar else f"; {advice}"


def unknown_name(kind: str, name: object, names: Iterable[str]) -> str:
    """Return the message about an unknown name: what it names, the most similar name, and all names."""
    names = list(names)
    return f"unknown {kind} {name!r}{suggest(name, names, 'there are: ' + ', '.join(names))}"


def with_type(value: object) -> str:
    """Return a value and its type for a message, such as "'10%' (str)". A long value is truncated, to one line."""
    return f"{' '.join(repr(value).split()):.80} ({type(value).__name__})"


def check_switches(**switches: object) -> None:
    """Raise ConfigError if the value of a switch is neither True nor False: "no" would count as True."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, not {with_type(value)}")


class TieredCacheError(Exception):
    """Base class of all exceptions of hf_tiered_cache."""


class ConfigError(TieredCacheError, ValueError):
    """Invalid argument, such as an unreadable size or an unknown method, engine or policy."""


class UnsupportedModelError(ConfigError):
    """Model that keeps state other than per-token KV, so that it cannot be cut into chunks."""


class CacheMismatchError(TieredCacheError):
    """Use of a cache with another model, or of a strict cache with a prompt that does not begin with its tokens.

    Also raised in passes outside the attached model's own forward, if layers need masks of different widths.
    """


class StoreError(TieredCacheError):
    """Unusable store, for example because its path is not a folder. Base class of all store errors."""


class StoreClosedError(StoreError):
    """Use of a store after `close()`, or in a process forked after the store was opened."""


class StoreBusyError(StoreError):
    """Timeout while another process or thread holds the store's lock."""


class KVRefusedError(StoreError):
    """KV that must not be stored: the model's weights were changed after it was computed, or it is not finite."""


class ConversationInUseError(StoreError):
    """Conversation in use by another process, or by a newer cache of this process. No data is lost."""

    def __init__(self, conversation: str, pid: int | None, since: float | None) -> None:
        owner = "another process" if pid is None else f"process {pid}"
        advice = "suspend it there, or end that process"
        if pid == os.getpid():
            owner, advice = "a newer cache of this process", "continue with that cache, or call its suspend()"
        since_text = "" if since is None else time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(since))
        super().__init__(f"the conversation {conversation!r} is in use by {owner}{since_text}; {advice}, and try again")
        self.conversation, self.pid, self.since = conversation, pid, since


class EngineUnavailableError(StoreError):
    """Requested I/O engine that does not work on this machine."""


class FormatError(StoreError):
    """File that is not a complete segment: bad magic, header, table or length."""


class NotOursError(FormatError):
    """File that may be intact, but that this store must not read or judge. It is left alone."""


class OtherFormatError(NotOursError):
    """File in a format, or with a codec or cipher, that this version of the library does not read."""


class OtherKeyError(NotOursError):
    """Segment encrypted with another key than the store's, or only one of the two has a key."""


class IntegrityError(StoreError):
    """Block that does not contain the bytes that were written."""

    def __init__(self, message: str, valid_hashes: int = 0, version: Hashable = None) -> None:
        super().__init__(message)
        self.valid_hashes = valid_hashes
        """Number of the segment's prefix hashes before the first damaged block."""
        self.version = version
        """Version of the bytes that were read (see `Stored`); None if unknown."""


class QuotaError(StoreError):
    """Segment that does not fit: the quota, the free-space floor or the disk itself is exhausted."""


class RestoreError(TieredCacheError):
    """Stored KV that did not arrive or does not fit the model. Internal: the request is planned again without it."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f"segment {segment}: {reason}")
        self.segment = segment


class EvictedError(TieredCacheError):
    """KV that no file contains and that has left memory. Internal: the request is planned again without it."""

    def __init__(self, segment: str) -> None:
        super().__init__(f"the first tokens of segment {segment} are no longer in memory")
        self.segment = segment


class LayerOrderError(TieredCacheError):
    """Layers that run in a different order than their caches. Internal: the request is computed without a restore."""


class LostKVError(TieredCacheError):
    """Stored KV that decoded tokens attend to and that can no longer be read.

    The pass is undone and the segment is reported. Call `generate()` again with all tokens so far and a new cache:
    intact stored KV is restored, and the rest is computed.
    """

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(
            f"{reason}; the next token cannot be decoded without it. Pass all tokens so far to generate() with a new "
            "TieredCache: intact stored KV is restored, and the rest is computed"
        )
        self.segment = segment


# --- errors of files


class _Placed(Protocol):
    @property
    def place(self) -> str: ...


_Store = TypeVar("_Store", bound=_Placed)


def reason_of(error: BaseException, names_file: bool = True) -> str:
    """Return an error as a part of a message: that of a file without its number, as "lock: Permission denied".

    With `names_file=False`, the file is left out, since the message names it already.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename and names_file else error.strerror
    return str(error)


@contextmanager
def as_store_error(failure: str) -> Iterator[None]:
    """Raise a StoreError that begins with `failure`, such as "pins cannot be changed", in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{failure} ({reason_of(error)}); check its space and permissions, and the disk") from error


def naming_place(operation: Callable[Concatenate[_Store, _P], _T]) -> Callable[Concatenate[_Store, _P], _T]:
    """Return a method of a store that raises a StoreError with the place instead of the OSError of one of its files."""

    @wraps(operation)
    def run(store: _Store, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with as_store_error(f"a file of {store.place} cannot be read or changed"):
            return operation(store, *args, **kwargs)

    return run
