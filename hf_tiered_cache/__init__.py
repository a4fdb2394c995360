"""KV cache for Hugging Face `generate()` that keeps KV beyond the request, in memory and on disk."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .store.faults import mark_lines

if TYPE_CHECKING:
    from .errors import (
        CacheMismatchError,
        ConfigError,
        ConversationInUseError,
        EngineUnavailableError,
        FormatError,
        IntegrityError,
        LostKVError,
        OtherFormatError,
        QuotaError,
        StoreBusyError,
        StoreClosedError,
        StoreError,
        TieredCacheError,
        UnsupportedModelError,
    )
    from .kvstore import KVStore
    from .methods import METHODS, Exact, Method
    from .operations.precompute import Lookup
    from .operations.prompt import Passage, Prompt, build_prompt
    from .patches.attach import attach, detach
    from .stats import PassageStats, RequestStats, StoreStats
    from .store.geometry import Geometry
    from .tiered_cache import TieredCache, TieredSession, tiered

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "CacheMismatchError",
    "ConfigError",
    "ConversationInUseError",
    "EngineUnavailableError",
    "Exact",
    "FormatError",
    "Geometry",
    "IntegrityError",
    "KVStore",
    "Lookup",
    "LostKVError",
    "Method",
    "OtherFormatError",
    "Passage",
    "PassageStats",
    "Prompt",
    "QuotaError",
    "RequestStats",
    "StoreBusyError",
    "StoreClosedError",
    "StoreError",
    "StoreStats",
    "TieredCache",
    "TieredCacheError",
    "TieredSession",
    "UnsupportedModelError",
    "attach",
    "build_prompt",
    "detach",
    "tiered",
]

_ELSEWHERE = {
    "METHODS": "methods",
    "Exact": "methods",
    "Geometry": "store.geometry",
    "KVStore": "kvstore",
    "Lookup": "operations.precompute",
    "Method": "methods",
    "Passage": "operations.prompt",
    "PassageStats": "stats",
    "Prompt": "operations.prompt",
    "RequestStats": "stats",
    "StoreStats": "stats",
    "TieredCache": "tiered_cache",
    "TieredSession": "tiered_cache",
    "attach": "patches.attach",
    "build_prompt": "operations.prompt",
    "detach": "patches.attach",
    "tiered": "tiered_cache",
}
"""Submodules of the public names; names not listed here are in `errors`. Each name is imported on first access, so
listing a store on the command line does not import torch."""

if find_spec("fcntl") is None:
    raise ImportError(
        "hf_tiered_cache needs Linux or another POSIX system, because processes share a store through file locks; on "
        "Windows, use it within WSL 2"
    )
mark_lines()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_ELSEWHERE.get(name, 'errors')}", __name__), name)
    globals()[name] = value  # later accesses bypass this function
    return value


def __dir__() -> list[str]:
    return [*sorted(__all__), "__version__"]
