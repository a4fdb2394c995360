"""Checks of the JSON in files of a store. Every value that is read from a file passes one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from ..errors import FormatError
from . import HASH_BYTES

_MOST_SECONDS = 1e12
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions raised when decoding invalid JSON."""
_T = TypeVar("_T")


@contextmanager
def decoding(fault: str) -> Iterator[None]:
    """Convert errors of the body, which decodes JSON, to FormatError.

    Args:
        fault: beginning of the error message, such as "the header cannot be read".
    """
    try:
        yield
    except _UNREADABLE as error:
        raise FormatError(f"{fault}: {error!r}") from error


# --- values; each function returns the checked value, or raises FormatError


def whole(value: Any, least: int = 0, most: int = (1 << 63) - 1) -> int:
    """Check an integer."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise FormatError(f"{value!r} is not an integer from {least} to {most}")
    return value


def seconds(value: Any) -> float:
    """Check a time in Unix seconds."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MOST_SECONDS:  # also NaN
        raise FormatError(f"{value!r} is not a time")
    return float(value)


def text(value: Any) -> str:
    """Check a string."""
    if not isinstance(value, str):
        raise FormatError(f"{value!r} is not a string")
    return value


def hexadecimal(value: Any, nbytes: int = HASH_BYTES) -> str:
    """Check a string of `2 * nbytes` hexadecimal digits."""
    if not isinstance(value, str) or re.fullmatch(f"[0-9a-f]{{{2 * nbytes}}}", value) is None:
        raise FormatError(f"{value!r} is not a name of {2 * nbytes} hexadecimal digits")
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "str": text,
    "int": whole,
    "float": seconds,
    "tuple[str, ...]": lambda names: tuple(map(hexadecimal, names)),
    "Mapping[str, str]": lambda texts: {text(name): text(value) for name, value in texts.items()},
}
"""Check of a dataclass field, by its type."""


def checked(schema: type[_T], facts: dict[str, Any]) -> _T:
    """Create a dataclass instance from JSON, with a check of each field that follows from its type.

    Args:
        schema: dataclass with fields of the types in `_CHECKS`.
        facts: decoded JSON object. Its other keys are ignored.

    Raises:
        FormatError: a value has another type, or is out of bounds. KeyError: a field without a default value is
            missing.
    """
    stored = [field for field in fields(schema) if field.name in facts or field.default is MISSING]  # type: ignore[arg-type]
    return schema(**{field.name: _CHECKS[str(field.type)](facts[field.name]) for field in stored})
