"""Whether restoring is expected to be quicker than computing, by what was measured and by where the blocks lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from .calibrations import PrefixCosts
from .restore.plan import Plan
from .restore.prefetch import units_of
from .tiers.residency import Residency


def pays(plan: Plan, costs: PrefixCosts, residency: Residency, device_of: Callable[[int], torch.device]) -> bool:
    """Whether a plan is expected to take no longer than computing what it restores.

    Blocks in a tier that was not measured count as free: what is not known to be slow is restored.

    Args:
        plan: that restores whole tokens.
        costs: of a token, for a prefix of this length.
        residency: knows where blocks lie.
        device_of: gives the device of a layer.
    """
    nbytes: Counter[str] = Counter()
    for unit in units_of(plan):
        size, device = unit.block_group.block_bytes, device_of(unit.block_group.layers[0])
        for tier, blocks in residency.where(unit.reader.owner(unit.block_group.index), unit.chunks, device).items():
            nbytes[tier] += blocks * size
    rows = sum(len(group.rows) for group in plan.groups)
    tokens = plan.restored_tokens * len(plan.groups) / rows  # rows that are alike are restored once
    token = sum(costs.restore.get(tier, 0.0) * size for tier, size in nbytes.items()) / max(1, sum(nbytes.values()))
    return tokens * token <= plan.restored_tokens * costs.compute
