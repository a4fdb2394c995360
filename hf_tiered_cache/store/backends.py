"""Backends by name: a folder, or a place of a plug-in that an address such as `s3://bucket/prefix` names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigError
from ..plugins import Registry
from .backend import SegmentBackend
from .engines import Engine, open_engine
from .folder import FolderBackend

Opener = Callable[[str], SegmentBackend]
"""Function that opens the place at an address. Raises ConfigError or StoreError if there can be none."""
_ADDRESS = re.compile(r"([A-Za-z]\w*)://.*", re.DOTALL)
_MEMBERS = sorted(
    {*SegmentBackend.__annotations__, *(name for name in vars(SegmentBackend) if not name.startswith("_"))}
)

BACKENDS: Registry[Opener] = Registry(
    "backend", "hf_tiered_cache.backends", {}, lambda name, part: "" if callable(part) else "it cannot be called"
)
"""Openers of backends by the scheme of their addresses, those of plug-ins included."""


def register_backend(scheme: str, opener: Opener) -> None:
    """Add a backend: `KVStore("scheme://...")` calls `opener` with the whole address.

    Raises:
        ConfigError: The scheme is invalid or taken, or `opener` cannot be called.
    """
    BACKENDS.register(scheme, opener)


def folder_of(address: str | os.PathLike[str]) -> Path | None:
    """Return the resolved path of a folder, or None for the address of another backend.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(address, str | os.PathLike):
        raise ConfigError(f"a store is a folder or an address, as a str or Path, not {address!r}")
    if not os.fspath(address):
        raise ConfigError("the path of the store is empty; pass a folder, or '.' for the current folder")
    if isinstance(address, str) and _ADDRESS.fullmatch(address):
        return None
    return Path(address).expanduser().resolve()  # independent of later changes of the working directory


def open_backend(address: str | os.PathLike[str] | None, backend: object, engine: str | Engine) -> SegmentBackend:
    """Open the backend of a store.

    Args:
        address: folder, or the address of a registered backend. None to use `backend`.
        backend: an open backend. None to use `address`.
        engine: I/O engine of a folder.

    Raises:
        ConfigError: not exactly one of both is given, the address has an unknown scheme, or the backend lacks members.
        StoreError: there is no store, and none can be created.
    """
    if (address is None) == (backend is None):
        raise ConfigError("pass either the path of a store or backend=..., not " + ("both" if backend else "neither"))
    if address is not None and (folder := folder_of(address)) is not None:
        return FolderBackend(folder, open_engine(engine))
    if engine != "auto":
        raise ConfigError("engine is an option of stores in folders; other backends read by themselves")
    if address is not None:
        backend = _opener(str(address))(str(address))
    if missing := [name for name in _MEMBERS if not hasattr(backend, name)]:
        raise ConfigError(f"{type(backend).__name__} is not a backend: it lacks {', '.join(missing)}")
    assert backend is not None
    return backend  # type: ignore[return-value]  # checked above


def _opener(address: str) -> Opener:
    match = _ADDRESS.fullmatch(address)
    scheme = match[1] if match else ""
    if scheme not in BACKENDS:
        choices = f"there are: {', '.join(BACKENDS)}" if len(BACKENDS) else "none is registered"
        raise ConfigError(f"unknown backend {scheme!r} in the address {address!r}; {choices}")
    return BACKENDS[scheme]
