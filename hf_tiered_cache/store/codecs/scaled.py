"""Codecs with 8 bits for each number, integers or floating point, and a scale for each token and head."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from .base import Field


class Scaled(ABC):
    """Base class of 8-bit codecs.

    A number is decoded as its code times the scale of its token and head. The scale is the largest magnitude of the
    token in that head, divided by `largest`. Scales are float32, since scales of bfloat16 tensors exceed the range of
    float16. With 128 dims per head, scales are 3 % of the bytes. If a token has non-finite numbers in a head, the whole
    token is decoded as NaN in that head: it would corrupt the model's output anyway, and must not become finite.
    """

    lossless = False
    largest: float
    """Magnitude of the largest code."""
    code_dtype: torch.dtype
    """Dtype of the stored codes. It must support indexing on every device."""

    def fields(self, dtype: torch.dtype, dim: int) -> tuple[Field, ...]:
        return Field(self.code_dtype, dim), Field(torch.float32, 1)

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = tensor.float()
        most = wide.abs().amax(-1, keepdim=True) if tensor.shape[-1] else wide.new_zeros(*wide.shape[:-1], 1)
        limits = torch.finfo(torch.float32)
        # limited so that neither the division by a scale nor the largest code times the scale overflows
        scales = (most / self.largest).clamp_(limits.tiny, limits.max / self.largest * (1 - limits.eps))
        finite = most.isfinite()
        scales.masked_fill_(~finite, torch.nan)
        return self._round((wide / scales).masked_fill_(~finite, 0)), scales

    def decode(self, fields: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        codes, scales = fields
        return self._widen(codes).mul_(scales).to(dtype)

    @abstractmethod
    def _round(self, numbers: torch.Tensor) -> torch.Tensor:
        """Round `numbers`, float32 and, up to rounding, at most `largest` in magnitude, to the nearest codes."""

    @abstractmethod
    def _widen(self, codes: torch.Tensor) -> torch.Tensor:
        """Return a float32 copy of the codes."""


class Int8(Scaled):
    """Codec to integers from -127 to 127. The error is at most 1/254 of the token's largest magnitude in that head."""

    name = "int8"
    largest = 127.0
    code_dtype = torch.int8

    def _round(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.round_().to(torch.int8)

    def _widen(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.to(torch.float32)


class Fp8(Scaled):
    """Codec to float8 e4m3 (`torch.float8_e4m3fn`): a relative error of at most 1/16, or a small absolute error.

    Codes are stored as uint8, since some devices have no indexing kernels for float8.
    """

    name = "fp8"
    largest = 448.0
    code_dtype = torch.uint8

    def _round(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clamp_(-self.largest, self.largest).to(torch.float8_e4m3fn).view(torch.uint8)

    def _widen(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).to(torch.float32)
