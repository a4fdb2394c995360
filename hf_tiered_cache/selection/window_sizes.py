"""Window sizes by layer and head: 2D window scaling (KVDRIVE, Section 5.2).

The benefit of a larger window differs between heads. A profile holds the benefit and cost of each size for each layer
and head. The choice of sizes with the largest benefit within a budget is a multiple-choice knapsack problem. As in the
paper, greedy upgrades choose for large models and an exact search for small ones. This module adds upgrades that skip
sizes, which give the greedy choice a bound, and a dynamic program. The program is exact for large models, too, if costs
have a common divisor (all windows have the same B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from .window_slots import HitCounts, Window

SIZES = (1, 2, 3, 4)
_MOST_STATES = 1 << 28  # states of the dynamic program, one byte each


class Trace:
    """Candidates of the decoding steps of one request with one row, for a profile: see `ByIndex.trace`."""

    def __init__(self) -> None:
        self._pools: dict[int, list[np.ndarray]] = {}  # layer -> one int32 [heads, M] per step

    def __call__(self, layer: int, pool: np.ndarray) -> None:
        """Record the candidates of one step of a layer.

        Args:
            layer: number of the layer.
            pool: candidate chunks, int64 `[heads, M]`, best first; in the first step only the B chosen ones.
        """
        self._pools.setdefault(layer, []).append(pool.astype(np.int32))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with recorded candidates, ascending."""
        return tuple(sorted(self._pools))

    @property
    def num_columns(self) -> int:
        """Number B of chunks that each head attends to per step; 0 if nothing was recorded."""
        return next((pools[0].shape[1] for pools in self._pools.values()), 0)

    def pools(self) -> np.ndarray:
        """Return all candidates, int32 `[steps, layers, heads, M]`, as the input of `measure`.

        M is the largest number of candidates. Steps with fewer candidates are padded with a chosen one. This has no
        effect, since a window keeps all chosen entries.
        """
        layer_pools = [self._pools[layer] for layer in self.layers]
        max_candidates = max(pool.shape[1] for pools in layer_pools for pool in pools)
        padded_pools = [
            [
                np.concatenate([pool, pool[:, :1].repeat(max_candidates - pool.shape[1], axis=1)], axis=1)
                for pool in pools
            ]
            for pools in layer_pools
        ]
        return np.array(padded_pools).swapaxes(0, 1)


@dataclass(frozen=True, eq=False)
class WindowProfile:
    """Benefits and costs of windows of each size.

    Args:
        sizes: window sizes as multiples of B, ascending.
        benefits: bytes not fetched per step, compared with a window that keeps nothing, float64 `[layers, heads,
            sizes]`.
        costs: entries in device memory, rising with the size, int64 `[layers, heads, sizes]`.

    Raises:
        ConfigError: the shapes do not match, the sizes are not ascending, or the costs are negative or do not rise.
    """

    sizes: tuple[int, ...]
    benefits: np.ndarray
    costs: np.ndarray

    def __post_init__(self) -> None:
        if self.benefits.ndim != 3 or self.benefits.shape != self.costs.shape:
            raise ConfigError("a profile must have one benefit and one cost for each layer, head and size")
        if not self.sizes or self.benefits.shape[2] != len(self.sizes) or sorted(set(self.sizes)) != [*self.sizes]:
            raise ConfigError(
                f"a profile of {self.benefits.shape[2]} sizes requires as many sizes in ascending order, not "
                f"{self.sizes}"
            )
        if (self.costs < 0).any() or (np.diff(self.costs, axis=2) <= 0).any():
            raise ConfigError("costs must not be negative, and must increase with the window size")

    def benefit(self, sizes: np.ndarray) -> float:
        """Return the bytes saved per step by a choice of sizes, `[layers, heads]`."""
        return float(self._of(self.benefits, sizes).sum())

    def cost(self, sizes: np.ndarray) -> int:
        """Return the entries in device memory that a choice of sizes, `[layers, heads]`, needs."""
        return int(self._of(self.costs, sizes).sum())

    def _of(self, table: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return np.take_along_axis(table, np.searchsorted(self.sizes, sizes)[:, :, None], axis=2)


def uniform_sizes(profile: WindowProfile, budget: int) -> np.ndarray:
    """Return the largest size that fits for all heads, int64 `[layers, heads]`: the baseline for a choice by head.

    Args:
        profile: benefits and costs of the sizes.
        budget: total number of entries.

    Raises:
        ConfigError: the smallest size does not fit.
    """
    _room_for_upgrades(profile, budget)
    totals = profile.costs.sum(axis=(0, 1))
    return np.full(profile.benefits.shape[:2], profile.sizes[int(np.flatnonzero(totals <= budget)[-1])], np.int64)


def greedy_sizes(profile: WindowProfile, budget: int) -> np.ndarray:
    """Choose sizes by greedy upgrades, int64 `[layers, heads]`.

    All heads start with the smallest size. The upgrade with the largest ratio of benefit to cost among those that fit
    is applied until none fits. An upgrade may skip sizes, so that upgrades follow the concave hull of a head's sizes as
    long as all fit. The total benefit is below the optimum by less than the benefit of one upgrade: the first on the
    hulls that did not fit. If benefits are concave and all upgrades cost the same, the choice is optimal.

    Args:
        profile: benefits and costs of the sizes.
        budget: total number of entries.

    Raises:
        ConfigError: the smallest sizes do not fit.
    """
    room = _room_for_upgrades(profile, budget)
    layers, heads, sizes = profile.benefits.shape
    benefits, costs = profile.benefits.reshape(-1, sizes), profile.costs.reshape(-1, sizes)  # [layers · heads, sizes]
    size_indices = np.zeros(len(costs), np.int64)  # indices of sizes
    while True:
        gains = benefits - np.take_along_axis(benefits, size_indices[:, None], axis=1)
        cost = costs - np.take_along_axis(costs, size_indices[:, None], axis=1)
        fits = (cost > 0) & (cost <= room) & (gains > 0)
        if not fits.any():
            return np.asarray(profile.sizes, np.int64)[size_indices].reshape(layers, heads)
        best = int(np.where(fits, gains / np.maximum(cost, 1), 0).argmax())  # ties: first head, smallest size
        head, size = divmod(best, sizes)
        room -= int(cost[head, size])
        size_indices[head] = size


def exhaustive_sizes(profile: WindowProfile, budget: int) -> np.ndarray:
    """Find the sizes with the largest benefit, int64 `[layers, heads]`, by dynamic programming over the budget.

    Args:
        profile: benefits and costs of the sizes.
        budget: total number of entries.

    Raises:
        ConfigError: the smallest sizes do not fit, or the product of heads and units of the budget is too large. A unit
            is the greatest common divisor of the upgrade costs.
    """
    layers, heads, sizes = profile.benefits.shape
    extra = (profile.costs - profile.costs[:, :, :1]).reshape(-1, sizes)  # [layers · heads, sizes], above the smallest
    gain = profile.benefits.reshape(-1, sizes)
    unit, units = _units(profile, budget)
    if len(extra) * (units + 1) > _MOST_STATES:
        raise ConfigError(
            f"{len(extra)} heads and {units} units of memory are too many for an exact search; use the greedy search"
        )
    best = np.zeros(units + 1)  # index: available units; value: largest benefit of the heads so far
    choice = np.zeros((len(extra), units + 1), np.int8)
    for head in range(len(extra)):
        previous_best, best = best, best + gain[head, 0]
        for size in range(1, sizes):
            spent_units = int(extra[head, size]) // unit
            if spent_units > units:
                break
            value = previous_best[: units + 1 - spent_units] + gain[head, size]
            improved = value > best[spent_units:]
            choice[head, spent_units:][improved] = size
            best[spent_units:][improved] = value[improved]
    size_indices = np.zeros(len(extra), np.int64)
    remaining_units = units
    for head in reversed(range(len(extra))):
        size_indices[head] = choice[head, remaining_units]
        remaining_units -= int(extra[head, size_indices[head]]) // unit
    return np.asarray(profile.sizes, np.int64)[size_indices].reshape(layers, heads)


def best_sizes(profile: WindowProfile, budget: int) -> np.ndarray:
    """Find the sizes with the largest benefit, int64 `[layers, heads]`: exactly if feasible, otherwise greedily.

    Args:
        profile: benefits and costs of the sizes.
        budget: total number of entries.

    Raises:
        ConfigError: the smallest sizes do not fit.
    """
    is_feasible = profile.costs[:, :, 0].size * (_units(profile, budget)[1] + 1) <= _MOST_STATES
    return exhaustive_sizes(profile, budget) if is_feasible else greedy_sizes(profile, budget)


def measure(
    pools: np.ndarray,
    num_columns: int,
    entry_bytes: int,
    policy: str = "lookahead",
    sizes: Sequence[int] = SIZES,
    skip: int = 0,
) -> WindowProfile:
    """Compute the profile of a recorded trace: the bytes that windows of each size would have saved.

    Args:
        pools: candidates of each step, best first, the B chosen ones first; integers `[steps, layers, heads, M]`.
        num_columns: B, the number of chunks that each head attends to per step.
        entry_bytes: bytes of one chunk of one head, keys and values.
        policy: eviction policy of the windows.
        sizes: multiples of B to measure, ascending, at least 1.
        skip: number of initial steps that fill the windows and are not counted.

    Raises:
        ConfigError: no step remains to be counted, or a size is below 1.
    """
    steps, layers, heads, _ = pools.shape
    if not 0 <= skip < steps:
        raise ConfigError(f"{skip} of {steps} steps cannot be skipped")
    if min(sizes, default=0) < 1:
        raise ConfigError("window sizes must be at least 1, because an empty window saves nothing")
    num_chunks = int(pools.max()) + 1
    benefits = np.empty((layers, heads, len(sizes)))
    for layer in range(layers):
        for index, size in enumerate(sizes):
            window = Window(num_columns, np.full(heads, size * num_columns), num_chunks, policy)
            initial_hits = replay(window, pools[:skip, layer])
            final_hits = replay(window, pools[skip:, layer])
            hits = (final_hits.in_columns - initial_hits.in_columns) + (final_hits.from_aside - initial_hits.from_aside)
            benefits[layer, :, index] = hits * entry_bytes / (steps - skip)
    costs = np.broadcast_to(np.asarray(sizes, np.int64) * num_columns, benefits.shape).copy()
    return WindowProfile(tuple(sizes), benefits, costs)


def replay(window: Window, pools: np.ndarray) -> HitCounts:
    """Apply the steps of a trace, integers `[steps, heads, M]`, to a window and return all its hit counts."""
    for pool in pools.astype(np.int64, copy=False):
        window.commit(window.plan(pool[:, : window.num_columns], pool))
    return window.hits


def _units(profile: WindowProfile, budget: int) -> tuple[int, int]:
    """Return the greatest common divisor of upgrade costs, in entries, and the number of such units to spend."""
    extra = profile.costs - profile.costs[:, :, :1]
    unit = max(int(np.gcd.reduce(extra.ravel())), 1)
    return unit, min(_room_for_upgrades(profile, budget), int(extra[:, :, -1].sum())) // unit


def _room_for_upgrades(profile: WindowProfile, budget: int) -> int:
    """Return the entries of the budget that the smallest windows leave.

    Raises:
        ConfigError: the smallest windows do not fit.
    """
    base_entries = int(profile.costs[:, :, 0].sum())
    if base_entries > budget:
        raise ConfigError(f"windows of the smallest size need {base_entries} entries, but the budget is {budget}")
    return budget - base_entries
