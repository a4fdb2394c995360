"""Keys and values of one layer, in buffers that grow by doubling."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ..geometry import HASH_TOKENS
from ..store.memory import HUGE_PAGE, aligned_bytes

_HEADROOM = 64
_LARGEST_GROWTH = 4096
"""Columns of room that a buffer has beyond what it must hold: at first, and at most, where it doubles."""


class KVBuffer:
    """Columns of keys and values, `[batch, heads, capacity, dim]`.

    The columns `[start, stop)` of the buffers are held, and the first of these is column `first` of the sequence. New
    ones are written in place, so decoding copies nothing until a buffer is full and doubles.
    """

    def __init__(self) -> None:
        self._drop()

    def _drop(self) -> None:
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._start = self._stop = self._first = 0
        self._shared = False

    @property
    def keys(self) -> torch.Tensor | None:
        """`[batch, key_heads, held, key_dim]`, a view."""
        return None if self._keys is None else self._keys.narrow(2, self._start, self.held)

    @property
    def values(self) -> torch.Tensor | None:
        """`[batch, value_heads, held, value_dim]`, a view."""
        return None if self._values is None else self._values.narrow(2, self._start, self.held)

    @property
    def columns(self) -> int:
        """Columns of the sequence so far, held or not."""
        return self._first + self._stop - self._start

    @property
    def held(self) -> int:
        """Columns that the buffers hold."""
        return self._stop - self._start

    def extend(
        self, like_keys: torch.Tensor, like_values: torch.Tensor, columns: int, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room for `columns` more columns, of which those before `first` are not kept.

        Args:
            like_keys: `[batch, heads, _, dim]`: gives the buffer its shape, dtype and device. like_values likewise.
            columns: of the sequence.
            first: above 0 only if nothing held so far is seen any more.

        Returns:
            Views of the new columns, uninitialised: `[batch, heads, columns - first, dim]` each.
        """
        if first:
            self._first = self.columns + first
            self._start = self._stop
        count, keys, values = columns - first, self._keys, self._values
        if keys is None or values is None or self._shared or self._stop + count > keys.shape[2]:
            keys, values = self._reallocate(like_keys, like_values, count)
        begin, self._stop = self._stop, self._stop + count
        return keys.narrow(2, begin, count), values.narrow(2, begin, count)

    def _reallocate(
        self, like_keys: torch.Tensor, like_values: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held = self.held
        keys, values = _moved(self.keys, like_keys, held, count), _moved(self.values, like_values, held, count)
        # at once: a Ctrl-C in between would leave the one without the other
        self.__dict__.update(_keys=keys, _values=values, _start=0, _stop=held, _shared=False)
        return keys, values

    def _views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is held, of a buffer that holds something."""
        keys, values, held = self._keys, self._values, self._stop - self._start
        assert keys is not None and values is not None
        return keys.narrow(2, self._start, held), values.narrow(2, self._start, held)

    def _shrink(self) -> None:
        """Take no more memory than what is held needs."""
        if self._keys is not None and self._values is not None:
            self._reallocate(self._keys, self._values, 0)

    def _without(self, first: int, count: int) -> dict[str, Any]:
        """The state of this buffer if it held no more the `count` columns behind the first `first` that it holds.

        They stay columns of the sequence.
        """
        keys, values = (
            _moved(torch.cat([held[:, :, :first], held[:, :, first + count :]], dim=2), held, self.held - count, 0)
            for held in self._views()
        )
        state = {"_keys": keys, "_values": values, "_start": 0, "_stop": self.held - count, "_shared": False}
        return state | {"_first": self._first + count}

    def _select(self, rows: torch.Tensor) -> None:
        """Row i becomes what row `rows[i]` was."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (self._rows_of(buffer, rows) for buffer in (self._keys, self._values))
            self._shared = False

    def _rows_of(self, buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        chosen = _empty(buffer, len(rows), buffer.shape[2])
        held = slice(self._start, self._stop)
        chosen[:, :, held] = buffer[:, :, held].index_select(0, rows.to(buffer.device))
        return chosen

    def snapshot(self) -> dict[str, Any]:
        """All of it as it is now, for `rollback`: later passes write behind it or elsewhere, never over it."""
        return dict(self.__dict__)

    def rollback(self, snapshot: dict[str, Any]) -> None:
        """Undo what happened since `snapshot`."""
        self.__dict__.update(snapshot)


def _moved(held: torch.Tensor | None, like: torch.Tensor, columns: int, count: int) -> torch.Tensor:
    """A buffer with room for `count` more columns than are held, and for as many again while decoding."""
    room = max(columns + count, columns + min(columns, _LARGEST_GROWTH)) + _HEADROOM
    buffer = _empty(like, like.shape[0], room + -room % HASH_TOKENS)  # chunks of all heads are rows of one matrix
    if held is not None and columns:
        buffer[:, :, :columns] = held
    return buffer


def _empty(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """`[rows, heads, columns, dim]`, also in inference mode a tensor that later passes may write to outside of it.

    On the CPU large ones are of huge pages: what is restored is written once, and small pages made that take twice as
    long.
    """
    shape = rows, like.shape[1], columns, like.shape[3]
    nbytes = prod(shape) * like.element_size()
    with torch.inference_mode(False):  # views of ours are made in it, too
        if like.device.type == "cpu" and nbytes >= HUGE_PAGE:
            return aligned_bytes(nbytes).view(like.dtype).view(shape)
        return torch.empty(shape, dtype=like.dtype, device=like.device)
