"""Small JSON files with user-level metadata of segments. They are written atomically, and validated when read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import FormatError, NewerFormatError

_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Exceptions raised when decoding invalid JSON records."""


@contextmanager
def understood(data: bytes, newest: int, what: str) -> Iterator[dict[str, Any]]:
    """Yield the parsed JSON of a record, and convert decoding errors of the body to FormatError.

    Args:
        data: content of the record file.
        newest: newest record format that this version reads.
        what: expected subject of the record, for the error message, such as "a document".

    Raises:
        FormatError: the data is not such a record, or the body failed to decode it.
        NewerFormatError: the record has a newer format.
    """
    try:
        facts = json.loads(data)
        version = facts.pop("format")
        if isinstance(version, int) and version > newest:
            raise NewerFormatError(f"it is a record of format {version}")
        yield facts
    except _UNREADABLE as error:
        raise FormatError(f"it is no record of {what}: {error!r}") from None


def are_moments(*values: object) -> bool:
    """Return whether all values are valid Unix times in seconds."""
    return all(type(value) in (int, float) and 0 <= value < 1e12 for value in values)  # type: ignore[operator]
