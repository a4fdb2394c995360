"""Eight bits for each number, in equal steps."""

from __future__ import annotations

import torch

from .scaled import Scaled


class Int8(Scaled):
    """Whole numbers from -127 to 127: no number is off by more than 1/254 of its token's largest in that head."""

    name = "int8"
    largest = 127.0
    code_dtype = torch.int8

    def _round(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.round_().to(torch.int8)

    def _widen(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.to(torch.float32)
