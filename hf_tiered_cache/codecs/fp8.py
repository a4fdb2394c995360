"""Codec with 8 bits for each number: floating point."""

from __future__ import annotations

import torch

from .scaled import Scaled


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
