"""Host and device tiers for blocks: pools of buffer slots within byte budgets, and their eviction policies.

To add an eviction policy, add a module to this package and an entry to `POLICIES`.
"""

from __future__ import annotations

from ..errors import ConfigError, unknown_name
from .scores import LFU, LRU, AttentionGuided, EvictionPolicy, ImportanceGuided

POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "attention": AttentionGuided,
    "importance": ImportanceGuided,
}


def make_policy(name: str) -> EvictionPolicy:
    """Create the eviction policy called `name`. Raises ConfigError if there is none."""
    if name not in POLICIES:
        raise ConfigError(unknown_name("eviction policy", name, POLICIES))
    return POLICIES[name]()
