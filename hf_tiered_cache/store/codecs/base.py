"""Codec interface, and the codec that stores numbers unchanged.

A codec encodes a tensor of keys or values to the fields that a block holds, and decodes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch

from ...errors import ConfigError


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


def checked_encode(codec: Codec, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Encode a tensor, `[..., dim]`, and check the fields.

    Raises:
        ConfigError: The codec returned fields of other dtypes or shapes than its `fields` says.
    """
    encoded = codec.encode(tensor)
    if codec.lossless:  # only `Raw` is: plug-ins cannot be
        return encoded
    if not isinstance(encoded, tuple):
        raise ConfigError(f"{codec.name}.encode returns {type(encoded).__name__}, not a tuple of tensors")
    leading = tensor.shape[:-1]
    expected = [(field.dtype, (*leading, field.dim)) for field in codec.fields(tensor.dtype, tensor.shape[-1])]
    if [(field.dtype, field.shape) for field in encoded] != expected:
        raise ConfigError(
            f"{codec.name}.encode returns {_list_of(encoded)} for {_form(tensor)}, "
            f"and fields says [{', '.join(f'{dtype} {list(shape)}' for dtype, shape in expected)}]"
        )
    return encoded


def checked_decode(codec: Codec, fields: tuple[torch.Tensor, ...], dtype: torch.dtype, dim: int) -> torch.Tensor:
    """Decode fields to `[..., dim]` in `dtype`, and check the result.

    Raises:
        ConfigError: The codec returned another dtype or shape.
    """
    decoded = codec.decode(fields, dtype)
    if codec.lossless:  # a check would take longer than `Raw`
        return decoded
    expected = (*fields[0].shape[:-1], dim)
    if decoded.shape != expected or decoded.dtype != dtype:
        raise ConfigError(
            f"{codec.name}.decode returns {_form(decoded)} for {_list_of(fields)}, not {dtype} {list(expected)}"
        )
    return decoded


def _form(tensor: torch.Tensor) -> str:
    """Return the dtype and the shape of a tensor, for a message."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def _list_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return the dtypes and the shapes of tensors, for a message."""
    return f"[{', '.join(map(_form, tensors))}]"


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
