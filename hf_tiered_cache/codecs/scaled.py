"""The base of codecs of eight bits: a code for each number, and a scale for each token and head."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from .base import Field


class Scaled(ABC):
    """A number is its code times the scale of its token and head, which is the largest magnitude over `largest`.

    Scales are float32: those of bfloat16 tensors do not fit float16's range, and of a head of 128 dims they are 3 % of
    the bytes. A token whose numbers are not all finite comes back as NaN in that head: it would spoil the model's
    output anyhow, and must not be taken for numbers.
    """

    lossless = False
    largest: float
    """Magnitude of the largest code."""
    code_dtype: torch.dtype
    """Of the codes as they are stored: one that can be picked by index on every device."""

    def fields(self, dtype: torch.dtype, dim: int) -> tuple[Field, ...]:
        return Field(self.code_dtype, dim), Field(torch.float32, 1)

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = tensor.float()
        most = wide.abs().amax(-1, keepdim=True) if tensor.shape[-1] else wide.new_zeros(*wide.shape[:-1], 1)
        limits = torch.finfo(torch.float32)
        # no scale is so small that a division by it overflows, none so large that its largest code does
        scales = (most / self.largest).clamp_(limits.tiny, limits.max / self.largest * (1 - limits.eps))
        finite = most.isfinite()
        scales.masked_fill_(~finite, torch.nan)
        return self._round((wide / scales).masked_fill_(~finite, 0)), scales

    def decode(self, fields: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        codes, scales = fields
        return self._widen(codes).mul_(scales).to(dtype)

    @abstractmethod
    def _round(self, numbers: torch.Tensor) -> torch.Tensor:
        """The codes nearest to `numbers`, float32 and no larger than `largest` but for rounding."""

    @abstractmethod
    def _widen(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes as float32, a copy."""
