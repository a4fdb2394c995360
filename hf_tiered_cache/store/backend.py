"""Interface of the places in which a store keeps everything.

Implementations: a folder (`folder.py`), and a base class for places that keep whole objects (`objects.py`).

A backend stores bytes under names, atomically. It inspects content only to find out whether this library wrote it, and
deletes or replaces nothing else. Catalogue, quota, checksums and encryption are implemented on top of it. The tests of
backends check the contract.

Faults are OSErrors. FileNotFoundError means that nothing exists under a name (or that the whole place is missing, see
`is_reachable`). FileExistsError means that the name is taken. Errors that `faults.is_of_the_process` recognises say
nothing about the stored data.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import wraps
from numbers import Integral
from typing import Any, Protocol, TypeVar

from ..errors import with_type
from .engines import EngineFile, ReadOp
from .faults import Notices
from .kinds import PIN, SEGMENT, SEGMENT_SUFFIX, SIDECAR, FileKind
from .lazy import torch
from .records import RecordFiles
from .root import StoreRoot
from .tree import Stored

_T = TypeVar("_T")
HeadLength = Callable[[Stored, bytes], int]
"""Callback that returns the bytes before the blocks, given the first page (`HEADER_BYTES`, or all if shorter)."""


def file_of(stored_name: str) -> tuple[FileKind, str]:
    """Return kind and file name of a segment, named by its id, or of a sidecar."""
    return (SIDECAR, stored_name) if "." in stored_name else (SEGMENT, f"{stored_name}{SEGMENT_SUFFIX}")


class Upload(Protocol):
    """A segment that is being written. It is invisible until it is published."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`. Raises OSError."""

    def nbytes(self) -> int:
        """Return the space that the segment takes once it is published, in bytes."""

    def publish(self, replace: bool) -> None:
        """Give the segment its name atomically: readers find either all of it or the previous content.

        With `replace`, existing content is replaced, if this library wrote it. Open readers can still read it. Raises
        FileExistsError if the name is taken and its content is not replaced: the first writer wins. After an OSError
        nothing has changed.
        """


class SegmentBackend(Protocol):
    """Segments in one place, shared by any number of processes. All methods may be called from any thread.

    Segments can have sidecars: arrays that belong to a segment (see `sidecars.py`). A sidecar's name is the segment's
    id, a dot and a kind. `names`, `pin` and `pinned` cover segments only, `sidecars` covers sidecars only, and all
    other methods cover both.

    A subclass gets the methods that follow from `records`, if it keeps the files of segments there, too.
    """

    place: str
    """Path or address of the place, for messages."""
    reads_with: str
    """Description of what reads blocks, such as an engine with its settings. Measurements are valid only for it."""
    reads_device: bool
    """True if `read` may fill device memory without passing through the host."""
    writable: bool
    """True if anything new can be stored."""
    catalogue: StoreRoot | None
    """Folder of the catalogue that all users of this place share. None: each user has its own, in memory."""
    records: RecordFiles
    """Small files that belong to no segment: of conversations, documents and calibrations."""

    def where(self, segment_id: str) -> str:
        """Return the path or address of a segment, stored or not, for messages and tools."""
        return str(self.records.where(*file_of(segment_id)))

    def is_reachable(self) -> bool:
        """Return whether the place exists, so that a name that is not found in it is gone."""

    # --- reading

    def names(self) -> list[str]:
        """Return the names of all segments. Raises OSError rather than returning an incomplete list."""
        return [name.removesuffix(SEGMENT_SUFFIX) for name in self.records.names(SEGMENT)]

    def sidecars(self) -> dict[str, int]:
        """Return the names of all sidecars, and the bytes that each takes. Raises OSError, as `names` does."""

    def find(self, segment_id: str) -> Stored | None:
        """Return the metadata of what is stored under a name, or None. Opens nothing. Raises OSError."""
        return self.records.stored(*file_of(segment_id))

    def is_own(self, segment_id: str) -> bool:
        """Return whether this library wrote what has this name. Raises OSError if that cannot be determined."""
        return self.records.is_own(*file_of(segment_id))

    def unknown(self, known: Collection[str] = ()) -> list[str]:
        """List files that the library did not write, by path within the place. They are never changed.

        Segments in `known` were already read, and need no check. Raises OSError if the place cannot be listed.
        """

    def head(self, segment_id: str, length: HeadLength) -> tuple[Stored, bytes]:
        """Read the beginning of a segment or sidecar, all from one version.

        Returns its metadata, and as many bytes as `length` returns, fewer only if the segment ends. Exceptions of
        `length` propagate. Raises FormatError for what cannot be a segment (a folder, a pipe), or OSError.
        """

    def open(self, segment_id: str, length: HeadLength) -> tuple[Stored, bytes, EngineFile]:
        """Open a segment for reading blocks, and read its beginning, all from one version.

        Returns and raises what `head` does, and returns the open file. If the segment is deleted or replaced meanwhile,
        reads of the file return the same version, or fail with FileNotFoundError.
        """

    def read(self, ops: Sequence[ReadOp]) -> Future[int]:
        """Read byte ranges of open segments in the background. The future returns the number of bytes read.

        The future keeps the destinations alive, and resolves only when nothing writes to them any more. It fails with
        OSError if bytes are missing or cannot be read; the `filename` of the error is the `path` of the file. Raises
        StoreClosedError if the backend was closed.
        """

    def register(self, memory: torch.Tensor) -> None:
        """Prepare device memory for repeated reads, for the lifetime of this tensor object."""

    # --- writing

    def write(self, segment_id: str, nbytes: int) -> AbstractContextManager[Upload]:
        """Reserve the space for a segment, so that a full place is detected before anything is written.

        An upload that was not published is removed when the context ends, or by the next cleanup if its process died.
        Raises OSError.
        """

    def delete(self, segment_id: str) -> bool:
        """Delete what the library wrote under this name. Returns whether it existed. Raises OSError if it remains."""
        return self.records.delete(*file_of(segment_id))

    def sync(self) -> None:
        """Make everything published durable. Raises OSError; the next call retries what failed."""

    def pin(self, segment_id: str, pinned: bool) -> None:
        """Add or remove the pin of a segment. Pins outlive every catalogue. Raises OSError."""
        if pinned:
            self.records.make_empty(PIN, segment_id)
        else:
            self.records.delete(PIN, segment_id)

    def pinned(self) -> set[str]:
        """Return the pinned names. Raises OSError: if they cannot be listed, no segment may count as unpinned."""

    # --- space

    def usage(self) -> int:
        """Return the bytes used by anything but segments and sidecars: uploads, the catalogue. Raises OSError."""

    def free(self) -> int | None:
        """Return the free bytes of the place, or None if it is unbounded. Raises OSError."""

    def clean_up(self, dry_run: bool = False) -> tuple[dict[str, int], bool]:
        """Delete unfinished files of dead processes. The caller holds the lock.

        Returns the bytes of each deleted file, or with `dry_run` of each file to be deleted; and whether some of them
        had been published, so that a catalogue may lack them.
        """

    def locked(self) -> AbstractContextManager[None]:
        """Lock the place exclusively, while space is computed and freed. Raises StoreBusyError."""

    def close(self) -> None:
        """Wait for pending reads, and release the threads."""


# --- the methods of an `ObjectBackend`, whose faults are OSErrors whatever a plug-in raises or returns


def _is_stored(answer: object) -> bool:
    return isinstance(answer, Stored) and isinstance(answer.size, Integral) and isinstance(answer.nbytes, Integral)


def _is_bytes(answer: Any) -> bool:
    try:
        return memoryview(answer).itemsize == 1
    except TypeError:
        return False


def _holds(answer: object, is_valid: Callable[[object], bool]) -> bool:
    return isinstance(answer, Mapping) and all(map(is_valid, answer.values()))


ANSWERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "find_object": ("Stored(version, size, nbytes) or None", lambda answer: answer is None or _is_stored(answer)),
    "list_objects": (
        "a dict of Stored(version, size, nbytes) by names without the folder",
        lambda answer: _holds(answer, _is_stored) and all(isinstance(name, str) and "/" not in name for name in answer),
    ),
    "get_object": ("bytes", _is_bytes),
    "get_beginnings": ("a dict of bytes by name", lambda answer: _holds(answer, _is_bytes)),
    "put_object": ("nothing", lambda answer: True),
    "delete_object": ("True or False", lambda answer: isinstance(answer, Integral)),
    "free": ("a number of bytes or None", lambda answer: answer is None or isinstance(answer, Integral)),
}
"""Descriptions of what each method must return, and checks of it, by name of the method."""


def check_answers(kind: type) -> None:
    """Let the methods that a class defines raise OSError, which names them, if they fail in another way.

    What they raise is logged once for each method and type of exception, with its traceback.
    """
    notices = Notices()
    for name in ANSWERS.keys() & vars(kind).keys():
        setattr(kind, name, _checked(vars(kind)[name], name, notices))


def _checked(method: Callable[..., _T], name: str, notices: Notices) -> Callable[..., _T]:
    expected, is_valid = ANSWERS[name]

    @wraps(method)
    def call(backend: Any, /, *args: Any, **kwargs: Any) -> _T:
        called = f"{type(backend).__name__}.{name}"
        try:
            answer = method(backend, *args, **kwargs)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # whatever a client library raises
            fault = f"{called} raised {error!r}"
            notices.warn(f"{name} {type(error).__name__}", f"{fault}, which counts as a fault of the place", error)
        else:
            if is_valid(answer):
                return answer
            wrong: Any = answer
            if isinstance(wrong, Mapping):  # name an entry that is wrong
                entries = ({key: value} for key, value in wrong.items())
                wrong = next((entry for entry in entries if not is_valid(entry)), wrong)
            fault = f"{called} must return {expected}, not {with_type(wrong)}"
        # here, since an error with the other one as its context would keep all frames alive
        raise OSError(errno.EIO, fault, "/".join([backend.place, *(arg for arg in args[:1] if isinstance(arg, str))]))

    return call
