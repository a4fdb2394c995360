"""What choices are made from stays in memory, and is not read again: keys in eight bits, or indexes of keys."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch

KeyOwner = tuple[str, int, int, str]
"""Segment id, layer, a checksum of what the segment contains, and what is made of the layer's keys."""


class Resident(Protocol):
    """What is made of a segment's keys at one layer."""

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True)
class CoarseKeys:
    """Keys before their rotation, one scale for each token and head.

    Args:
        codes: int8 `[heads, tokens, dim]`.
        scales: float32 `[heads, tokens, 1]`: a key is its code times this.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor) -> CoarseKeys:
        """Of keys `[heads, tokens, dim]`."""
        wide = keys.float()
        scales = wide.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny) / 127
        return cls((wide / scales).round_().to(torch.int8), scales)

    def write(self, target: torch.Tensor, first: int = 0) -> None:
        """Fill `target`, `[heads, n, dim]`, with the keys of the n tokens from `first` on."""
        some = slice(first, first + target.shape[1])
        target.copy_(self.codes[:, some].float().mul_(self.scales[:, some]))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def device(self) -> torch.device:
        return self.codes.device


class ResidentKeys:
    """Keys of segments, or indexes of them, by segment and layer, within a budget; the least recently used go first.

    Args:
        budget: bytes, on all devices together.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.allocated = 0
        self._keys: OrderedDict[tuple[KeyOwner, torch.device], Resident] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, owner: KeyOwner, device: torch.device) -> Any:
        """What is there of `owner` on `device`, or None."""
        with self._lock:
            if (found := self._keys.get((owner, device))) is not None:
                self._keys.move_to_end((owner, device))
            return found

    def admit(self, owner: KeyOwner, keys: Resident) -> None:
        """Keep `keys` if they fit."""
        name = owner, keys.device
        with self._lock:
            if name in self._keys or keys.nbytes > self.budget:
                return
            self._keys[name] = keys
            self.allocated += keys.nbytes
            while self.allocated > self.budget:
                self.allocated -= self._keys.popitem(last=False)[1].nbytes

    def forget(self, segments: Collection[str]) -> None:
        """These segments are gone."""
        with self._lock:
            for name in [name for name in self._keys if name[0][0] in segments]:
                self.allocated -= self._keys.pop(name).nbytes

    def segments(self) -> set[str]:
        """Those of which it holds keys."""
        with self._lock:
            return {owner[0] for owner, _ in self._keys}

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._keys.clear()
            self.allocated = 0
