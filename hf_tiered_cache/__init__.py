"""A KV cache for Hugging Face `generate()` that outlives the request."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import TieredCache as TieredCache
    from .errors import CacheMismatchError as CacheMismatchError
    from .errors import ConfigError as ConfigError
    from .errors import EngineUnavailableError as EngineUnavailableError
    from .errors import FormatError as FormatError
    from .errors import IntegrityError as IntegrityError
    from .errors import NewerFormatError as NewerFormatError
    from .errors import QuotaError as QuotaError
    from .errors import StoreBusyError as StoreBusyError
    from .errors import StoreClosedError as StoreClosedError
    from .errors import StoreError as StoreError
    from .errors import TieredCacheError as TieredCacheError
    from .errors import UnsupportedModelError as UnsupportedModelError
    from .geometry import Geometry as Geometry
    from .kvstore import KVStore as KVStore
    from .methods import METHODS as METHODS
    from .methods import Exact as Exact
    from .methods import Method as Method
    from .patches import attach as attach
    from .patches import detach as detach
    from .stats import RequestStats as RequestStats
    from .stats import StoreStats as StoreStats

__version__ = "0.1.0"

_MODULES = {
    "METHODS": "methods",
    "CacheMismatchError": "errors",
    "ConfigError": "errors",
    "EngineUnavailableError": "errors",
    "Exact": "methods",
    "FormatError": "errors",
    "Geometry": "geometry",
    "IntegrityError": "errors",
    "KVStore": "kvstore",
    "Method": "methods",
    "NewerFormatError": "errors",
    "QuotaError": "errors",
    "RequestStats": "stats",
    "StoreBusyError": "errors",
    "StoreClosedError": "errors",
    "StoreError": "errors",
    "StoreStats": "stats",
    "TieredCache": "cache",
    "TieredCacheError": "errors",
    "UnsupportedModelError": "errors",
    "attach": "patches",
    "detach": "patches",
}
"""Where each public name stands. It is imported when it is first asked for: the command line needs no torch to list."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value  # from now on without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
