"""Codec interface, and the codec that stores numbers unchanged.

A codec encodes a tensor of keys or values to the fields that a block holds, and decodes them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Field(NamedTuple):
    """Tensor of encoded keys or values: `dim` numbers of a dtype for each token and head."""

    dtype: torch.dtype
    dim: int


class Codec(Protocol):
    """Encoder and decoder between tensors and the bytes of a block.

    Each token of each head is encoded independently. So fields can be sliced, moved and indexed by token before they
    are decoded. Equal tensors are encoded to equal bytes on every machine.
    """

    name: str
    """Name in `KVStore(codec=...)` and in segment headers."""
    lossless: bool
    """True if decoding restores every bit of the input."""

    def fields(self, dtype: torch.dtype, dim: int) -> tuple[Field, ...]:
        """Return the fields of a tensor with the given dtype, and `dim` numbers for each token and head."""

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Encode `tensor`, `[..., dim]`, to its fields, `[..., field.dim]` each."""

    def decode(self, fields: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        """Decode fields to `[..., dim]` in `dtype`, on the fields' device."""


class Raw:
    """Lossless codec with the tensor as its only field."""

    name = "raw"
    lossless = True

    def fields(self, dtype: torch.dtype, dim: int) -> tuple[Field, ...]:
        return (Field(dtype, dim),)

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor,)

    def decode(self, fields: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        return fields[0]
