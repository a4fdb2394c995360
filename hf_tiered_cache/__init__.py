"""A KV cache for Hugging Face `generate()` that outlives the request."""

from .cache import TieredCache
from .errors import (
    CacheMismatchError,
    ConfigError,
    EngineUnavailableError,
    FormatError,
    IntegrityError,
    NewerFormatError,
    QuotaError,
    StoreClosedError,
    StoreError,
    TieredCacheError,
    UnsupportedModelError,
)
from .geometry import Geometry
from .kvstore import KVStore
from .methods import METHODS, Exact, Method
from .patches import detach
from .session import TieredSession, attach, tiered
from .stats import RequestStats, StoreStats

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "CacheMismatchError",
    "ConfigError",
    "EngineUnavailableError",
    "Exact",
    "FormatError",
    "Geometry",
    "IntegrityError",
    "KVStore",
    "Method",
    "NewerFormatError",
    "QuotaError",
    "RequestStats",
    "StoreClosedError",
    "StoreError",
    "StoreStats",
    "TieredCache",
    "TieredCacheError",
    "TieredSession",
    "UnsupportedModelError",
    "attach",
    "detach",
    "tiered",
]
