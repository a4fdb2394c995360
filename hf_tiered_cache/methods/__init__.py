"""The methods: how a prompt's KV is cut, planned and restored. One file and one row in `METHODS` each."""

from __future__ import annotations

from ..errors import ConfigError
from .base import Method
from .baselines import H2O, AttentionStore, Recompute
from .contiguous_kv import ContiguousKV
from .exact import Exact
from .impress import Impress

METHODS: dict[str, type[Method]] = {
    "exact": Exact,
    "contiguous_kv": ContiguousKV,
    "impress": Impress,
    "recompute": Recompute,
    "attention_store": AttentionStore,
    "h2o": H2O,
}

__all__ = ["H2O", "METHODS", "AttentionStore", "ContiguousKV", "Exact", "Impress", "Method", "Recompute", "make_method"]


def make_method(method: Method | str | None) -> Method:
    """A method given as itself, by name, or as None for exact reuse. Raises ConfigError if there is none."""
    if method is None:
        return Exact()
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}; there are: {', '.join(METHODS)}")
    return METHODS[method]()
