"""Blocks in host and device memory: fixed slot pools within byte budgets, and who stays in them.

A new eviction policy is one file here and one row in `POLICIES`.
"""

from __future__ import annotations

from ..errors import ConfigError
from .attention import AttentionGuided, ImportanceGuided
from .lfu import LFU
from .lru import LRU
from .policy import EvictionPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "attention": AttentionGuided,
    "importance": ImportanceGuided,
}


def make_policy(name: str) -> EvictionPolicy:
    """The policy called `name`. Raises ConfigError if there is none."""
    if name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}; there are: {', '.join(POLICIES)}")
    return POLICIES[name]()
