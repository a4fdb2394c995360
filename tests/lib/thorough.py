"""How many examples of a property a test takes: some by default, all with `--thorough` (make test-thorough)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

Value = TypeVar("Value")
FEW, THOROUGH = "few", "thorough"
"""Profiles of hypothesis: the same examples each time, so that who changes nothing breaks nothing, and many others."""
settings.register_profile(
    FEW,
    deadline=None,
    max_examples=16,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.register_profile(THOROUGH, parent=settings.get_profile(FEW), max_examples=1000, derandomize=False)


def amount(few: Value, many: Value) -> Value:
    """Return how many examples to take."""
    return many if settings.default.max_examples == settings.get_profile(THOROUGH).max_examples else few


def some(values: Iterable[Any], step: int = 2) -> list[Any]:
    """Return the values of a parameter: all of them with `--thorough`, by default the first of every `step`."""
    return [
        pytest.param(value, marks=pytest.mark.thorough if number % step else ()) for number, value in enumerate(values)
    ]


def pairs(first: Iterable[Any], second: Iterable[Any], shift: int = 0) -> list[Any]:
    """Return the products of two parameters, of which only `--thorough` takes all.

    By default, each of the `first` values comes once, and the `second` ones take turns.

    Args:
        first: Values of a parameter, at least as many as there are second ones.
        second: Values of another parameter.
        shift: Number of the second value that comes first.
    """
    second = list(second)
    return [
        pytest.param(a, b, marks=() if (i + shift) % len(second) == j else pytest.mark.thorough)
        for (i, a), (j, b) in product(enumerate(first), enumerate(second))
    ]
