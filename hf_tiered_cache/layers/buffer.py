"""Key and value buffers of one layer that grow by doubling."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..store.geometry import HASH_TOKENS
from ..store.memory import HUGE_PAGE, aligned_bytes

_HEADROOM = 64
_LARGEST_GROWTH = 4096
"""Spare positions of a buffer: `_HEADROOM` always, and up to `_LARGEST_GROWTH` more when it doubles."""


class Announced(NamedTuple):
    """Positions that a pass is going to add, announced to masks, which are made before."""

    restored: int = 0
    """Positions before the computed ones, if those are a suffix."""
    scattered: int = 0
    """All positions of the pass, if they are no suffix or only partly held."""
    skipped: int = 0
    """Positions of the pass that are not going to be held: before every window, or not attended to."""


class KVBuffer:
    """Buffers of keys and values, `[batch, heads, capacity, dim]`.

    The buffers hold entries `[start, stop)`, the first of which is position `first` of the sequence. New entries are
    written in place, so decoding copies nothing until a buffer is full and doubles.
    """

    def __init__(self) -> None:
        self._announced = Announced()
        self._drop()

    def _drop(self) -> None:
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._start = self._stop = self._first = 0
        self._shared = self._assigned = False
        self._content: tuple[torch.Tensor | None, int, int] = (None, 0, 0)  # keys, and versions of keys and values

    def note_content(self) -> None:
        """Note the content of the buffers after a pass: until the next one, nothing may change it in place."""
        keys, values = self._keys, self._values
        if keys is not None and values is not None:
            self._content = keys, keys._version, values._version

    @property
    def is_edited(self) -> bool:
        """True if held keys or values were replaced, or changed in place since the last pass, as PyTorch counts it."""
        if self._assigned:
            return True
        keys, values = self._keys, self._values
        if keys is None or values is None or self._content[0] is not keys:
            return False
        return self._content[1:] != (keys._version, values._version)

    @property
    def keys(self) -> torch.Tensor | None:
        """View of the held keys, `[batch, key_heads, held, key_dim]`; None without a buffer.

        Other code may replace keys and values, for example to compress a cache. Both have the same length by the next
        pass, which neither restores nor stores anything.
        """
        return None if self._keys is None else self._keys.narrow(2, self._start, self.held)

    @keys.setter
    def keys(self, keys: torch.Tensor) -> None:
        self._assign(keys, self.values)

    @property
    def values(self) -> torch.Tensor | None:
        """View of the held values, `[batch, value_heads, held, value_dim]`; None without a buffer. See `keys`."""
        if self._values is None or self._keys is None or self._keys.shape[2] == self.held:  # all, if they were replaced
            return self._values
        return self._values.narrow(2, self._start, self.held)

    @values.setter
    def values(self, values: torch.Tensor) -> None:
        self._assign(self.keys, values)

    def _assign(self, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        """Hold other keys and values, in tensors of somebody else, which are not written to."""
        num_held = 0 if keys is None else keys.shape[2]
        self.__dict__.update(_keys=keys, _values=values, _start=0, _stop=num_held, _shared=True, _assigned=True)

    @property
    def num_positions(self) -> int:
        """Number of positions of the sequence so far, held or not."""
        return self._first + self._stop - self._start

    @property
    def held(self) -> int:
        """Number of positions that the buffers hold."""
        return self._stop - self._start

    def get_seq_length(self) -> int:  # called several times per pass
        """Return the number of positions of the sequence, restored ones that are announced included."""
        return self._first + self._stop - self._start + self._announced.restored

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of entries after the pass, and the position of the first one."""
        restored, scattered, skipped = self._announced
        num_held = self._stop - self._start
        if skipped:
            return scattered - skipped, self._first + num_held + skipped
        return num_held + (scattered or restored + query_length), self._first

    def extend(
        self, like_keys: torch.Tensor, like_values: torch.Tensor, num_positions: int, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `num_positions` positions to the sequence; the first `first` of them are not held.

        `first` is above 0 only if no later query sees the entries held so far, which are then released. Buffers get
        shape, dtype and device of `like_keys` and `like_values`, `[batch, heads, _, dim]`. If held entries have another
        dtype, as after a change of autocast, all get the dtype that `torch.cat` would give them.

        Returns:
            Uninitialised views of the new positions, `[batch, heads, num_positions - first, dim]` each.
        """
        self._announced = Announced()  # the layer holds them now
        if first:
            self._first = self.num_positions + first
            self._start = self._stop
        count, keys, values = num_positions - first, self._keys, self._values
        if (
            keys is None
            or values is None
            or self._shared
            or self._stop + count > keys.shape[2]
            or not (_holds(keys, like_keys) and _holds(values, like_values))
        ):
            keys, values = self._reallocate(like_keys, like_values, count)
        begin, self._stop = self._stop, self._stop + count
        return keys.narrow(2, begin, count), values.narrow(2, begin, count)

    def adopt(self, keys: torch.Tensor, values: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Use buffers, `[batch, heads, capacity, dim]`, that hold the first `num_positions` positions of the sequence.

        This buffer must be empty. Returns views of these positions.
        """
        self._announced = Announced()
        self.__dict__.update(_keys=keys, _values=values, _start=0, _stop=num_positions, _shared=False)
        return self._views()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, `[batch, heads, n, dim]`, and return views of all that are held."""
        keys, values = self.extend(key_states, value_states, key_states.shape[2])
        keys.copy_(key_states)
        values.copy_(value_states)
        return self._views()

    def _reallocate(
        self, like_keys: torch.Tensor, like_values: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_held = self.held
        pairs = (self.keys, like_keys), (self.values, like_values)
        keys, values = (_moved(before, like, num_held, count) for before, like in pairs)
        # one atomic update, so that a Ctrl-C cannot leave one without the other
        self.__dict__.update(_keys=keys, _values=values, _start=0, _stop=num_held, _shared=False)
        return keys, values

    def _views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the held keys and values; the buffers must exist."""
        keys, values, count = self._keys, self._values, self._stop - self._start
        assert keys is not None and values is not None
        return keys.narrow(2, self._start, count), values.narrow(2, self._start, count)

    def _without(self, first: Sequence[int], counts: Sequence[int], fewest: int) -> dict[str, Any]:
        """Return the state of this buffer with fewer entries. Those that stay in a row are its last ones.

        The removed entries, `counts` from `first` on in each row, still count as positions. All rows get shorter by
        `fewest` entries. A row with fewer to remove loses its first ones.
        """
        keys, values = (_moved(tensor[:, :, fewest:], tensor, self.held - fewest, 0) for tensor in self._views())
        for target, source in zip((keys, values), self._views(), strict=True):
            for row, (begin, count) in enumerate(zip(first, counts, strict=True)):
                num_moved, end = count - fewest, begin + count - fewest
                target[row, :, max(0, num_moved) : end] = source[row, :, max(0, -num_moved) : begin]
                target[row, :, : max(0, num_moved)] = 0
        state = {"_keys": keys, "_values": values, "_start": 0, "_stop": self.held - fewest, "_shared": False}
        return state | {"_first": self._first + fewest}

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Replace row i by the former row `indices[i]`."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (self._rows_of(buffer, indices) for buffer in (self._keys, self._values))
            self._shared = False

    def _rows_of(self, buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        selected = _empty(buffer, len(rows), buffer.shape[2])
        positions = slice(self._start, self._stop)
        selected[:, :, positions] = buffer[:, :, positions].index_select(0, rows.to(buffer.device))
        return selected

    def rollback(self, snapshot: dict[str, Any]) -> None:
        """Undo what happened since `snapshot`, a copy of `vars` of this buffer.

        Later passes write after it or to other buffers, never over it.
        """
        self.__dict__.update(snapshot)
        self.note_content()


def _holds(buffer: torch.Tensor, like: torch.Tensor) -> bool:
    """Return whether a buffer can hold such keys or values without rounding them."""
    return buffer.dtype == like.dtype or torch.promote_types(buffer.dtype, like.dtype) == buffer.dtype


def _moved(before: torch.Tensor | None, like: torch.Tensor, num_held: int, count: int) -> torch.Tensor:
    """Allocate a buffer for `num_held` positions, `count` more and spare room, and copy the held positions."""
    if before is not None and num_held:
        like = like[:, :, :0].to(torch.promote_types(before.dtype, like.dtype))
    buffer = empty_buffer(like, like.shape[0], num_held + max(count, min(num_held, _LARGEST_GROWTH)))
    if before is not None and num_held:
        buffer[:, :, :num_held] = before
    return buffer


def empty_buffer(like: torch.Tensor, rows: int, num_positions: int) -> torch.Tensor:
    """Allocate a buffer for `num_positions` positions and spare room, with heads and dims of `like`."""
    room = num_positions + _HEADROOM
    return _empty(like, rows, room + -room % HASH_TOKENS)  # chunks of all heads are rows of one matrix


def _empty(like: torch.Tensor, rows: int, num_positions: int) -> torch.Tensor:
    """Allocate `[rows, heads, num_positions, dim]`, not an inference tensor, so that later passes may write to it.

    Large tensors on the CPU use huge pages: restored KV is written once, which takes twice as long with small pages.
    """
    shape = rows, like.shape[1], num_positions, like.shape[3]
    nbytes = prod(shape) * like.element_size()
    with torch.inference_mode(False):  # this may be called in inference mode
        if like.device.type == "cpu" and nbytes >= HUGE_PAGE:
            return aligned_bytes(nbytes).view(like.dtype).view(shape)
        return torch.empty(shape, dtype=like.dtype, device=like.device)
