"""Small JSON files that say what a store's segments are to its users: written whole or not at all, believed little."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import FormatError, NewerFormatError

_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What reading JSON of any content may raise."""


@contextmanager
def understood(data: bytes, newest: int, what: str) -> Iterator[dict[str, Any]]:
    """What a record's JSON says, for a body that makes something of it.

    Args:
        newest: the newest format that this version knows.
        what: that it should be a record of, as "a document".

    Raises:
        FormatError: it is none, or the body could make nothing of it. NewerFormatError: it is of a newer format.
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
    """Whether these may be times, in seconds since 1970."""
    return all(type(value) in (int, float) and 0 <= value < 1e12 for value in values)  # type: ignore[operator]
