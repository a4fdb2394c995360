"""The codec interface: how a tensor of keys or values becomes the fields that a block holds, and comes back."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Field(NamedTuple):
    """One of the tensors that a codec makes of keys or values: so many numbers of a dtype for each token and head."""

    dtype: torch.dtype
    dim: int


class Codec(Protocol):
    """Stands between tensors and the bytes of a block.

    A token of a head is coded by itself: what it becomes depends on no other, so fields can be cut, moved and picked
    token by token before they are decoded. Equal tensors become equal bytes, on every machine.
    """

    name: str
    """As `KVStore(codec=...)` and the headers of segments have it."""
    lossless: bool
    """Whether what comes back is what went in, in every bit."""

    def fields(self, dtype: torch.dtype, dim: int) -> tuple[Field, ...]:
        """The fields of a tensor of this dtype, with so many numbers for each token and head."""

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The fields of `tensor`, `[..., dim]`: `[..., field.dim]` each."""

    def decode(self, fields: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        """The reverse: `[..., dim]` in `dtype`, on the fields' device."""
