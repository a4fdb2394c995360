"""Digests of a model's weights, also quantized ones: all bytes are digested once on their device, then checked.

- A write through PyTorch increments the version of a tensor, which is then digested again.
- A tensor with replaced memory (`weight.data = ...`, `set_`, `swap_tensors`) has another address, shape or layout. Then
  the model is described and all weights are read again.
- A write into `.data` is not visible to PyTorch. So each look reads the next `REREAD_BYTES` and the first bytes of all
  tensors again. An edit of a model of B bytes is found within B / REREAD_BYTES looks, and an edit of many tensors at
  once. Until then KV would have the wrong fingerprint. So KV is published only if a complete read of the weights after
  its computation matches the fingerprint (`held_since`). It takes as long as reading the weights for one token.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch._C._dynamo import guards
from torch.nn.functional import pad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..store.container import lin64, xxh3


def signature(tensor: torch.Tensor) -> str:
    """Return the dtype, shape and memory layout of a tensor, which its bytes do not show, as text."""
    part = ""
    if not (tensor.is_quantized or tensor.is_contiguous()):
        part = f" at {0 if is_traceable_wrapper_subclass(tensor) else tensor.storage_offset()}"
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}{part}"


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a quantized tensor or wrapper subclass consists of, or the tensor itself."""
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
            return [tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
        return [tensor.int_repr(), torch.tensor([tensor.q_scale(), tensor.q_zero_point()])]
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner, _ = tensor.__tensor_flatten__()
    return [plain for name in inner for plain in plain_tensors(getattr(tensor, name))]


def wrapped_tensors(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """Yield each tensor that a wrapper subclass consists of, at any depth, after its wrapper and its name in it."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield tensor, name, getattr(tensor, name)
            yield from wrapped_tensors(getattr(tensor, name))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor without a copy, uint8 `[n]`; of its whole storage if it is not contiguous."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


ROW_BYTES = 1 << 20
"""Bytes of a row: a part of one tensor with its own digest."""
REREAD_BYTES = 1 << 20
"""Bytes that the CPU reads again at each look, in about 0.1 ms."""
REREAD_BYTES_ON_DEVICE = 64 << 20
"""Bytes that a GPU reads again at each look."""
WINDOW_BYTES = 64
"""Bytes at the beginning of each tensor that are read again at each look."""
_RUN_ROWS = 16
_version = attrgetter("_version")
TensorGuards: Any = getattr(guards, "TensorGuards", None)  # private, so that it may be missing
_PLACE: tuple[Callable[[torch.Tensor], Any], ...] = (
    *(torch.Tensor.data_ptr, torch.Tensor.storage_offset, torch.Tensor.size, torch.Tensor.stride),
    *(torch.Tensor.is_neg, torch.Tensor.is_conj, attrgetter("dtype")),
)
"""Functions that show which memory a tensor has, and how its elements are read from it."""
_Numbered = Sequence[tuple[int, torch.Tensor]]
"""Pairs of the number of a tensor and its bytes, uint8 `[n]`."""


class WeightDigests:
    """Digests of the tensors that a model's keys and values are computed from. Names are equal in every process."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.names: list[str] = []
        watched: dict[int, torch.Tensor] = {}  # once each: descriptions name wrapped tensors, too
        wrapped: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        self._copied: list[torch.Tensor] = []  # quantized: bytes are available as a copy only
        self._named_tensors = list(tensors)
        for name, tensor in self._named_tensors:
            plain = plain_tensors(tensor)
            self.names.append(
                " ".join((name, signature(tensor), *(signature(part) for part in plain if part is not tensor)))
            )
            watched |= {id(part): part for part in plain}
            if tensor.is_quantized:
                self._copied.append(tensor)
            wrapped += wrapped_tensors(tensor)
        self._watched = list(watched.values())
        self._wrapped: Any = tuple(zip(*wrapped, strict=True)) or ((), (), ())
        self._lock = threading.Lock()
        self._edited = False  # whether `held_since` found an edit that `changed` has not handled yet
        self._read_at = time.monotonic()
        """Start of the last complete read, a time of `time.monotonic`."""
        self._places, self._versions = self._read_places(), self._read_versions()
        self._layouts = None if self._copied else _layouts_of(self._watched)
        on_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for number, tensor in enumerate(self._watched):
            if tensor.numel():
                on_device.setdefault(tensor.device, []).append((number, bytes_of(tensor)))
        self._memories = [memory_of(device)(bytes) for device, bytes in on_device.items()]

    @property
    def digest(self) -> bytes:
        """Digest of all weights."""
        return b"".join(memory.digests.tobytes() for memory in self._memories)

    def are_of(self, tensors: list[tuple[str, torch.Tensor]]) -> bool:
        """Return whether the digests are of exactly these tensors under these names."""
        pairs = itertools.zip_longest(self._named_tensors, tensors, fillvalue=("", None))
        return all(name == other_name and tensor is other for (name, tensor), (other_name, other) in pairs)

    def has_moved(self) -> bool:
        """Return whether a tensor has other memory or another layout now, so that its elements were not digested."""
        wrappers, names, parts = self._wrapped
        if not all(map(is_, map(getattr, wrappers, names), parts)):
            return True
        if self._layouts is not None and self._layouts.check(*self._watched):
            return list(map(torch.Tensor.data_ptr, self._watched)) != self._places[0]
        if self._read_places() != self._places:
            return True
        if self._layouts is not None:  # tensors require no gradient now, or the mode is another one
            self._layouts = _layouts_of(self._watched)
        return False

    def changed(self, reread: bool = True) -> bool:
        """Compare versions, and if `reread` the next bytes. Return whether a change was found, and update `digest`."""
        versions, changed = self._read_versions(), False
        if versions != self._versions:
            changed_numbers = {
                number
                for number, (previous, current) in enumerate(zip(self._versions, versions, strict=True))
                if previous != current
            }
            self._versions = versions
            changed = self._update_digests(changed_numbers)
        if self._edited or (reread and True in [memory.edited() for memory in self._memories]):  # checks each memory
            changed |= self.refresh()
        return changed

    def held_since(self, digest: bytes, moment: float) -> bool:
        """Return whether all bytes match an earlier `digest`, based on a complete read that began after `moment`.

        `moment` is a time of `time.monotonic`. Any thread may call this.
        """
        with self._lock:
            if self._read_at < moment and self.digest == digest:
                began = time.monotonic()
                if not all(memory.unchanged() for memory in self._memories):
                    self._edited = True
                    return False
                self._read_at = began
        return self.digest == digest

    def refresh(self) -> bool:
        """Read all weights again, and return whether they have changed."""
        began, self._edited = time.monotonic(), False
        self._versions = self._read_versions()
        changed = self._update_digests(range(len(self._watched)))
        self._read_at = began  # not before: `held_since`, in another thread, relies on a read that has ended
        return changed

    def _update_digests(self, tensors: Collection[int]) -> bool:
        previous_digest = self.digest
        for memory in self._memories:
            memory.read(tensors)
        return self.digest != previous_digest

    def _read_versions(self) -> list[int]:
        try:
            return list(map(_version, self._watched))
        except RuntimeError:  # tensors made in inference mode have no version
            return [0 if tensor.is_inference() else tensor._version for tensor in self._watched]

    def _read_places(self) -> tuple[list[Any], ...]:
        return (
            *(list(map(read, self._watched)) for read in _PLACE),
            list(map(_version, self._copied)),
        )


def _layouts_of(tensors: Sequence[torch.Tensor]) -> Any:
    """Return the check by which `torch.compile` compares layouts, which reads all at once; None if there is none.

    It compares sizes, strides, dtypes, negative and conjugate bits, but also whether tensors require a gradient, and
    the mode of the thread, such as autocast.
    """
    layouts = [(list(tensor.size()), list(tensor.stride())) for tensor in tensors if tensor.layout == torch.strided]
    sizes, strides = zip(*layouts, strict=True) if layouts else ((), ())
    try:
        check = TensorGuards(*tensors, dynamic_dims_sizes=list(sizes), dynamic_dims_strides=list(strides))
        return check if check.check(*tensors) else None
    except (TypeError, RuntimeError, SystemError):  # its arguments may change; layouts are then read one by one
        return None


class HostMemory:
    """Weights in host memory, read by the CPU. `read` uses several threads, since hashing releases the GIL.

    `share_memory`, also of a model that `torch.multiprocessing` sends to a process, frees memory that tensors had.
    After that only `unchanged` may be called (see `WeightDigests.has_moved`).
    """

    def __init__(self, bytes: _Numbered) -> None:
        views = [(number, data.numpy().data) for number, data in bytes]
        rows = [
            (n, view[offset : offset + ROW_BYTES]) for n, view in views for offset in range(0, len(view), ROW_BYTES)
        ]
        self._tensors = np.array([number for number, _ in rows])  # tensor number of each row
        self._rows = [row for _, row in rows]
        self._tensor_rows = [row for _, data in bytes for row in data.split(ROW_BYTES)]
        self._windows = [view[:WINDOW_BYTES] for _, view in views]
        self._turns = itertools.cycle(list(_turns(map(len, self._rows), REREAD_BYTES)))
        self.digests = np.zeros(len(rows), np.uint64)
        """Digest of each row, uint64 `[rows]`."""
        self.read(self._tensors)

    def read(self, tensors: Collection[int]) -> None:
        """Digest the bytes of these tensors again."""
        rows = np.flatnonzero(np.isin(self._tensors, list(tensors)))
        self.digests[rows] = self._digests_in_threads(rows)
        self._beginnings = b"".join(self._windows)

    def unchanged(self) -> bool:
        """Return whether all bytes are unchanged. Any thread may call this."""
        # in the calling thread: the writer may call this at interpreter exit, when no thread can be started
        # of copies: `map` keeps the GIL from reading an address to the end of the copy, so that nobody frees the memory
        copies = map(bytes, map(torch.Tensor.numpy, self._tensor_rows))
        return list(map(xxh3, copies)) == self.digests.tolist()

    def _digests_in_threads(self, rows: np.ndarray) -> list[int]:
        runs = np.array_split(rows, len(rows) // _RUN_ROWS + 1)
        if len(runs) == 1:
            return self._digests_of(rows)
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1), "hf-tiered-digest") as pool:
            return list(itertools.chain.from_iterable(pool.map(self._digests_of, runs)))

    def edited(self) -> bool:
        """Check the next part of the bytes, and return whether an edit was found."""
        if b"".join(self._windows) != self._beginnings:
            return True
        turn = next(self._turns)
        return self._digests_of(turn) != self.digests[turn].tolist()

    def _digests_of(self, rows: Sequence[int] | np.ndarray) -> list[int]:
        return [xxh3(self._rows[row]) for row in rows]


class DeviceMemory:
    """Weights on a device, digested there. `edited` returns the result of the previous call, to avoid a wait."""

    def __init__(self, bytes: _Numbered) -> None:
        parts = [(number, rows) for number, data in bytes for rows in _rows_of(data)]
        self._tensors = np.array([number for number, _ in parts])  # tensor number of each part
        self._parts = [rows for _, rows in parts]
        self._windows = [data[:WINDOW_BYTES] for _, data in bytes]
        self._turns = itertools.cycle(list(_turns((rows.numel() for rows in self._parts), REREAD_BYTES_ON_DEVICE)))
        self._part_digests = [torch.empty(0)] * len(parts)  # int64 [rows] for each part
        self._edit_found: torch.Tensor | None = None
        self.read(self._tensors)

    def read(self, tensors: Collection[int]) -> None:
        part_digests = list(self._part_digests)
        for part in np.flatnonzero(np.isin(self._tensors, list(tensors))):
            part_digests[part] = _lin64(self._parts[part])
        # in this order: another thread compares `unchanged` first, and then the digest
        self.digests = torch.cat(part_digests).cpu().numpy().view(np.uint64)
        self._part_digests = part_digests
        self._beginnings = torch.cat(self._windows)
        self._edit_found = None

    def edited(self) -> bool:
        edit_found = self._edit_found is not None and bool(self._edit_found)
        differences = [torch.cat(self._windows) != self._beginnings]
        differences += [_lin64(self._parts[part]) != self._part_digests[part] for part in next(self._turns)]
        self._edit_found = torch.cat(differences).any()
        return edit_found

    def unchanged(self) -> bool:
        digests = torch.cat(self._part_digests)
        return bool(torch.equal(torch.cat([_lin64(part) for part in self._parts]), digests))


def memory_of(device: torch.device) -> type[HostMemory] | type[DeviceMemory]:
    """Return the class that reads weights on `device`."""
    return HostMemory if device.type == "cpu" else DeviceMemory


def _turns(sizes: Iterable[int], max_bytes: int) -> Iterator[list[int]]:
    """Yield indices of adjacent parts that are read together: up to `max_bytes` bytes, or one larger part."""
    turn: list[int] = []
    remaining_bytes = max_bytes
    for number, size in enumerate(sizes):
        if turn and size > remaining_bytes:
            yield turn
            turn, remaining_bytes = [], max_bytes
        turn.append(number)
        remaining_bytes -= size
    yield turn


def _rows_of(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views uint8 `[rows, bytes]` of uint8 `[n]`: complete rows, as many as one look reads, then the rest."""
    remainder = len(data) % ROW_BYTES
    for rows in data[: len(data) - remainder].split(REREAD_BYTES_ON_DEVICE):
        if len(rows):
            yield rows.view(-1, ROW_BYTES)
    if remainder:
        yield data[-remainder:].view(1, remainder)


def _lin64(rows: torch.Tensor) -> torch.Tensor:
    """Return lin64 digests, int64 `[rows]`, of uint8 `[rows, bytes]` with any alignment and length."""
    if rows.shape[1] % 8 or rows.storage_offset() % 8:
        rows = pad(rows, (0, -rows.shape[1] % 8)).clone()
    return lin64(rows)
