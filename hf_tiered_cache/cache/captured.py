"""Captured KV of forward passes, before RoPE, and packing it into the blocks of a segment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import KVRefusedError
from ..reasons import NOT_FINITE
from ..store.container import Group
from ..store.geometry import BlockGroup, KVLayout, LayerKV, Part
from ..store.lazy import torch
from ..store.shape import SegmentShape
from ..store.writer import KeptOnDevice
from ..tiers.device import CopyStream, Event, Staging, copy_stream


@dataclass
class LayerCapture:
    """KV of one layer, as lists of `[batch, heads, tokens, dim]` tensors, consecutive in tokens."""

    kind: LayerKV
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def part(self, part: Part) -> list[torch.Tensor]:
        """Return the tensors that a part of a block is packed from."""
        return self.keys if part.tensor == "key" else self.values


class CapturedKV:
    """Keys and values that passes have computed, unrotated, of consecutive positions.

    Passes and readers may run in threads with streams of their own, one after the other.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerCapture] = {}
        self._reordered: list[tuple[int, torch.Tensor]] = []  # selected rows, and number of passes captured before
        self._streams: dict[torch.device, CopyStream] = {}
        self.on_gpu = False
        """True if work on the tensors is asynchronous, so that `note_work` and `await_work` have an effect."""
        self._computed: dict[CopyStream, Event] = {}  # events after all work on the tensors of a GPU

    def add(self, layer: int, kind: LayerKV, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Append a layer's keys and values, `[batch, heads, n, dim]` each, and copy slices of larger storages.

        Return False if the layer's layout has changed, so that they are not captured: a segment has one layout per
        layer.
        """
        if (captured := self.layers.get(layer)) is None:
            captured = self.layers[layer] = LayerCapture(kind)
            if keys.device not in self._streams:
                stream = self._streams[keys.device] = copy_stream(keys.device)
                self.on_gpu |= not stream.on_host
        if captured.kind != kind or keys.dtype != values.dtype:
            return False
        for tensors, tensor in ((captured.keys, keys), (captured.values, values)):
            is_slice = tensor.untyped_storage().nbytes() > 2 * tensor.nbytes
            tensors.append(tensor.clone() if is_slice else tensor)
        return True

    def note_work(self) -> None:
        """Order work of other threads, after `await_work`, after this thread's work on the tensors so far."""
        for stream in self._streams.values():
            if not stream.on_host:
                self._computed[stream] = stream.computed()

    def await_work(self) -> None:
        """Order later work of this thread after all threads' work on the tensors."""
        for stream, event in self._computed.items():
            stream.await_copies(event)

    def cut_to(self, count: int) -> None:
        """Keep the first `count` positions: those of later passes may be in some layers only."""
        for tensors in self._tensors():
            while tensors and (excess := sum(tensor.shape[2] for tensor in tensors) - count) > 0:
                if (last := tensors.pop()).shape[2] > excess:
                    tensors.append(last[:, :, :-excess])

    def keep_last(self, count: int) -> None:
        """Keep only the last `count` positions, and release the memory of the others."""
        for tensors in self._tensors():
            tensors[:] = [_last_positions(tensors, count)] if count else []

    def select(self, rows: torch.Tensor) -> None:
        """Replace row i by the former row `rows[i]`, when `apply_row_order` is called: beam search does so often."""
        if self.layers:
            self._reordered.append((len(next(self._tensors())), rows))

    def apply_row_order(self) -> None:
        """Reorder the rows of the tensors as selected."""
        if not self._reordered:
            return
        for tensors in self._tensors():
            order: torch.Tensor | None = None
            reordered_layers = list(self._reordered)
            for index in range(len(tensors) - 1, -1, -1):
                while reordered_layers and reordered_layers[-1][0] > index:
                    rows = reordered_layers.pop()[1]
                    order = rows if order is None else rows[order.to(rows.device)]
                if order is not None:
                    tensors[index] = tensors[index].index_select(0, order.to(tensors[index].device))
        self._reordered.clear()

    def clear(self) -> None:
        """Discard everything."""
        self.layers.clear()
        self._reordered.clear()

    def fork(self) -> CapturedKV:
        """Return an independent copy that shares the tensors."""
        twin = CapturedKV()
        twin.layers = {i: LayerCapture(c.kind, list(c.keys), list(c.values)) for i, c in self.layers.items()}
        twin._reordered = list(self._reordered)
        twin._streams, twin._computed, twin.on_gpu = dict(self._streams), dict(self._computed), self.on_gpu
        return twin

    @property
    def layout(self) -> KVLayout:
        """Layout of the layers."""
        kinds = tuple(self.layers[i].kind if i in self.layers else None for i in range(max(self.layers) + 1))
        return KVLayout(kinds, next(iter(self.layers.values())).keys[0].dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensors keep allocated."""
        return _allocated(tensor for tensors in self._tensors() for tensor in tensors)

    def on_device(self) -> KeptOnDevice | None:
        """Return the GPU memory that the tensors keep allocated, or None."""
        gpus = [device for device, stream in self._streams.items() if not stream.on_host]
        nbytes = _allocated(tensor for tensors in self._tensors() for tensor in tensors if tensor.device in gpus)
        return KeptOnDevice(nbytes, gpus[0]) if nbytes else None

    def pairs(self, row: int, start: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer's keys and values on the CPU, `[heads, count, dim]`, of a row's positions from `start`."""
        for captured in self.layers.values():
            keys, values = (
                _tokens_from(tensors, row, slice(None), start, count) for tensors in (captured.keys, captured.values)
            )
            yield keys.cpu(), values.cpu()

    def packer(
        self, shape: SegmentShape, row: int, start: int, groups: Sequence[BlockGroup] | None = None
    ) -> Callable[[], Iterator[Group]]:
        """Return a function that packs a segment's KV cache groups (None: all) one by one, after the work noted so far.

        The segment's first token is the captured position `start`. Each group is packed on its first layer's device, on
        the side stream, and copied to the host at once. A yielded group is valid until the next one is requested.
        """
        captured = self.fork()

        def block_groups() -> Iterator[Group]:
            for event in captured._computed.values():
                event.synchronize()  # wait in the writer's thread, not on the side stream, which also uploads blocks
            staging: Staging | None = None
            last = max(captured.layers)
            for block_group in shape.block_groups if groups is None else groups:
                first = block_group.parts[0]
                device = captured.layers[first.layer].part(first)[0].device
                stream = captured._streams[device]
                device = torch.device("cpu") if stream.on_host else device
                with stream.copying():
                    size = shape.chunks_in(block_group), block_group.block_bytes
                    blocks = torch.zeros(size, dtype=torch.uint8, device=device)
                    for part in block_group.parts:
                        heads = slice(part.first_head, part.first_head + part.heads)
                        tensors = captured.layers[part.layer].part(part)
                        tokens = _tokens_from(tensors, row, heads, start, shape.tokens)
                        # what is not finite in any layer is not in the last one
                        if part.layer == last and tokens.element_size() > 1 and not bool(tokens.isfinite().all()):
                            raise KVRefusedError(NOT_FINITE)
                        shape.pack(blocks, block_group, part, tokens.to(device))
                if stream.on_host:
                    yield blocks
                    continue
                staging = staging or Staging(int(np.diff(shape.group_offsets).max()))
                packed = staging.bring_down(stream, blocks)
                del blocks
                yield packed

        return block_groups

    def _tensors(self) -> Iterator[list[torch.Tensor]]:
        for captured in self.layers.values():
            yield captured.keys
            yield captured.values


class SegmentTable(dict[bytes, str]):
    """Segments by the prefix hashes that they store, for sequences that are recorded at the same time.

    Without it, a prefix of several sequences would be stored once for each. Thread-safe.
    """

    _MOST_HASHES = 1 << 16

    def add(self, prefix_hashes: Iterable[bytes], segment: str) -> None:
        """Note that a segment stores these prefix hashes."""
        if len(self) > self._MOST_HASHES:
            self.clear()
        self.update(dict.fromkeys(prefix_hashes, segment))

    def forget(self, segments: Collection[str]) -> None:
        """Forget segments that are not stored, or no longer."""
        for prefix_hash in [key for key, segment in list(self.items()) if segment in segments]:
            self.pop(prefix_hash, None)


def _tokens_from(tensors: list[torch.Tensor], row: int, heads: slice, start: int, count: int) -> torch.Tensor:
    """Return `count` tokens, `[heads, count, dim]`, from position `start` of the concatenated tensors."""
    pieces = [t[row, heads] for t in tensors]
    joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return joined[:, start : start + count]


def _last_positions(tensors: list[torch.Tensor], count: int) -> torch.Tensor:
    """Return a copy of the last `count` positions of the concatenated tensors."""
    pieces: list[torch.Tensor] = []
    for tensor in reversed(tensors):
        pieces.insert(0, tensor[:, :, -count:])
        count -= pieces[0].shape[2]
        if not count:
            break
    return torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0].clone()


def _allocated(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
