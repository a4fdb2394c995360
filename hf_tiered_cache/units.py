"""Conversion between numbers of bytes and sizes in text; no other module does this."""

from __future__ import annotations

import re

import humanize

from .errors import ConfigError

_SIZE = re.compile(r"\d+|\d*\.?\d+ *(?![a-z]*bits?$)[a-z]+", re.IGNORECASE | re.ASCII)
"""A whole number of bytes, or a number and a unit; units of bits are not matched."""


def parse_bytes(size: int | str, name: str) -> int:
    """Return a size in bytes.

    Args:
        size: An int, or a string such as "10GiB" (2^30 each), "10GB" or "10G" (10^9); case does not matter.
        name: Name of the setting, for the error message.

    Raises:
        ConfigError: The size is not valid.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    plain = isinstance(size, int) and not isinstance(size, bool)
    if plain or (isinstance(size, str) and _SIZE.fullmatch(size.strip())):
        try:
            return int(TypeAdapter(ByteSize).validate_python(size))
        except ValidationError:
            pass
    raise ConfigError(
        f"{name}={size!r} is not a valid size; pass bytes as an int, or a string such as '10GiB' or '500MB'"
    )


def format_bytes(nbytes: float) -> str:
    """Return `nbytes` in binary units, such as "1.5 MiB"."""
    return humanize.naturalsize(nbytes, binary=True)
