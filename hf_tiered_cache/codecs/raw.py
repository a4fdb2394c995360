"""Numbers as the model computed them."""

from __future__ import annotations

import torch

from .base import Field


class Raw:
    """One field, which is the tensor."""

    name = "raw"
    lossless = True

    def fields(self, dtype: torch.dtype, dim: int) -> tuple[Field, ...]:
        return (Field(dtype, dim),)

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor,)

    def decode(self, fields: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        return fields[0]
