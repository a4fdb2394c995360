"""Host and device tiers for blocks: pools of buffer slots within byte budgets, and their eviction policies."""
