"""Eight bits for each number, in steps that grow with it."""

from __future__ import annotations

import torch

from .scaled import Scaled


class Fp8(Scaled):
    """float8 e4m3 (`torch.float8_e4m3fn`): a number is off by at most 1/16 of itself, small ones by little.

    Codes are stored as uint8, since indexing has no kernels for float8 on all devices.
    """

    name = "fp8"
    largest = 448.0
    code_dtype = torch.uint8

    def _round(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clamp_(-self.largest, self.largest).to(torch.float8_e4m3fn).view(torch.uint8)

    def _widen(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).to(torch.float32)
