"""Names of stores: the path of a folder, or an address such as `s3://bucket/prefix`. Imports nothing large."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from ..errors import ConfigError

_ADDRESS = re.compile(r"([A-Za-z]\w*)://.*", re.DOTALL)


def scheme_of(store: str | os.PathLike[str]) -> str:
    """Return the scheme of an address, such as "s3", or an empty string for a path."""
    match = _ADDRESS.fullmatch(store) if isinstance(store, str) else None
    return match[1] if match else ""


def folder_of(store: str | os.PathLike[str]) -> Path | None:
    """Return the resolved path of a folder, or None for the address of another backend.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(store, str | os.PathLike):
        raise ConfigError(f"a store is a folder or an address, as a str or Path, not {store!r}")
    if not os.fspath(store):
        raise ConfigError("the path of the store is empty; pass a folder, or '.' for the current folder")
    if scheme_of(store):
        return None
    return Path(store).expanduser().resolve()  # independent of later changes of the working directory


def without_secrets(address: str) -> str:
    """Return an address for messages: without user, password, and options, which can be a signature or a password."""
    if not scheme_of(address):
        return address
    try:
        parts = urlsplit(address)
    except ValueError:
        return f"{scheme_of(address)}://..."
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
