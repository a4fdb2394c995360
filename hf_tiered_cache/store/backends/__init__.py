"""Backends by name: a folder, or a place that an address such as `s3://bucket/prefix` names.

Each client library has one module, which is imported when an address names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from types import NoneType
from typing import Any
from urllib.parse import urlsplit

from ...errors import ConfigError, StoreError, TieredCacheError, with_type
from ...plugins import Registry, ignored_member
from ..backend import ANSWERS, SegmentBackend
from ..engines import Engine, open_engine
from ..folder import FolderBackend, SharedFolderBackend, check_store
from ..objects import ObjectBackend, ObjectRecords
from ..root import StoreRoot
from ..settings import folder_of, scheme_of, without_secrets

Opener = Callable[[str], SegmentBackend]
"""Function that opens the place at an address. Raises ConfigError or StoreError if there can be none."""
_METHODS = sorted(name for name in vars(SegmentBackend) if not name.startswith("_"))
_MEMBERS = [*SegmentBackend.__annotations__, *_METHODS]
_OVERRIDABLE = (*ANSWERS, "is_reachable", "clean_up", "locked", "close")
"""Methods of `ObjectBackend` that a subclass may define. The others call each other by their names."""
_ATTRIBUTES: dict[str, Any] = {
    **{"place": str, "records": ObjectRecords, "catalogue": (StoreRoot, NoneType), "reads_with": str},
    **dict.fromkeys(("writable", "reads_device", "bytes_read", "is_closed", "is_used"), int),
}
"""Types of the attributes of `ObjectBackend`."""


def _in_module(module: str, name: str, needs: str) -> Opener:
    """Return an opener that imports the backend of a client library when an address names it."""

    def open_place(address: str) -> SegmentBackend:
        try:
            opener: Opener = getattr(import_module(f".{module}", __name__), name)
        except ImportError as error:
            raise ConfigError(f"{scheme_of(address)}:// requires {needs} ({error})") from error
        return opener(address)

    return open_place


_OBJECT_STORE = _in_module("object_store", "ObjectStoreBackend", "obstore; pip install 'hf-tiered-cache[remote]'")
_REDIS = _in_module("redis", "RedisBackend", "redis; pip install 'hf-tiered-cache[redis]'")
_BUILT_IN = {
    **dict.fromkeys(("s3", "gs", "az", "memory"), _OBJECT_STORE),
    **dict.fromkeys(("redis", "rediss"), _REDIS),
    "file": SharedFolderBackend,
    "hf": _in_module("hub", "HubBackend", "huggingface_hub; pip install huggingface_hub"),
    "sqlite": _in_module("sqlite", "SQLiteBackend", "a Python with sqlite3"),
    "mooncake": _in_module(
        "mooncake",
        "MooncakeBackend",
        "mooncake-transfer-engine; pip install 'hf-tiered-cache[mooncake]', or mooncake-transfer-engine-non-cuda on "
        "machines without CUDA",
    ),
}


def _fault(name: str, opener: object) -> str:
    if isinstance(opener, type) and not all(hasattr(opener, method) for method in _METHODS):
        return "it does not derive from ObjectBackend"
    if missing_methods := getattr(opener, "__abstractmethods__", None):
        return f"it lacks {', '.join(sorted(missing_methods))}"
    try:
        signature(opener).bind("address")  # type: ignore[arg-type]  # raises TypeError for what cannot be called
    except TypeError as error:
        return f"it cannot be called with an address alone ({error})"
    except ValueError:  # some functions written in C have no signature
        pass
    return ""


BACKENDS: Registry[Opener] = Registry("backend", "hf_tiered_cache.backends", _BUILT_IN, _fault)
"""Openers of backends by the scheme of their addresses, those of plug-ins included."""


def register_backend(scheme: str, opener: Opener) -> None:
    """Add a backend: `KVStore("scheme://...")` calls `opener` with the whole address.

    Raises ConfigError if the scheme is invalid or taken, or `opener` cannot be called with an address alone, or is a
    class that is abstract or no backend.
    """
    BACKENDS.register(scheme, opener)


def open_backend(address: str | os.PathLike[str] | None, backend: object, engine: str | Engine) -> SegmentBackend:
    """Open the backend of a store: that at `address`, a folder or the address of a registered backend, or `backend`.

    `engine` is the I/O engine of a folder. Raises ConfigError if not exactly one of both is given, the address has an
    unknown scheme, or the backend lacks members; StoreError if there is no store, and none can be created.
    """
    if (address is None) == (backend is None):
        raise ConfigError(
            "pass either the path of a store or backend=..., " + ("not both" if backend else "one of them")
        )
    if address is not None and (folder := folder_of(address)) is not None:
        return FolderBackend(folder, open_engine(engine))
    if engine != "auto":
        raise ConfigError("engine is an option of stores in folders; other backends read by themselves")
    if address is not None:
        backend = _open(address := str(address))
        if backend is None:
            raise ConfigError(
                f"the opener of the backend {scheme_of(address)!r} returned None; it must return the backend"
            )
    if isinstance(backend, str):
        raise ConfigError("backend must be a backend, not its address; pass an address as the first argument")
    if isinstance(backend, type):
        raise ConfigError(f"backend must be an instance, not the class {backend.__name__}; use {backend.__name__}(...)")
    _check_usable(backend)
    return backend  # type: ignore[return-value]  # checked above


def open_remote(address: str | ObjectBackend, make: bool = True) -> ObjectBackend:
    """Open the remote of a store: an address, or an open backend. Raises ConfigError if it is neither.

    Without `make`, a missing or empty folder does not become a store: StoreError is raised.
    """
    remote: object = address
    if isinstance(address, str):
        if not scheme_of(address):
            raise ConfigError(f"remote must be an address such as s3://bucket/prefix, not {address!r}")
        if not make and scheme_of(address) == "file":
            check_store(address)
        remote = _open(address)
    if not isinstance(remote, ObjectBackend):
        raise ConfigError(f"remote must be an address or an ObjectBackend, not {with_type(remote)}")
    _check_usable(remote)
    return remote


def _check_usable(backend: object) -> None:
    """Raise ConfigError if a backend was closed or belongs to a store, or if its members are not those of one."""
    name = type(backend).__name__
    if missing_members := [member for member in _MEMBERS if not hasattr(backend, member)]:
        is_derived = isinstance(backend, ObjectBackend)
        advice = "call super().__init__(place) in its constructor" if is_derived else "derive it from ObjectBackend"
        raise ConfigError(f"{name} is not a backend; {advice}: it lacks {', '.join(missing_members)}")
    if not isinstance(backend, ObjectBackend):
        return
    redefined_names = [key for key, kinds in _ATTRIBUTES.items() if not isinstance(getattr(backend, key), kinds)]
    for member in set(_METHODS) - set(_OVERRIDABLE):
        if getattr(getattr(backend, member), "__func__", None) is not getattr(ObjectBackend, member):
            redefined_names.append(member)
    if redefined_names:
        raise ConfigError(
            f"{name} redefines {', '.join(sorted(redefined_names))}, which ObjectBackend needs; use other names"
        )
    if fault := ignored_member(type(backend), _OVERRIDABLE):
        raise ConfigError(f"{name} cannot be used as a backend: {fault}")
    if backend.is_closed:
        raise ConfigError(f"this {name} was closed with a store that used it; create another one")
    if backend.is_used:
        raise ConfigError(f"this {name} is used by another store; create one for each store")
    for member in _OVERRIDABLE:
        base_signature = signature(getattr(ObjectBackend, member))
        _, *parameters = base_signature.parameters.values()
        by_name = {parameter.name: None for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY}
        by_place = [None] * (len(parameters) - len(by_name))
        try:
            signature(getattr(backend, member)).bind(*by_place, **by_name)
        except TypeError as error:
            raise ConfigError(f"{name}.{member} must accept {base_signature}: {error}") from None


def _open(address: str) -> object:
    """Open the place at an address. Raises ConfigError or StoreError."""
    scheme, shown = scheme_of(address), without_secrets(address)
    try:
        urlsplit(address)
    except ValueError as error:
        raise ConfigError(f"{shown} is no address: {error}") from None
    if scheme not in BACKENDS:
        raise ConfigError(
            f"unknown backend {scheme!r} in the address {shown!r}; there are: {', '.join(BACKENDS)}. Install the "
            "package that provides it, or register it"
        )
    opener = BACKENDS[scheme]
    try:
        return opener(address)
    except (TieredCacheError, MemoryError):
        raise
    except Exception as error:  # whatever a client library raises
        reason = f"{type(error).__name__}: {error}".replace(address, shown)
        raise StoreError(f"the backend {scheme!r} cannot open {shown}: {reason}") from error
