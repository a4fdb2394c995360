"""Sizes as people write and read them: the one place where bytes become text, and text bytes."""

from __future__ import annotations

import re

import humanize

from .errors import ConfigError

_SIZE = re.compile(r"\d+|\d*\.?\d+ *(?![a-z]*bits?$)[a-z]+", re.IGNORECASE | re.ASCII)
"""A whole number of bytes, or a number and a unit; not one of bits."""


def parse_bytes(size: int | str, name: str) -> int:
    """A size as bytes.

    Args:
        size: an int, or a string such as "10GiB" (2^30 each), "10GB" or "10G" (10^9); case does not matter.
        name: what the size is called where it was asked for.

    Raises:
        ConfigError: it is not a valid size.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    plain = isinstance(size, int) and not isinstance(size, bool)
    if plain or (isinstance(size, str) and _SIZE.fullmatch(size.strip())):
        try:
            return int(TypeAdapter(ByteSize).validate_python(size))
        except ValidationError:
            pass
    raise ConfigError(
        f"{name}={size!r} is not a valid size; write bytes as an int, or a string such as '10GiB' or '500MB'"
    )


def format_bytes(nbytes: float) -> str:
    """`nbytes` in binary units, as "1.5 MiB"."""
    return humanize.naturalsize(nbytes, binary=True)
