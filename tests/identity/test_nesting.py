"""Nested objects: a part of an inner object is told apart from an equal part of the outer one."""

from __future__ import annotations

import pytest
from descriptions import with_activation
from torch import nn
from torch.nn import functional

from hf_tiered_cache.identity import fingerprint


class Inner:
    pass


class Outer:
    def __init__(self, holder):
        self.inner = Inner()
        vars(self if holder == "outer" else self.inner)["scale"] = 3.0

    def __call__(self, x):
        return functional.silu(x) * getattr(self.inner, "scale", 1.0)


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def nested(holder):
    if holder == "outer":
        return nn.Sequential(Residual(nn.SiLU()), nn.Tanh())
    return nn.Sequential(Residual(nn.SiLU(), nn.Tanh()))


@pytest.mark.parametrize("make", [Outer, nested])
def test_a_part_of_an_inner_object_is_no_part_of_the_outer_one(make):
    outer, inner = (with_activation(make(holder)) for holder in ("outer", "inner"))
    assert fingerprint(outer) != fingerprint(inner)
