"""Where segments lie: the one interface of all places. A folder is the first (`folder.py`).

A backend keeps bytes under names, whole or not at all. Of what is in them it only asks whether this library wrote it:
nothing else is deleted or replaced. What makes a store of it stands above: the catalogue, the quota, checksums and
encryption. A new place, such as a remote tier, is one class
with these verbs; `tests/test_backend.py` says whether it keeps its word.

Faults are OSErrors, of which three say more: FileNotFoundError means that nothing stands under a name (or no place is
there at all, see `is_reachable`), FileExistsError that another has taken it, and what `files.is_of_the_process` knows
that nothing is said about what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .engines import EngineFile, ReadOp, ReadReport

if TYPE_CHECKING:
    from .root import StoreRoot


class Stored(NamedTuple):
    """What stands under a name."""

    version: Hashable
    """Which bytes these are: another value as soon as others have taken the name."""
    size: int
    """How many."""
    nbytes: int
    """Room that they take."""


HeadLength = Callable[[Stored, bytes], int]
"""How many bytes stand before a segment's blocks, to be told by its first page (`HEADER_BYTES`, or all there are)."""


class Upload(Protocol):
    """A segment that is being written. Nobody sees it until it is published."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data`. Raises OSError."""

    def nbytes(self) -> int:
        """Room that it takes once it is published."""

    def publish(self, replace: bool) -> None:
        """Give it its name, in one moment: whoever looks finds all of it, or what was there before.

        Args:
            replace: whether what stands there gives way, if it is own. What is open of it can be read on.

        Raises:
            FileExistsError: something stands there, and does not give way: the first writer wins.
            OSError: it cannot be done; nothing has changed.
        """


class SegmentBackend(Protocol):
    """Segments in one place, shared by any number of processes. All verbs may be called from any thread.

    Beside segments lie arrays that belong to them (see `beside.py`), under names with a dot: the segment's, and a kind.
    `names`, `pin` and `pinned` are about segments alone, `beside` is about the others, and the rest about both.
    """

    place: str
    """Where that is, for messages: a path or an address."""
    reads_with: str
    """What reads blocks, such as an engine with its settings: what was measured with it holds for it alone."""
    writable: bool
    """Whether anything new can be stored."""
    catalogue: StoreRoot | None
    """The folder of the catalogue that all who use this place share. None: each has one of its own, in memory."""

    def where(self, segment_id: str) -> str:
        """Where a segment lies or would lie, for messages and tools: a path or an address."""

    def is_reachable(self) -> bool:
        """Whether the place is there at all, so that what is not found in it is gone."""

    # --- reading

    def names(self) -> list[str]:
        """The names of all segments. Raises OSError: a list that is not whole is none."""

    def beside(self) -> dict[str, int]:
        """The names of all that lies beside segments, and the room that each takes. Raises OSError, as `names` does."""

    def find(self, segment_id: str) -> Stored | None:
        """What stands under a name now, or None. Nothing is opened. Raises OSError."""

    def is_own(self, segment_id: str) -> bool:
        """Return whether this library wrote what has this name. Raises OSError: that cannot be found out."""

    def unknown(self, known: Collection[str] = ()) -> list[str]:
        """Return what the library did not write, by path within the place. It is left alone.

        Args:
            known: segments that were read, and need not be looked at.

        Raises:
            OSError: the place cannot be listed.
        """

    def head(self, segment_id: str, length: HeadLength) -> tuple[Stored, bytes]:
        """Read a segment's beginning, all of one version.

        Args:
            segment_id: whose.
            length: is asked how many bytes are wanted; what it raises comes through.

        Returns:
            Which bytes these were, and so many of them: fewer only where the segment ends.

        Raises:
            FormatError: what stands there can be no segment (a folder, a pipe). OSError: it cannot be read.
        """

    def open(self, segment_id: str, length: HeadLength) -> tuple[Stored, bytes, EngineFile]:
        """Open a segment for reading blocks, and read its beginning, all of one version.

        Returns:
            What `head` does, and the segment, which stays whole until the last reference to it goes, also when it is
            deleted or replaced meanwhile.

        Raises:
            FormatError, OSError: as `head`.
        """

    def read(self, ops: Sequence[ReadOp]) -> Future[ReadReport]:
        """Read runs of bytes of open segments, in the background.

        The future keeps the destinations alive, and is resolved only when nothing writes to them any more. It fails
        with OSError where bytes are missing or cannot be read; its `filename` is the `path` of the file concerned.

        Raises:
            StoreClosedError: the backend was closed.
        """

    # --- writing

    def write(self, segment_id: str, nbytes: int) -> AbstractContextManager[Upload]:
        """Take the room for a segment, so that a full place is seen before anything is written.

        What was not published is gone when the context ends, or when somebody cleans up behind a process that died.
        Raises OSError.
        """

    def delete(self, segment_id: str) -> bool:
        """Delete what has this name. Returns whether there was something own. Raises OSError: it is still there."""

    def sync(self) -> None:
        """Make what was published durable. Raises OSError; what failed is tried again the next time."""

    def pin(self, segment_id: str, pinned: bool) -> None:
        """Mark a name, or take the mark away. A mark outlives every catalogue. Raises OSError."""

    def pinned(self) -> set[str]:
        """The marked names. Raises OSError: what cannot be listed is not to be taken for none."""

    # --- room

    def usage(self) -> int:
        """Bytes that lie under no name: what is being written, the catalogue. Raises OSError."""

    def free(self) -> int | None:
        """Bytes that the place has left, or None if it has no bound. Raises OSError."""

    def clean_up(self, dry_run: bool = False) -> tuple[dict[str, int], bool]:
        """Delete what dead processes left unfinished. The caller holds the lock.

        Returns:
            What was deleted, or with `dry_run` would be, and the bytes that each takes; and whether some of it had been
            published, so that a catalogue may lack it.
        """

    def locked(self) -> AbstractContextManager[None]:
        """Alone among all who use this place, while room is reckoned and made. Raises StoreBusyError."""

    def close(self) -> None:
        """Wait for reads under way, and let threads go."""
