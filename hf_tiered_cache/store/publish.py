"""How a segment gets into the store: whole, within the quota, and together with its row in the catalogue."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch

from ..errors import FormatError, NotOursError, StoreBusyError
from .backend import SegmentBackend, Upload
from .catalogue import Catalogue, SegmentRow
from .cipher import Plain
from .digest import DIGEST_DTYPE, Group, Guard, PackedBlocks, content_of
from .format import SegmentHeader, encode_head
from .index import Index
from .segment import read_head

Written = Callable[[int, torch.Tensor, int], None]
"""Told of a block group that was written: its number, its blocks, and the content that `SegmentReader.owner` names."""


class Publisher:
    """Writes segments.

    Args:
        backend: where they go.
        index: is told of them in the same moment.
        cipher: what blocks are encrypted with, if they are.
        make_room: is asked for so many bytes, alone among all who use the backend, and spares these segments. Raises
            QuotaError.
        is_hidden: whether a segment failed here, and gives way to another of its name.
    """

    def __init__(
        self,
        backend: SegmentBackend,
        index: Index,
        cipher: Plain,
        make_room: Callable[[int, Collection[str]], None],
        is_hidden: Callable[[str], bool],
    ) -> None:
        self._backend, self._index, self._cipher = backend, index, cipher
        self._make_room, self._is_hidden = make_room, is_hidden

    def write(
        self, header: SegmentHeader, prefix_hashes: list[bytes], block_groups: Iterable[Group], written: Written
    ) -> tuple[int, bool]:
        """Write a segment and make it visible, whole or not at all.

        Args:
            header: with its sections.
            prefix_hashes: its prefix hashes.
            block_groups: for each block group its blocks, `[chunks, block_bytes]`; each is done with before the next.
            written: is told of each block group. The segment may still come to nothing.

        Returns:
            Bytes that it takes, and whether it took the place of another one.

        Raises:
            FileExistsError: another one was first. QuotaError, StoreBusyError, OSError: it was not stored.
        """
        guard, replaces = self._cipher.guard(header.seal), self._makes_way(header.id)
        if not self._index.is_shared():
            raise StoreBusyError("the catalogue cannot be opened, so nobody would find it")
        with self.reserved(header.id, header.file_bytes) as upload:
            digests = []
            offset = header.blocks.offset
            for block_group, group in enumerate(block_groups):
                blocks, linear = group if isinstance(group, PackedBlocks) else (group, None)
                first = header.shape.first_block(block_group)
                digests.append(write_blocks(upload, offset, guard, first, blocks, linear))
                written(block_group, blocks, content_of(digests[-1]))
                offset += blocks.numel()
            upload.write(memoryview(encode_head(header, prefix_hashes, np.concatenate(digests), guard)), 0)
            row = SegmentRow.of(header, b"".join(prefix_hashes), upload.nbytes())
            # before what is unfinished goes, so that its room stays reckoned
            self._publish(header, row, upload, replaces)
        return row.nbytes, replaces

    @contextmanager
    def reserved(self, name: str, nbytes: int, spared: Collection[str] = ()) -> Iterator[Upload]:
        """Room for what gets this name, taken from the quota and from the backend before a byte is written.

        Args:
            spared: segments that do not go for it.
        """
        with ExitStack() as stack:
            with self._backend.locked():
                self._make_room(nbytes, spared)
                upload = stack.enter_context(self._backend.write(name, nbytes))
            yield upload

    def _publish(self, header: SegmentHeader, row: SegmentRow, upload: Upload, replaces: bool) -> None:
        """Name and row at once. A segment that nobody could be told of is none."""
        done = False

        def publish() -> None:
            nonlocal done
            if not done:  # it may be asked again, of a catalogue that has taken the place of the first
                upload.publish(replaces)
                done = True

        def enter(catalogue: Catalogue) -> bool:
            catalogue.add(row, header.model, publish)
            return True

        told = False
        try:
            told = self._index.ask(enter, False)
        finally:  # a Ctrl-C comes before a row is entered, or behind it
            if done and not told and not replaces and self._index.row(header.id) is None:
                self._backend.delete(header.id)
        if not told:
            raise StoreBusyError("the catalogue cannot be told of it; end the process that keeps it locked")

    def _makes_way(self, segment_id: str) -> bool:
        """Whether what has the name is damaged, expired or failing. Raises FileExistsError where it serves."""
        known = self._index.row(segment_id)
        try:
            header = read_head(partial(self._backend.head, segment_id), self._cipher).header
        except FileNotFoundError:
            return False
        except NotOursError:
            raise FileExistsError(segment_id) from None
        except FormatError:
            return True
        except OSError:
            if self._is_hidden(segment_id):
                return True
            raise
        expires = header.expires if known is None else known.expires  # a clock that was ahead is set right there
        if self._is_hidden(segment_id) or (known is not None and not known.valid_hashes):
            return True
        if expires is not None and expires <= time.time():
            return True
        raise FileExistsError(segment_id)


def write_blocks(
    upload: Upload, offset: int, guard: Guard, first: int, blocks: torch.Tensor, linear: np.ndarray | None = None
) -> np.ndarray:
    """Write blocks, numbered from `first` on, and return their digests, `DIGEST_DTYPE` `[blocks]`."""
    digests = [np.empty(0, DIGEST_DTYPE)]
    for piece, table in guard.seal(first, blocks, linear) if len(blocks) else ():  # it may hold no token
        upload.write(piece.numpy().data.cast("B"), offset)
        offset += piece.numel()
        digests.append(table)
    return np.concatenate(digests)
