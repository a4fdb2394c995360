"""Codec with 8 bits for each number: integers."""

from __future__ import annotations

import torch

from .scaled import Scaled


class Int8(Scaled):
    """Codec to integers from -127 to 127. The error is at most 1/254 of the token's largest magnitude in that head."""

    name = "int8"
    largest = 127.0
    code_dtype = torch.int8

    def _round(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.round_().to(torch.int8)

    def _widen(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.to(torch.float32)
