"""Conversion between numbers of bytes and sizes in text; no other module does this."""

from __future__ import annotations

import re
from decimal import Decimal

from .errors import ConfigError

_SIZE = re.compile(r"(\d+|\d*\.?\d+(?= *[a-z])) *([a-z]*)", re.IGNORECASE | re.ASCII)
"""A whole number of bytes, or a number and a unit."""
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtpe", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


def parse_bytes(size: int | str, name: str) -> int:
    """Return a size in bytes.

    Args:
        size: An int, or a string such as "10GiB" (2^30 each), "10GB" or "10G" (10^9); case does not matter.
        name: Name of the setting, for the error message.

    Raises:
        ConfigError: The size is not valid.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match and (unit := match[2].lower()) in _UNITS:
        return int(Decimal(match[1]) * _UNITS[unit])
    raise ConfigError(
        f"{name}={size!r} is not a valid size; pass bytes as an int, or a string such as '10GiB' or '500MB'"
    )


def format_bytes(nbytes: float) -> str:
    """Return `nbytes` in binary units, such as "1.5 MiB"."""
    import humanize  # with rich, only needed to print: measurements run without both

    return humanize.naturalsize(nbytes, binary=True)
