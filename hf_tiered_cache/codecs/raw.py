"""Codec that stores numbers unchanged."""

from __future__ import annotations

import torch

from .base import Field


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
